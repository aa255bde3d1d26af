"""What an operation makes of the states of its operands, axis by axis.

Ranks that compute the same function of the same values get the same value; anything that depends on a varying value
varies. Parts of a sum pass only through operations linear in them, which the factor rules know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vescale_fn.fx_graph import FILLS
from vescale_fn.regions import ops, texts
from vescale_fn.regions.moves import StateMove, move_of
from vescale_fn.regions.states import I, R, State, States, U, V, join
from vescale_fn.sharding.grammar import parse
from vescale_fn.sharding.graph import Eqn, Source, Var, op_name
from vescale_fn.tree import map_tensors


class Unreduced(texts.RegionError):
    """An operation that is not linear in an operand was given parts of a sum. op: its name; axis: of the sum."""

    def __init__(self, op: str, axis: str, source: Source = Source()) -> None:  # noqa: B008 - frozen
        super().__init__(texts.unreduced(op, [], axis, source))
        self.op, self.axis = op, axis

    def at(self, source: Source) -> Unreduced:
        """The same error, with the user's line."""
        return Unreduced(self.op, self.axis, source)


def infer(e: Eqn, states: Sequence[States], axes: Iterable[str], zeros: Sequence[bool] = ()) -> States:
    """The states of the results of an equation, for the manual axes given.

    states: of each tensor operand, in order. zeros: which operands are known to be zero, and so parts of any sum.
    Raises Unreduced where parts of a sum are given to an operation that is not linear in them.
    """
    if not e.outs:  # a question about shapes, or a print
        return {}
    move = move_of(e.op, e.args[1:])
    if move is not None:
        (given,) = states
        return {**({} if e.op is ops.TO_GLOBAL else dict.fromkeys(axes, I)), **_moved(e, move, given)}
    if e.op is ops.AXIS_INDEX:
        varying = ops.group_of(e.args[0]).names
        return {a: V if a in varying else I for a in axes}
    return {a: _state(e, [s.get(a, I) for s in states], a, zeros) for a in axes}


def _moved(e: Eqn, move: Any, given: States) -> dict[str, State]:
    group = ops.group_of(move.axes)
    if isinstance(move, StateMove):
        return {**given, **dict.fromkeys(group.names, move.ends[1])}
    if e.op is ops.TO_GLOBAL:
        return {a: s for a, s in given.items() if a not in group}
    return {**given, **boundary_states(move.spec, move.axes, e.operands[0].shape)}


def boundary_states(spec: str, axes: str, shape: tuple[int, ...]) -> dict[str, State]:
    """The states of what enters a region by this spec.

    >>> boundary_states("b/dp d {ct: tp}", "dp=2,tp=2,pp=2", (4, 3))
    {'dp': 'V', 'tp': 'R', 'pp': 'I'}
    """
    ops.boundary_layout(spec, axes, shape)  # raises where they do not fit
    parsed = parse(spec)
    pending: dict[str, State] = {a: R if entry.kind == "ct" else U for entry in parsed.state for a in entry.axes}
    # A spec says what varies by naming an axis, of one rank too.
    return {a: pending.get(a, V if a in parsed.axes else I) for a in ops.group_of(axes).names}


def _state(e: Eqn, states: Sequence[State], axis: str, zeros: Sequence[bool]) -> State:
    if U not in states:
        return join(states)
    op = out_of_place(e.op)
    if op in FILLS:  # reads nothing but the shape
        if FILLS[op](e.args) == 0:
            return U
        if op is e.op:
            return R
    elif op is torch.ops.aten.copy.default:  # what was there before counts for nothing
        if states[-1] == U:
            return U
    elif torch.Tag.inplace_view in getattr(e.op, "tags", ()) or _passes(replace(e, op=op), states, zeros):
        return U
    raise Unreduced(op_name(e.op), axis)


def _passes(e: Eqn, states: Sequence[State], zeros: Sequence[bool]) -> bool:
    """Whether an operation of parts of a sum gives the parts of the sum of its results."""
    summed = {i for i, s in enumerate(states) if s == U}
    free = {i for i, z in enumerate(zeros) if z}
    rest = [s for i, s in enumerate(states) if i not in summed | free]
    return V not in rest and any(summed <= group <= summed | free for group in _linear(e))


@lru_cache(maxsize=1024)
def out_of_place(op: Any) -> Any:
    """The operation that returns what this one writes into its first operand, where there is one; else itself.

    >>> out_of_place(torch.ops.aten.mul_.Tensor)
    <OpOverload(op='aten.mul', overload='Tensor')>
    """
    name = op._schema.name if isinstance(op, torch._ops.OpOverload) else ""
    if not name.startswith("aten::") or not name.endswith("_") or name.endswith("__"):
        return op
    packet = getattr(torch.ops.aten, name[len("aten::") : -1], None)
    return getattr(packet, op._overloadname, op)


def _linear(e: Eqn) -> list[frozenset[int]]:
    """Groups of operands in which an operation is linear."""
    from vescale_fn.sharding.rules import rule_for  # importing the tables takes as long as half of the package

    rule = rule_for(e)
    if rule is None:
        return []
    return [*rule.linear, *(frozenset({i}) for i in rule.through)]


def own_axes(e: Eqn) -> tuple[str, ...]:
    """The axes that an operation brings into play by itself."""
    if e.op is ops.AXIS_INDEX:
        return ops.group_of(e.args[0]).names
    return ops.group_of(e.args[1]).names if e.op is ops.TO_LOCAL else ()


def as_equation(op: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> tuple[Eqn, list[Tensor]]:
    """An operation under way as an equation, and its tensor operands in the order of the equation's."""
    tensors: list[Tensor] = []

    def var(t: Tensor) -> Var:
        tensors.append(t)
        return Var("x", tuple(t.shape), t.dtype)

    mapped, named = map_tensors(args, var), map_tensors(kwargs, var)
    results: list[Var] = []
    map_tensors(out, lambda t: results.append(Var("y", tuple(t.shape), t.dtype)))
    return Eqn(op, tuple(mapped), named, tuple(results)), tensors
