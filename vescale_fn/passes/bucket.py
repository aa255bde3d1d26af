"""Small collectives of one kind travel together.

A bucket stays open until it is full or something that matters reads one of its results, and is sent there: by then
every operand exists, and no operand can depend on a result of the same bucket. Views and elementwise operations of the
same phase do not matter: they wait with the bucket, and are computed behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllReduce, ReduceScatter
from vescale_fn.sharding.graph import Eqn, Var
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
    totals: Counter[Any] = Counter()
    for e in program.graph.eqns:
        if (key := _bucket_key(e)) is not None:
            totals[key] += program.local_bytes(e.operands[0])
    merger = _Merger(program, {key: bucket_bytes(n) if limit is None else limit for key, n in totals.items()})
    for e in program.graph.eqns:
        merger.add(e)
    for key in list(merger.open):
        merger.send(key)
    return replace(program, graph=replace(program.graph, eqns=tuple(merger.eqns)))


@dataclass(eq=False)
class _Bucket:
    members: list[Eqn] = field(default_factory=list)
    waiting: list[Eqn] = field(default_factory=list)  # equations that read results of the members
    nbytes: int = 0

    @property
    def phase(self) -> str:
        return self.members[0].phase


@dataclass(eq=False)
class _Merger:
    program: Program
    limits: Mapping[Any, int]
    eqns: list[Eqn] = field(default_factory=list)
    open: dict[Any, _Bucket] = field(default_factory=dict)
    owner: dict[Var, Any] = field(default_factory=dict)  # value that waits -> key of its bucket

    def add(self, e: Eqn) -> None:
        keys = list(dict.fromkeys(self.owner[v] for v in e.reads if v in self.owner))
        if len(keys) == 1 and _can_wait(e, self.open[keys[0]].phase):
            self.open[keys[0]].waiting.append(e)
            self.owner.update(dict.fromkeys(e.outs, keys[0]))
            return
        for key in keys:
            self.send(key)
        key = _bucket_key(e)
        if key is None:
            self.eqns.append(e)
            return
        into = self.open.setdefault(key, _Bucket())
        into.members.append(e)
        into.nbytes += self.program.local_bytes(e.operands[0])
        self.owner[e.outs[0]] = key
        if into.nbytes >= self.limits[key]:
            self.send(key)

    def send(self, key: Any) -> None:
        """Close a bucket: its collective, then what waited for it."""
        done = self.open.pop(key)
        for e in (*done.members, *done.waiting):
            for v in e.outs:
                self.owner.pop(v)
        self.eqns.append(merged(done.members))
        self.eqns += done.waiting


def _can_wait(e: Eqn, phase: str) -> bool:
    return isinstance(e.op, torch._ops.OpOverload) and e.phase == phase and not is_heavy(e)


def _bucket_key(e: Eqn) -> Any:
    """Collectives with equal keys may travel together; None for what travels alone."""
    if isinstance(e.op, (AllReduce, ReduceScatter)) and len(e.operands) == 1:
        return (e.op, e.operands[0].dtype, e.phase)
    return None


def merged(members: list[Eqn]) -> Eqn:
    """One collective in the place of several."""
    if len(members) == 1:
        return members[0]
    return replace(members[0], args=tuple(e.operands[0] for e in members), outs=tuple(e.outs[0] for e in members))
