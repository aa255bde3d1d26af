"""The solver's answer: a layout for every value of a graph, and the layout each equation wants of its operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vescale_fn.sharding.graph import Eqn, Graph, Var
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import MeshShape

if TYPE_CHECKING:
    from vescale_fn.sharding.choice import AxisProblem, Choice


@dataclass(frozen=True, eq=False)
class Plan:
    """What the solver decided. Prints as inputs with roles, conversions with source lines, and messages.

    values: layout of each Var as its equation (or the caller) produces it, sub-programs' Vars included.
    operands: per equation, the layout required of each tensor operand slot; partition converts where it differs
        from the value's own.
    outputs: layout of each tensor output of the graph (None for constants and numbers).
    letters: per equation and mesh axis, the letter of its rule that the axis shards (absent: none).
    messages: what the user should know (gathers of something they sharded, ops without a rule, ...).
    roles: "data" or "state" of each input, as the solver was told.
    choices: what was decided on each axis and among what, for `explain`; empty in a plan read from a file.
    """

    mesh: MeshShape
    graph: Graph
    values: Mapping[Var, Layout]
    operands: Mapping[Eqn, tuple[Layout, ...]]
    outputs: tuple[Layout | None, ...]
    letters: Mapping[Eqn, Mapping[str, str]] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    roles: Mapping[Var, str] = field(default_factory=dict)
    choices: tuple[tuple[AxisProblem, Choice], ...] = ()

    def __str__(self) -> str:
        from vescale_fn.sharding.explain import plan_text  # which is written on plans

        return plan_text(self)
