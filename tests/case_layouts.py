"""The cases of the rule machine as layouts of the product."""

from __future__ import annotations

import math

from rule_machine import Case, is_pending, kind_of

from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import Layout, Partial, Shard, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.rules.rule import Dims, Rule


def layout_of(mesh: MeshShape, rule: Rule, case: Case, v: Var, dims: Dims, slot: int | None = None) -> Layout:
    """The layout of an operand (`slot`) or a result under a case."""
    states: dict[str, State] = {}
    for axis, (name, choice) in enumerate(zip(mesh.names, case.choices)):
        where = [(d, letters.index(choice.letter)) for d, letters in enumerate(dims) if choice.letter in letters]
        if where:
            dim, at = where[0]
            major = math.prod(rule.sizes[x] for x in dims[dim][:at])
            outer = math.prod(case.sizes[i] for i in case.axes_of(choice.letter) if i < axis)
            size, ranks = rule.sizes[choice.letter], math.prod(case.sizes[i] for i in case.axes_of(choice.letter))
            states[name] = Shard(dim, major * outer, uneven=size if size % ranks else 0)
        elif slot in choice.partial or (slot is None and is_pending(rule, choice, dims)):
            states[name] = Partial(kind_of(rule, choice))
    return Layout.of(mesh, v.shape, states)
