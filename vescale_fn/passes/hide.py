"""Work that a reduction does not need goes behind its start.

In tensor parallel backward the gradient of an activation is reduced, and everything waits for it; the gradients of the
weights, which nobody waits for, are computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vescale_fn.liveness import waits
from vescale_fn.program import Program
from vescale_fn.sharding.comm import COLLECTIVES, AllReduce, ReduceScatter
from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.work import is_heavy


def hide_waits(program: Program) -> Program:
    """Behind every reduction that has no work to hide behind, the heavy equations since the collective before that it
    does not depend on. None goes behind a second one: what it reads would live for too long."""
    graph = program.graph
    hidden = waits(graph)
    eqns: list[Eqn] = []
    since = 0  # where the equations since the last collective begin
    moved: set[Eqn] = set()
    for e in graph.eqns:
        if not isinstance(e.op, COLLECTIVES):
            eqns.append(e)
            continue
        waited_for = isinstance(e.op, (AllReduce, ReduceScatter)) and e not in hidden
        needed, others = _parted(eqns[since:], e, moved) if waited_for else ([], [])
        if any(map(is_heavy, others)):
            eqns[since:] = needed
            moved.update(others)
            eqns += [e, *others]
            since = len(eqns) - len(others)
        else:
            eqns.append(e)
            since = len(eqns)
    return replace(program, graph=replace(graph, eqns=tuple(eqns)))


def _parted(eqns: Sequence[Eqn], reduction: Eqn, moved: set[Eqn]) -> tuple[list[Eqn], list[Eqn]]:
    """The equations that must stay before the reduction, and the others, each in order."""
    read = set(reduction.reads)
    needed: list[Eqn] = []
    others: list[Eqn] = []
    for e in reversed(eqns):
        if e in moved or not read.isdisjoint(e.outs):
            read.update(e.reads)
            needed.append(e)
        else:
            others.append(e)
    return needed[::-1], others[::-1]
