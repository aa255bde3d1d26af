"""Arithmetic of ragged shards: how many of sum(units) equal pieces of a dim each rank along an axis holds.

Two states that put the same rows on every rank are the same state, so `state_of_units` returns the plainest one:
[2 2] is an even shard, [2 2 1] of 5 rows is the order of torch.chunk, [3 1] and [6 2] are both [3 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from vescale_fn.sharding.layout import CUTS, WHOLE, Layout, Ragged, Shard, State, chunk


def reduced(units: Sequence[int]) -> tuple[int, ...]:
    """The units divided by what they have in common.

    >>> reduced([0, 4, 6])
    (0, 2, 3)
    """
    common = math.gcd(*units) or 1
    return tuple(u // common for u in units)


def chunked(size: int, n: int) -> tuple[int, ...]:
    """Rows of each of n ranks in the order of torch.chunk.

    >>> chunked(5, 4)
    (2, 2, 1, 0)
    """
    return tuple(chunk(size, n, i)[1] for i in range(n))


def owned_by(coordinate: int, n: int) -> tuple[int, ...]:
    """Units of n ranks of which one holds everything.

    >>> owned_by(1, 3)
    (0, 1, 0)
    """
    return tuple(int(i == coordinate) for i in range(n))


def state_of_units(dim: int, units: Sequence[int], size: int, last: int = -1) -> State:
    """The state in which rank i holds units[i] of sum(units) equal pieces of `size` rows.

    dim: the dim that is cut; with `last` > dim, dims dim..last are cut as one flat dim of `size` elements.
    Raises ValueError when `size` is not a multiple of sum(units).

    >>> state_of_units(0, [2, 2], 8), state_of_units(0, [2, 1], 3), state_of_units(0, [2, 6], 8)
    (Shard(dim=0, pre=1, uneven=0), Shard(dim=0, pre=1, uneven=3), Ragged(dim=0, units=(1, 3), last=-1))
    """
    total = sum(units)
    if size % total:
        raise ValueError(f"{size} is not a multiple of the {total} units of {list(units)}.")
    if last > dim:
        return Ragged(dim, reduced(units), last)
    rows = [u * (size // total) for u in units] if size else list(units)
    if len(set(rows)) == 1:
        return Shard(dim)
    for factor in (size, sum(reduced(units))):  # torch.chunk of the rows, or of whole units; one unit is an owner's
        unit = size // factor if factor > 1 or factor == size == 1 else 0
        if unit and [k * unit for k in chunked(factor, len(rows))] == rows:
            return Shard(dim, uneven=factor)
    return Ragged(dim, reduced(units))


def offsets(layout: Layout, axis: str) -> tuple[int, ...]:
    """The n + 1 boundaries at which the n ranks along `axis` cut a dim, where each holds one run of it.

    Raises ValueError when the axis does not shard, or its ranks hold several runs.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> offsets(Layout.of(MeshShape(("dp",), (3,)), (8,), {"dp": Ragged(0, (0, 1, 3))}), "dp")
    (0, 0, 2, 8)
    """
    layout = layout.flat
    state = layout[axis]
    if not isinstance(state, CUTS):
        raise ValueError(f"Axis '{axis}' does not shard a dim of {layout}, so it has no offsets.")
    found = [0]
    origin = dict.fromkeys(layout.mesh.names, 0)
    alone = Layout.of(layout.mesh, layout.shape, {axis: state})
    for c in range(layout.mesh[axis]):
        runs = alone.intervals(state.dim, {**origin, axis: c})
        if len(runs) > 1:
            raise ValueError(f"Each rank along axis '{axis}' holds several runs of dim {state.dim} of {layout}.")
        found.append(runs[0][1] if runs else found[-1])
    return tuple(found)


def owner(state: State) -> int | None:
    """The coordinate that holds everything, if one does.

    >>> owner(Ragged(0, (0, 1, 0)))
    1
    """
    if isinstance(state, Ragged) and sum(map(bool, state.units)) == 1:
        return next(i for i, u in enumerate(state.units) if u)
    return None


def coarsened(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of a tensor with one entry for each block of a tensor that has `layout`: cut where that is cut, and
    whole along axes that cut through blocks.

    shape: number of blocks in each dim, a divisor of the dim.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> mesh = MeshShape(("dp", "tp"), (2, 4))
    >>> print(coarsened(Layout.of(mesh, (24, 64), {"dp": Ragged(0, (1, 2)), "tp": Shard(1)}), (3, 2)))
    [3, 2] {dp: ragged 0 [1, 2]}
    >>> print(coarsened(Layout.of(mesh, (24, 64), {"dp": Ragged(0, (1, 2)), "tp": Shard(1)}), (2, 4)))
    [2, 4] {tp: shard 1}
    """
    states = (_coarse(layout, axis, state, shape) for axis, state in zip(layout.mesh.names, layout.states))
    return Layout.of(layout.mesh, shape, dict(zip(layout.mesh.names, states)))


def _coarse(layout: Layout, axis: str, state: State, shape: Sequence[int]) -> State:
    """The state of one axis, WHOLE where it cuts through blocks."""
    if not isinstance(state, CUTS) or not math.prod(layout.shape):
        return state
    dims = range(state.dim, max(state.dim, state.last if isinstance(state, Ragged) else -1) + 1)
    sides = [layout.shape[d] // shape[d] for d in dims]
    if isinstance(state, Shard) and not state.uneven:
        digit = layout.shape[state.dim] // (state.pre * layout.mesh[axis])
        return WHOLE if digit % sides[0] else state
    first = next((i for i, b in enumerate(sides) if b > 1), 0)
    in_a_row = all(shape[d] == 1 for d in dims[first + 1 :])
    nested = len(layout.shards(state.dim)) > 1
    if nested or not in_a_row:
        return WHOLE
    block = math.prod(sides)
    cuts = offsets(Layout.of(layout.mesh, layout.shape, {axis: state}), axis)
    if any(c % block for c in cuts):
        return WHOLE
    units = [(b - a) // block for a, b in pairwise(cuts)]
    return state_of_units(dims[0], units, math.prod(shape[d] for d in dims), dims[-1] if len(dims) > 1 else -1)
