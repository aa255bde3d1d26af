"""What moving data costs: bytes that a rank sends (ring algorithms) and bytes that it holds meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

from vescale_fn.sharding.comm import (
    AllGather,
    AllReduce,
    Broadcast,
    Comm,
    Exchange,
    Permute,
    PPermute,
    RaggedAllToAll,
    ReduceScatter,
    Slice,
    Step,
    ToPartial,
)
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, State, Whole


class Dtype(Protocol):
    """A torch or NumPy dtype."""

    @property
    def itemsize(self) -> int: ...


def sent(comm: Comm, after: Layout) -> float:
    """Elements that a rank sends in one collective whose result has layout `after`. Of a RaggedAllToAll, whose sizes
    are data, the most: all rows of its operand, which `after` is the layout of.

    >>> from vescale_fn.sharding.comm import AllGather
    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> sent(AllGather(("x",), 0), Layout.of(MeshShape(("x",), (4,)), (8, 2)))
    12.0
    """
    n, held = after.mesh.extent(comm.axes), after.max_local_numel
    match comm:
        case Slice() | ToPartial():
            return 0.0
        case AllReduce():
            return 2 * held * (n - 1) / n
        case ReduceScatter():  # of unequal parts a rank keeps its own, be it none
            return float(held * (n - 1) if after.is_even else min(held * (n - 1), _whole(comm, after)))
        case AllGather() if comm.units:  # the largest part, around the ring
            return held * max(comm.units) * (n - 1) / sum(comm.units)
        case Permute():
            return float(held)
        case PPermute(_, pairs):
            return float(held) if any(s != d for s, d in pairs) else 0.0
        case Broadcast() | RaggedAllToAll():
            return float(held) if n > 1 else 0.0
        case Exchange(axes, src, dst):
            return float(src.max_local_numel * _copies(axes, dst)) if axes else 0.0
        case _:
            return held * (n - 1) / n


def _whole(comm: Comm, after: Layout) -> int:
    """Elements of the operand of which the ranks get a part each."""
    return after.with_states(dict.fromkeys(comm.axes, WHOLE)).max_local_numel


def _copies(axes: tuple[str, ...], dst: Layout) -> int:
    """How many ranks want the part that a rank holds, without itself where all want it."""
    copies = dst.mesh.extent(tuple(a for a in axes if dst[a] == WHOLE))
    return copies - all(dst[a] == WHOLE for a in axes)


def chain_bytes(steps: Iterable[Step], dtype: Dtype) -> float:
    """Bytes that a rank sends in a chain of collectives."""
    return sum(sent(s.comm, s.layout) for s in steps) * dtype.itemsize


def peak_bytes(start: Layout, steps: Iterable[Step], dtype: Dtype) -> int:
    """Most bytes that a rank holds during a chain that begins in layout `start`: operand and result of one step."""
    held = [start.max_local_numel, *(s.layout.max_local_numel for s in steps)]
    return max([held[0], *(a + b for a, b in pairwise(held))]) * dtype.itemsize


def conversion_cost(src: State, dst: State, local_bytes: float, n: int) -> float:
    """Bytes that a rank sends to bring a value from one state to another along one axis of size `n`. `local_bytes`:
    bytes of the value when it is whole along the axis. Nothing but zeros becomes partial by itself: infinite.

    >>> from vescale_fn.sharding.layout import Shard
    >>> conversion_cost(Partial(), Shard(0), 80, 4), conversion_cost(Shard(0), Shard(1), 80, 4)
    (60.0, 15.0)
    """
    if src == dst or n == 1:
        return 0.0
    share = local_bytes * (n - 1) / n
    match src, dst:
        case _, Partial():
            return math.inf
        case Whole(), _:
            return 0.0
        case Partial(), Whole():
            return 2 * share
        case (Partial(), _) | (_, Whole()):
            return share
        case _:
            return share / n
