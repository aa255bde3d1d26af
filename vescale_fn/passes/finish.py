"""What finishes a result comes last, in the order in which transfers arrive.

The loss is divided by its count, a parameter moved against its gradient: work behind a reduction, which no heavy work
waits for. Done where the trace has it, it would wait for a transfer that could go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vescale_fn.passes.common import is_pure
from vescale_fn.passes.first import SMALL, hides
from vescale_fn.passes.late import shows
from vescale_fn.program import Program
from vescale_fn.sharding.comm import COLLECTIVES, AllReduce, ReduceScatter
from vescale_fn.sharding.graph import Eqn, Var, has_effect


def finish_last(program: Program) -> Program:
    """Behind all heavy work go the light local operations on small values that depend on a reduction and that no heavy
    operation, and no collective, depends on. All that is behind heavy work is done in the order in which it can be:
    first what needs no transfer, the start of others included."""
    eqns = program.graph.eqns
    after = end_of_work(eqns)
    late = _finishing(program, eqns[:after])
    before = [e for e in eqns[:after] if e not in late]
    behind = [*(e for e in eqns[:after] if e in late), *eqns[after:]]
    turn = _turns(behind, arrivals([*before, *behind]))
    behind.sort(key=turn.__getitem__)
    return replace(program, graph=replace(program.graph, eqns=(*before, *behind)))


def _turns(eqns: Sequence[Eqn], arrives: Mapping[Var, int]) -> dict[Eqn, int]:
    """For each equation the transfer after which its turn comes. Effects keep their order, and what reads one that has
    waited for another comes after it."""
    turns: dict[Eqn, int] = {}
    made: dict[Var, int] = {}
    last = -1  # effect
    for e in eqns:
        turn = max((max(arrives.get(v, -1), made.get(v, -1)) for v in e.reads), default=-1)
        if has_effect(e):
            turn = last = max(turn, last)
        turns[e] = turn
        made.update(dict.fromkeys(e.outs, turn))
    return turns


def end_of_work(eqns: Sequence[Eqn]) -> int:
    """Where all heavy work is done."""
    return 1 + max((i for i, e in enumerate(eqns) if hides(e)), default=-1)


def arrivals(eqns: Sequence[Eqn]) -> dict[Var, int]:
    """The values that depend on a transfer which nothing but views reads until all heavy work is done, each with the
    position of the last one."""
    after = end_of_work(eqns)
    arrives: dict[Var, int] = {}
    over: set[int] = set()
    for i, e in enumerate(eqns):
        on = {arrives[v] for v in e.reads if v in arrives}
        if isinstance(e.op, COLLECTIVES):
            on = {i}
        elif i < after and not shows(e):
            over |= on
        if on:
            arrives.update(dict.fromkeys(e.outs, max(on)))
    return {v: i for v, i in arrives.items() if i not in over}


def _finishing(program: Program, eqns: Sequence[Eqn]) -> set[Eqn]:
    """Of these equations, the light ones on small values that depend on a reduction and that no others depend on."""
    found, needed = _behind_reductions(program, eqns), set[Var]()
    for e in reversed(eqns):
        if e not in found or not needed.isdisjoint(e.outs):
            found.discard(e)
            needed.update(e.reads)
    return found


def _behind_reductions(program: Program, eqns: Sequence[Eqn]) -> set[Eqn]:
    """Light local equations on small values that depend on the result of a reduction by others of their kind."""
    found: set[Eqn] = set()
    values: set[Var] = set()
    for e in eqns:
        if isinstance(e.op, (AllReduce, ReduceScatter)):
            values.update(e.outs)
        elif is_pure(e.op) and not hides(e) and not values.isdisjoint(e.reads) and _is_small(program, e):
            values.update(e.outs)
            found.add(e)
    return found


def _is_small(program: Program, e: Eqn) -> bool:
    """Whether operands and results of e may live longer. (A result that a kernel was not asked for has no layout.)"""
    return sum(program.local_bytes(v) for v in (*e.operands, *e.outs) if v in program.layouts) <= SMALL
