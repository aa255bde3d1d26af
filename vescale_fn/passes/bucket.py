"""Small collectives of one kind travel together.

A bucket stays open until one of its results is read or it is full, and is sent there: by then every operand exists,
and no operand can depend on a result of the same bucket.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllReduce
from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.layout import Layout

BUCKET_BYTES = 25 * 2**20  # the size that DDP sends at once


def bucket(program: Program, limit: int = BUCKET_BYTES) -> Program:
    """AllReduces over the same axes, of the same kind, dtype and phase, merged into buckets of about `limit` bytes."""
    eqns: list[Eqn] = []
    open_: dict[Any, list[Eqn]] = {}
    owner: dict[Var, Any] = {}  # result of a waiting collective -> key of its bucket

    def flush(key: Any) -> None:
        members = open_.pop(key)
        for e in members:
            owner.pop(e.outs[0])
        eqns.append(members[0] if len(members) == 1 else _merged(members))

    for e in program.graph.eqns:
        for key in dict.fromkeys(owner[v] for v in e.reads if v in owner):
            if key in open_:
                flush(key)
        key = _bucket_key(e)
        if key is None:
            eqns.append(e)
            continue
        open_.setdefault(key, []).append(e)
        owner[e.outs[0]] = key
        if sum(_local_bytes(program, m.operands[0]) for m in open_[key]) >= limit:
            flush(key)
    for key in list(open_):
        flush(key)
    return replace(program, graph=replace(program.graph, eqns=tuple(eqns)))


def _bucket_key(e: Eqn) -> Any:
    if isinstance(e.op, AllReduce) and len(e.operands) == 1:
        return (e.op, e.operands[0].dtype, e.phase)
    return None


def _merged(members: list[Eqn]) -> Eqn:
    first = members[0]
    return replace(
        first,
        args=tuple(e.operands[0] for e in members),
        outs=tuple(e.outs[0] for e in members),
    )


def _local_bytes(program: Program, v: Var) -> int:
    layout: Layout = program.layouts[v]
    return layout.max_local_numel * int(v.dtype.itemsize)
