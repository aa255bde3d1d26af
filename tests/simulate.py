"""What layouts and collectives mean, in NumPy: the oracle for planner and engines.

Written from the definitions and nothing else. `parts` is the list of what each rank holds, in rank order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vescale_fn.sharding import comm as c
from vescale_fn.sharding.layout import Kind, Layout, Partial, Ragged, Shard
from vescale_fn.sharding.mesh import MeshShape

Array = NDArray[Any]
Coords = dict[str, int]

REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def identity(kind: Kind, dtype: np.dtype[Any]) -> Any:
    """What a reduction ignores."""
    if kind == "sum":
        return dtype.type(0)
    if dtype.kind == "b":
        return kind == "min"
    sign = -1 if kind == "max" else 1
    return (
        dtype.type(sign * np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min if sign < 0 else np.iinfo(dtype).max)
    )


def chunked(indices: Array, n: int, coordinate: int) -> Array:
    """Piece `coordinate` of `indices`, cut like torch.chunk."""
    step = -(-len(indices) // n)
    return indices[coordinate * step : (coordinate + 1) * step]


def held(layout: Layout, dim: int, coords: Coords) -> Array:
    """Global indices of `dim` that the rank at `coords` holds, ascending."""
    size = layout.shape[dim]
    keep = np.ones(size, bool)
    states = [(layout.mesh[a], coords[a], s) for a, s in zip(layout.mesh.names, layout.states)]
    cuts = sorted((s.pre, n, i, s.uneven) for n, i, s in states if isinstance(s, Shard) and s.dim == dim)
    lead = max((f for *_, f in cuts), default=0)
    rows = np.arange(lead)  # of the uneven leading factor
    for pre, n, i, uneven in cuts:
        if uneven or pre < lead:
            rows = chunked(rows, n, i)
        elif size:
            digit = np.arange(size).reshape(pre, n, -1)[:, i]
            keep &= np.isin(np.arange(size), digit)
    if lead:
        keep &= np.isin(np.arange(size) // (size // lead), rows)
    for _, i, s in states:
        if isinstance(s, Ragged) and s.dim == dim:
            keep &= np.repeat(np.repeat(np.arange(len(s.units)), s.units), size // sum(s.units)) == i
    return np.flatnonzero(keep)


def block(layout: Layout, coords: Coords) -> tuple[Array, ...]:
    """Open mesh of the global indices that the rank at `coords` holds: index a global array with it."""
    return np.ix_(*(held(layout, d, coords) for d in range(layout.ndim)))


def merged(layout: Layout) -> Layout:
    """The layout over the dims of the local tensors: those that a ragged state merges are one."""
    return layout if layout.flat is layout else merged(layout.flat)


def distribute(x: Array, layout: Layout, seed: int = 0) -> list[Array]:
    """The parts of `x`; along partial axes numbers that reduce to it, exact for integers."""
    rng, mesh, layout = np.random.default_rng(seed), layout.mesh, merged(layout)
    whole = [x.reshape(layout.shape)] * mesh.size
    for axis, state in zip(mesh.names, layout.states):
        if isinstance(state, Partial):
            for group in mesh.groups((axis,)):
                for rank, term in zip(group, _terms(whole[group[0]], state.kind, len(group), rng)):
                    whole[rank] = term
    return [w[block(layout, k)] if layout.ndim else w for w, k in zip(whole, mesh.all_coords())]


def _terms(x: Array, kind: Kind, n: int, rng: np.random.Generator) -> list[Array]:
    noise = [rng.integers(1, 9, x.shape).astype(x.dtype) for _ in range(n)]
    if kind == "sum":
        return [*noise[1:], x - sum(noise[1:])]
    turn = rng.integers(0, n, x.shape)  # who holds the extreme
    return [np.where(turn == i, x, x - e if kind == "max" else x + e) for i, e in enumerate(noise)]


def assemble(parts: Sequence[Array], layout: Layout) -> Array:
    """The global array; fails unless every part has the right shape and replicas agree."""
    mesh, shape, layout = layout.mesh, layout.shape, merged(layout)
    for axis, kind in layout.partial:
        parts = simulate(c.AllReduce((axis,), kind), parts, mesh, layout)
    out = np.zeros(layout.shape, parts[0].dtype)
    for fill in (True, False):
        for part, coords in zip(parts, mesh.all_coords()):
            at = block(layout, coords) if layout.ndim else ()
            if fill:
                assert part.shape == out[at].shape, f"{coords}: shape {part.shape}, not {out[at].shape} in {layout}"
                out[at] = part
            else:
                assert np.array_equal(part, out[at]), f"{coords}: another value in {layout}"
    return out.reshape(shape)


def run(steps: Iterable[c.Step], parts: Sequence[Array], mesh: MeshShape) -> list[Array]:
    """A chain of collectives."""
    return reduce(lambda held, step: simulate(step.comm, held, mesh, step.layout), steps, list(parts))


def simulate(comm: c.Comm, parts: Sequence[Array], mesh: MeshShape, after: Layout) -> list[Array]:
    """One collective; `after` is the layout of its result."""
    out, after = list(parts), merged(after)
    for group in mesh.groups(comm.axes):
        coords = [mesh.coords(r) for r in group]
        for rank, result in zip(group, _in_group(comm, [parts[r] for r in group], coords, after), strict=True):
            out[rank] = result
    return out


def _in_group(comm: c.Comm, xs: list[Array], coords: list[Coords], after: Layout) -> list[Array]:
    n = len(xs)
    match comm:
        case c.AllReduce(_, kind):
            return [reduce(REDUCE[kind], xs)] * n
        case c.AllGather(_, dim, pre, flat=flat):
            whole = _join(xs, dim, pre)
            return [whole.reshape(*whole.shape[:dim], *flat, *whole.shape[dim + 1 :]) if flat else whole] * n
        case c.ReduceScatter(_, dim, pre, kind):
            return _split(_merged(reduce(REDUCE[kind], xs), dim, comm.flat), dim, pre, coords, after)
        case c.AllToAll(_, split_dim, concat_dim, split_pre, concat_pre):
            equal = split_dim == concat_dim
            sent = [_split(x, split_dim, split_pre, coords, None if equal else after) for x in xs]
            return [_join([row[i] for row in sent], concat_dim, concat_pre) for i in range(n)]
        case c.Permute(src, dst):
            where = {_read(k, src, after.mesh): x for k, x in zip(coords, xs)}
            return [where[_read(k, dst, after.mesh)] for k in coords]
        case c.PPermute(_, pairs):
            heard = {d: xs[s] for s, d in pairs}
            return [heard.get(i, np.zeros_like(x)) for i, x in enumerate(xs)]
        case c.Broadcast(_, source):
            return [xs[source]] * n
        case c.Slice(_, dim, pre):
            return [_split(_merged(x, dim, comm.flat), dim, pre, coords, after)[i] for i, x in enumerate(xs)]
        case c.ToPartial(_, kind):
            return [xs[0], *(np.full_like(x, identity(kind, x.dtype)) for x in xs[1:])]
        case c.Exchange(_, src, dst):
            return [_gathered(k, xs, coords, src, dst) for k in coords]


def ragged_all_to_all(axes: tuple[str, ...], held: Sequence[Sequence[Array]], mesh: MeshShape) -> list[Array]:
    """RaggedAllToAll of operands [rank][operand]."""
    outs = [row[1].copy() for row in held]
    for group in mesh.groups(axes):
        for sender in group:
            operand, _, starts, sizes, places, _ = held[sender]
            for receiver, start, size, place in zip(group, starts, sizes, places, strict=True):
                outs[receiver][place : place + size] = operand[start : start + size]
    return outs


def _read(coords: Coords, axes: tuple[str, ...], mesh: MeshShape) -> int:
    """The coordinates along `axes` read as one number, major to minor."""
    return reduce(lambda k, a: k * mesh[a] + coords[a], axes, 0)


def _merged(x: Array, dim: int, flat: tuple[int, ...]) -> Array:
    return x.reshape(*x.shape[:dim], int(np.prod(flat)), *x.shape[dim + len(flat) :]) if flat else x


def _split(x: Array, dim: int, pre: int, coords: list[Coords], after: Layout | None) -> list[Array]:
    """(pre, n, rest) -> (pre, rest) for each rank of the group, of the sizes that `after` gives, or of equal size."""
    sizes = [(len(held(after, dim, k)) if after else x.shape[dim] // len(coords)) // pre for k in coords]
    rows = x.reshape(*x.shape[:dim], pre, sum(sizes), *x.shape[dim + 1 :])
    pieces = np.split(rows, np.cumsum(sizes)[:-1], dim + 1)
    return [p.reshape(*x.shape[:dim], pre * s, *x.shape[dim + 1 :]) for p, s in zip(pieces, sizes)]


def _join(xs: list[Array], dim: int, pre: int) -> Array:
    """(pre, rest) of each rank -> (pre, n, rest)."""
    rows = [x.reshape(*x.shape[:dim], pre, x.shape[dim] // pre, *x.shape[dim + 1 :]) for x in xs]
    joined = np.concatenate(rows, dim + 1)
    return joined.reshape(
        *joined.shape[:dim], -1 if joined.size else pre * joined.shape[dim + 1], *joined.shape[dim + 2 :]
    )


def _gathered(k: Coords, xs: list[Array], coords: list[Coords], src: Layout, dst: Layout) -> Array:
    """The block of the rank at `k` under `dst`, each index from the one rank of the group that holds it."""
    full = np.zeros(src.shape, xs[0].dtype)
    count = np.zeros(src.shape, int)
    for x, other in zip(xs, coords):
        full[block(src, other)] = x
        count[block(src, other)] += 1
    assert (count[block(dst, k)] == 1).all()
    return full[block(dst, k)]
