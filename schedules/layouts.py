"""A layout extended by one more mesh axis: where optimizer state, gradients and parameters go when an axis shards them.

The rule: the axis cuts the largest dim that no axis cuts yet and that its size divides; of equal dims the first. Where
every such dim is taken, it cuts further the dim with the largest part on each rank, as its minor axis. A tensor that
neither fits stays whole along the axis.
"""

from __future__ import annotations

from vescale_fn.sharding.layout import Layout, Ragged, Shard
from vescale_fn.sharding.unbind import spec_of
from vescale_fn.shardings import NamedSharding


def extended(layout: Layout, axis: str) -> Layout:
    """`layout` with `axis` on one more dim, by the rule above; itself where it is cut along the axis already.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> mesh = MeshShape(("dp", "tp"), (2, 4))
    >>> print(extended(Layout.of(mesh, (8, 12), {"tp": Shard(1)}), "dp"))
    [8, 12] {dp: shard 0, tp: shard 1}
    >>> print(extended(Layout.of(mesh, (16,), {"tp": Shard(0)}), "dp"))
    [16] {dp: shard 0 pre 4, tp: shard 0}
    >>> print(extended(Layout.of(mesh, (3,)), "dp"))
    [3] {}
    """
    n = layout.mesh[axis]
    if isinstance(layout[axis], (Shard, Ragged)) or not layout.is_even:
        return layout
    parts = layout.max_local_shape
    found = [(len(layout.shards(d)) == 0, parts[d], -d) for d in range(layout.ndim) if _fits(layout, d, n)]
    if not found:
        return layout
    dim = -max(found)[2]
    return layout.with_state(axis, Shard(dim, _below(layout, dim)))


def _below(layout: Layout, dim: int) -> int:
    """How many pieces of `dim` lie above a digit that comes after all that cut it."""
    return max((s.pre * layout.mesh[a] for a, s in layout.shards(dim)), default=1)


def _fits(layout: Layout, dim: int, n: int) -> bool:
    size = layout.shape[dim]
    return size > 0 and size % (_below(layout, dim) * n) == 0


def sharded_further(sharding: NamedSharding, shape: tuple[int, ...], axis: str) -> NamedSharding:
    """`sharding` of a tensor of this shape, extended by `axis`; the names of dims stay where the spec says them."""
    layout = sharding.layout(shape)
    wider = extended(layout, axis)
    if wider == layout:
        return sharding
    names = [getattr(d, "name", "") for d in sharding.spec.dims]
    plain = len(names) == len(shape) and all(n.isidentifier() and n != "_" for n in names)
    return NamedSharding(sharding.mesh, str(spec_of(wider, names if plain else None)))
