"""Parameters are gathered in groups, each while the step computes with the group before.

Partition puts a gather where its result is first read, and there everything waits for it. One group ahead, it overlaps
that work, for the memory of one more group.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from vescale_fn.passes.bucket import bucket_bytes, merged
from vescale_fn.passes.sources import prepared
from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllGather
from vescale_fn.sharding.graph import Eqn


def gather_ahead(program: Program, limit: int | None = None) -> Program:
    """AllGathers of inputs, over the same axes and dim and in the same phase, in groups of about `limit` bytes. Casts
    and views of what is gathered come with it."""
    graph = program.graph
    sources = prepared(graph)
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, e in enumerate(graph.eqns):
        if isinstance(e.op, AllGather) and len(e.operands) == 1 and e.operands[0] in sources:
            alike[e.op, e.operands[0].dtype, e.phase].append(i)
    starts: dict[int, list[Eqn]] = defaultdict(list)  # by the equation before which they start
    for found in alike.values():
        groups = _groups(found, [program.local_bytes(graph.eqns[i].outs[0]) for i in found], limit)
        for before, group in zip([groups[0], *groups], groups):
            members = [graph.eqns[i] for i in group]
            starts[before[0]] += [*(made for e in members for made in sources[e.operands[0]]), merged(members)]
    moved = {i for found in alike.values() for i in found}
    eqns = [[*starts[i], *([] if i in moved else [e])] for i, e in enumerate(graph.eqns)]
    once = dict.fromkeys(e for some in eqns for e in some)  # a cast is where it is first needed
    return replace(program, graph=replace(graph, eqns=tuple(once)))


def _groups(items: list[int], nbytes: list[int], limit: int | None) -> list[list[int]]:
    """`items` in order, in groups that are full at `limit` bytes."""
    limit = bucket_bytes(sum(nbytes)) if limit is None else limit
    groups, held = [[items[0]]], nbytes[0]
    for item, n in zip(items[1:], nbytes[1:]):
        if held >= limit:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += n
    return groups
