"""The parts of a layout as rectangles of the global tensor, which is what files hold.

A rank's part is one rectangle for an ordinary shard, several for a strided one (`(qkv h/tp k)` has one for each of q, k
and v), and none for an empty one. A part that is cut flat out of several dims falls apart into the rest of a row, whole
rows, and the beginning of a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from vescale_fn.sharding.layout import Layout, Ragged

Ranges = tuple[tuple[int, int], ...]  # (start, size) for each dim


@dataclass(frozen=True)
class Box:
    """A rectangle of the global tensor, and where a rank's local tensor has it.

    start, shape: in the dims of the global tensor.
    local: (start, size) for each dim of the local tensor, in which dims that are cut flat are one.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    local: Ranges

    def of(self, shard: Tensor) -> Tensor:
        """The view of a rank's local tensor that this box is, with the box's shape."""
        for dim, (start, size) in enumerate(self.local):
            shard = shard.narrow(dim, start, size)
        return shard.view(self.shape)


def boxes(layout: Layout, coords: Mapping[str, int]) -> list[Box]:
    """The rectangles that the rank at `coords` holds, in the order of its local tensor; none that is empty. Pending
    reductions do not matter.

    >>> from vescale_fn.sharding.layout import Shard
    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> fused = Layout.of(MeshShape(("tp",), (2,)), (2, 12), {"tp": Shard(1, pre=3)})
    >>> [(b.start, b.shape) for b in boxes(fused, {"tp": 1})]
    [((0, 2), (2, 2)), ((0, 6), (2, 2)), ((0, 10), (2, 2))]
    """
    flat = layout.flat
    pieces = [_pieces(flat.intervals(d, coords), sizes) for d, sizes in enumerate(_merged(layout))]
    found = []
    for choice in itertools.product(*pieces):
        ranges = tuple(r for globally, _ in choice for r in globally)
        found.append(Box(tuple(a for a, _ in ranges), tuple(n for _, n in ranges), tuple(local for _, local in choice)))
    return [b for b in found if math.prod(b.shape)]


def _merged(layout: Layout) -> list[tuple[int, ...]]:
    """For each dim of the local tensors the sizes of the global dims that it consists of."""
    last = {s.dim: s.last for s in layout.states if isinstance(s, Ragged) and s.last > s.dim}
    found, dim = [], 0
    while dim < layout.ndim:
        end = last.get(dim, dim) + 1
        found.append(layout.shape[dim:end])
        dim = end
    return found


def _pieces(runs: Ranges, sizes: tuple[int, ...]) -> list[tuple[Ranges, tuple[int, int]]]:
    """The rectangles of the runs (start, stop) of one local dim: ranges in its global dims, and its local range."""
    found, done = [], 0
    for start, stop in runs:
        for ranges in _rectangles(start, stop, sizes):
            length = math.prod(n for _, n in ranges)
            found.append((ranges, (done, length)))
            done += length
    return found


def _rectangles(start: int, stop: int, sizes: tuple[int, ...]) -> Iterator[Ranges]:
    """The elements start..stop-1 of a tensor of these sizes, in order, as rectangles.

    >>> list(_rectangles(2, 9, (3, 4)))
    [((0, 1), (2, 2)), ((1, 1), (0, 4)), ((2, 1), (0, 1))]
    """
    if start >= stop:
        return
    if len(sizes) == 1:
        yield ((start, stop - start),)
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:
        yield from (((last, 1), *r) for r in _rectangles(start - last * row, stop - last * row, sizes[1:]))
        return
    yield from (((first - 1, 1), *r) for r in _rectangles(start - (first - 1) * row, row, sizes[1:]) if start % row)
    if first < last:
        yield ((first, last - first), *((0, n) for n in sizes[1:]))
    yield from (((last, 1), *r) for r in _rectangles(0, stop - last * row, sizes[1:]))
