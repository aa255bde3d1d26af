"""What regions mean, in NumPy alone: all ranks one after the other, by the specs, knowing nothing of this library."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from region_programs import Axes, Edge, Region

Array = np.ndarray[Any, Any]
Sizes = dict[str, int]


def index(sizes: Sizes, axes: Axes, at: Sizes) -> int:
    return int(np.ravel_multi_index([at[a] for a in axes], [sizes[a] for a in axes])) if axes else 0


def block(x: Array, edge: Edge, sizes: Sizes, at: Sizes) -> Any:
    """The view of a global array that the rank at some coordinates holds, each dim as (pieces, rest)."""
    full = [(pre, n := math.prod(sizes[a] for a in axes), s // pre // n) for (pre, axes), s in zip(edge.where, x.shape)]
    view = x.reshape([i for dim in full for i in dim])
    return view[tuple(i for _, axes in edge.where for i in (slice(None), index(sizes, axes, at), slice(None)))]


def entered(x: Array, edge: Edge, shape: tuple[int, ...], sizes: Sizes, ranks: Sequence[Sizes]) -> list[Any]:
    """What the ranks hold: of a sum, the first has it all."""
    return [block(x, edge, sizes, at).reshape(shape) * (index(sizes, edge.sums, at) == 0) for at in ranks]


def groups(sizes: Sizes, axes: Axes, ranks: Sequence[Sizes]) -> Iterator[list[int]]:
    """Ranks that differ along these axes only, in their order along them."""
    found: dict[Any, list[int]] = {}
    for r in sorted(range(len(ranks)), key=lambda r: index(sizes, axes, ranks[r])):
        found.setdefault(tuple(i for a, i in ranks[r].items() if a not in axes), []).append(r)
    yield from found.values()


def reference(sizes: Sizes, regions: Sequence[Region], x: Any, ws: Sequence[Any]) -> Any:
    """What regions make of x one after the other, and of a weight for each product."""
    ranks, rest = [dict(zip(sizes, c)) for c in np.ndindex(*sizes.values())], iter(ws)
    for region in regions:
        held = entered(x, region.enters, region.shape, sizes, ranks)
        for step in region.steps:
            if step.weight is not None:
                parts = entered(next(rest), step.weight.edge, step.weight.shape, sizes, ranks)
                held = [v @ w for v, w in zip(held, parts)]
                continue
            for members in groups(sizes, step.axes, ranks):
                for r, v in zip(members, step.move.numpy([held[r] for r in members], step.k)):
                    held[r] = v
        x = np.zeros(region.leaves.outside(held[0].shape, sizes))
        for at, v in zip(ranks, held):
            if not any(at[a] for a in sizes if a not in region.leaves.cut + region.leaves.sums):  # the others: the same
                into = block(x, region.leaves, sizes, at)
                into += v.reshape(into.shape)
    return x
