"""Small collectives of one kind travel together.

A bucket is sent where its last operand is made. It is full at a number of bytes; it also ends where something that
matters reads one of its results, and where it would make its members wait that have work to hide behind. Views and
elementwise operations of the same phase do not matter: they wait with the bucket, and are computed behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from vescale_fn.passes.first import hides
from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllReduce, ReduceScatter
from vescale_fn.sharding.graph import Eqn, Graph, Var
from vescale_fn.sharding.work import is_heavy

LARGEST = 25 * 2**20  # bytes, what DDP sends at once
SMALLEST = 2**20  # below, what a transfer costs does not depend on its size
PARTS = 4  # of which all but the last travel while others are computed


def bucket_bytes(total: int) -> int:
    """The size of a bucket when `total` bytes travel in a phase."""
    return min(LARGEST, max(SMALLEST, total // PARTS))


def bucket(program: Program, limit: int | None = None) -> Program:
    """AllReduces and ReduceScatters over the same axes, of the same kind, dtype and phase, merged into buckets of about
    `limit` bytes."""
    eqns = program.graph.eqns
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, e in enumerate(eqns):
        if (key := _bucket_key(e)) is not None:
            alike[key].append(i)
    work = [0, *accumulate(map(hides, eqns))]
    needed = {phase: _needed(program.graph, phase) for phase in {eqns[found[0]].phase for found in alike.values()}}
    sent: dict[Eqn, list[Eqn]] = {}  # by the last member
    for found in alike.values():
        nbytes = [program.local_bytes(eqns[i].operands[0]) for i in found]
        full = bucket_bytes(sum(nbytes)) if limit is None else limit
        for group in _groups(found, nbytes, needed[eqns[found[0]].phase], work, full):
            sent[eqns[group[-1]]] = [eqns[i] for i in group]
    return replace(program, graph=replace(program.graph, eqns=tuple(_sent(eqns, sent))))


def _bucket_key(e: Eqn) -> Any:
    """Collectives with equal keys may travel together; None for what travels alone."""
    if isinstance(e.op, (AllReduce, ReduceScatter)) and len(e.operands) == 1:
        return (e.op, e.operands[0].dtype, e.phase)
    return None


def _needed(graph: Graph, phase: str) -> list[int]:
    """For each equation, where something first reads its results that does not wait with a bucket of this phase."""
    n = len(graph.eqns)
    needed = [n] * n
    first: dict[Var, int] = {}
    for i, e in reversed(list(enumerate(graph.eqns))):
        needed[i] = min((first.get(v, n) for v in e.outs), default=n)
        here = needed[i] if _can_wait(e, phase) else i
        first.update((v, min(first.get(v, n), here)) for v in e.reads)
    return needed


def _can_wait(e: Eqn, phase: str) -> bool:
    return isinstance(e.op, torch._ops.OpOverload) and e.phase == phase and not is_heavy(e)


def _groups(
    found: Sequence[int], nbytes: Sequence[int], needed: Sequence[int], work: Sequence[int], full: int
) -> Iterator[list[int]]:
    """The collectives at positions `found` in buckets. work[i]: equations before i that can hide a transfer."""
    group: list[int] = []
    held, need, hidden = 0, len(needed), True
    for i, n in zip(found, nbytes):
        hides_alone = work[needed[i]] > work[i]
        exposed = hidden and hides_alone and work[min(need, needed[i])] == work[i]
        if group and (held >= full or need <= i or exposed):
            yield group
            group, held, need, hidden = [], 0, len(needed), True
        group.append(i)
        held, need, hidden = held + n, min(need, needed[i]), hidden and hides_alone
    yield group


def _sent(eqns: Sequence[Eqn], sent: Mapping[Eqn, list[Eqn]]) -> Iterator[Eqn]:
    """The equations with each bucket in the place of its last member, and what waits for it behind it."""
    held: set[Var] = set()  # values that are not there yet
    waiting: list[Eqn] = []
    members = {e for group in sent.values() for e in group}
    for e in eqns:
        if e in sent:
            yield merged(sent[e])
            held.difference_update(v for member in sent[e] for v in member.outs)
            still = []
            for w in waiting:
                if held.isdisjoint(w.reads):
                    held.difference_update(w.outs)
                    yield w
                else:
                    still.append(w)
            waiting = still
        elif e in members:
            held.update(e.outs)
        elif held.isdisjoint(e.reads):
            yield e
        else:
            waiting.append(e)
            held.update(e.outs)


def merged(members: list[Eqn]) -> Eqn:
    """One collective in the place of several."""
    if len(members) == 1:
        return members[0]
    return replace(members[0], args=tuple(e.operands[0] for e in members), outs=tuple(e.outs[0] for e in members))
