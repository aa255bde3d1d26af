"""The authority: the states of every value of a finished graph, backward included, worked out again from its equations.

What the trace inserted is not trusted here. A promise that does not hold, parts of a sum in an operation that is not
linear in them, and a missing cast (an operand in another state than a collective says) are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale_fn.regions import ops, texts
from vescale_fn.regions.infer import Unreduced, boundary_states, infer, own_axes
from vescale_fn.regions.moves import StateMove, ToGlobal, move_of
from vescale_fn.regions.states import UNCHECKED, I, R, State, States, U, V, join
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var, is_view

# What may stand where a move or the edge of a region expects a state: it says less than the value is.
_FITS: Mapping[State, frozenset[State]] = {
    V: frozenset({V, I, R, UNCHECKED}),
    I: frozenset({I, R, UNCHECKED}),
    R: frozenset({R, I, UNCHECKED}),
    U: frozenset({U, UNCHECKED}),
    UNCHECKED: frozenset({V, I, R, U, UNCHECKED}),
}


def check(graph: Graph) -> dict[Var, States]:
    """The states of every value inside regions. Raises RegionError where they contradict each other."""
    walk = _Walk()
    walk.graph(graph)
    return walk.states


def infer_sub_program(op: Scan | Call, given: Sequence[States], axes: Any) -> list[States]:
    """The states of the results of a sub-program, from those of its tensor operands."""
    walk = _Walk()
    full = [{a: s.get(a, I) for a in axes} for s in given]
    return walk.sub_program(op, full, [False] * len(full))


@dataclass(eq=False)
class _Walk:
    states: dict[Var, States] = field(default_factory=dict)
    zeros: set[Var] = field(default_factory=set)

    def graph(self, graph: Graph) -> None:
        for e in graph.eqns:
            given = [self.states.get(v, {}) for v in e.operands]
            zeros = [v in self.zeros for v in e.operands]
            if isinstance(e.op, (Scan, Call)):
                results = self.sub_program(e.op, given, zeros)
            else:
                results = [self.equation(e, given, zeros)] * len(e.outs)
            self.states.update((v, s) for v, s in zip(e.outs, results) if s and v.is_tensor)
            if _is_zero(e) or (is_view(e) and all(zeros)):
                self.zeros.update(e.outs)

    def equation(self, e: Eqn, given: Sequence[States], zeros: Sequence[bool]) -> States:
        axes = dict.fromkeys([*(a for s in given for a in s), *own_axes(e)])
        move = move_of(e.op, e.args[1:])
        if move is not None:
            self.check_move(e, move, given[0], zeros[0])
        try:
            return infer(e, given, axes, zeros)
        except Unreduced as u:
            raise u.at(e.source) from None

    def check_move(self, e: Eqn, move: Any, given: States, zero: bool) -> None:
        """Raise unless the operand is in the state that the move, or the edge of the region, says."""
        if isinstance(move, StateMove):
            expected = dict.fromkeys(ops.group_of(move.axes).names, move.ends[0])
        elif isinstance(move, ToGlobal):
            expected = boundary_states(move.spec, move.axes, e.outs[0].shape)
        else:
            twice = sorted(given.keys() & ops.group_of(move.axes).names)
            if twice:
                raise texts.RegionError(texts.entered_twice(twice, e.source))
            return
        for axis, state in expected.items():
            found = given.get(axis, I)
            if found not in _FITS[state] and not (zero and state == U):
                raise texts.RegionError(texts.wrong_state(e, axis, state, found))

    def sub_program(self, op: Scan | Call, given: Sequence[States], zeros: Sequence[bool]) -> list[States]:
        """The states of the results. What a loop carries is in one state before, in and after it."""
        tensors = [v for v in op.body.inputs if v.is_tensor]
        at = {v: i for i, v in enumerate(tensors)}
        states, zero = list(given), list(zeros)
        first = op.num_consts if isinstance(op, Scan) else 0
        carried = range(first, first + op.num_carry) if isinstance(op, Scan) else range(0)
        while True:
            self.states.update((v, s) for v, s in zip(tensors, states))
            self.zeros.difference_update(tensors)
            self.zeros.update(v for v, z in zip(tensors, zero) if z)
            self.graph(op.body)
            changed = False
            for slot, out in zip(carried, op.body.outputs):
                v = op.body.inputs[slot]
                if v not in at or not isinstance(out, Var):
                    continue
                i, after = at[v], self.states.get(out, {})
                if zero[i] and out not in self.zeros:
                    zero[i], changed = False, True
                    states[i] = {a: U if after.get(a) == U else s for a, s in states[i].items()}
                    continue
                both = {a: _carried(states[i].get(a, I), after.get(a, I)) for a in {**states[i], **after}}
                if both != states[i]:
                    states[i], changed = both, True
            if not changed:
                return [self.states.get(v, {}) if isinstance(v, Var) else {} for v in op.body.outputs]


def _carried(before: State, after: State) -> State:
    return U if U in (before, after) else join([before, after])


def _is_zero(e: Eqn) -> bool:
    return e.op is torch.ops.aten.full.default and e.args[1] == 0 and not isinstance(e.args[1], Var)
