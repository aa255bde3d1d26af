"""A layout extended by one more mesh axis: where optimizer state, gradients and parameters go when an axis shards them.

The rule: the axis cuts the largest dim that no axis cuts yet and that its size divides; of equal dims the first. Where
every such dim is taken, it cuts further the dim with the largest part on each rank, as its minor axis. A tensor that
neither fits stays whole along the axis.

What an optimizer updates in blocks is cut between blocks: cuts that go through them are left out, and sizes are counted
in blocks. Where the axis divides no number of blocks, it cuts the dim that has most into whole blocks, of which the
first ranks hold one more. A block that is a whole parameter may be owned by one rank; `owners` says by which.
"""

from __future__ import annotations

from collections.abc import Sequence

from vescale_fn.optim.optimizer import Block
from vescale_fn.sharding.layout import CUTS, WHOLE, Layout, Shard
from vescale_fn.sharding.ragged import coarsened, owned_by, state_of_units
from vescale_fn.sharding.ragged import owner as owner_of
from vescale_fn.sharding.unbind import spec_of
from vescale_fn.shardings import NamedSharding


def extended(layout: Layout, axis: str, block: Sequence[int] = ()) -> Layout:
    """`layout` with `axis` on one more dim, by the rule above; itself where it is cut along the axis already.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> mesh = MeshShape(("dp", "tp"), (2, 4))
    >>> print(extended(Layout.of(mesh, (8, 12), {"tp": Shard(1)}), "dp"))
    [8, 12] {dp: shard 0, tp: shard 1}
    >>> print(extended(Layout.of(mesh, (16,), {"tp": Shard(0)}), "dp"))
    [16] {dp: shard 0 pre 4, tp: shard 0}
    >>> print(extended(Layout.of(mesh, (3,)), "dp"))
    [3] {}
    >>> print(extended(Layout.of(mesh, (48, 5), {"tp": Shard(0)}), "dp", block=(16, 5)))
    [48, 5] {dp: shard 0~}
    """
    n = layout.mesh[axis]
    counts = [size // b for size, b in zip(layout.shape, block)] if block else list(layout.shape)
    layout = _between_blocks(layout, counts) if block else layout
    if isinstance(layout[axis], CUTS) or not layout.is_even:
        return layout
    parts = layout.max_local_shape
    found = [(len(layout.shards(d)) == 0, parts[d], -d) for d in range(layout.ndim) if _fits(layout, d, n, counts[d])]
    if found:
        dim = -max(found)[2]
        return layout.with_state(axis, Shard(dim, _below(layout, dim)))
    free = [(counts[d], -d) for d in range(layout.ndim) if not layout.shards(d)]
    if not block or max(free, default=(0, 0))[0] < 2:
        return layout
    most, dim = max(free)[0], -max(free)[1]
    units = [most // n + (i < most % n) for i in range(n)]
    return layout.with_state(axis, state_of_units(dim, units, layout.shape[dim]))


def _between_blocks(layout: Layout, counts: Sequence[int]) -> Layout:
    """The layout without the cuts that go through blocks, of which there are so many in each dim."""
    coarse = coarsened(layout, counts)
    return layout.with_states({a: WHOLE for a in layout.mesh.names if coarse[a] == WHOLE})


def owners(works: Sequence[float], n: int) -> list[int]:
    """Which of n ranks does each piece of work: the longest first, each goes to the rank with least to do.

    >>> owners([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    todo, found = [0.0] * n, [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        found[i] = min(range(n), key=lambda r: todo[r])
        todo[found[i]] += works[i]
    return found


def owned(layout: Layout, axis: str, rank: int) -> Layout:
    """The layout of a tensor that one rank along `axis` holds whole, whatever cut it.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> print(owned(Layout.of(MeshShape(("dp", "tp"), (2, 4)), (8, 12), {"tp": Shard(1)}), "dp", 1))
    [8, 12] {dp: ragged 0 [0, 1]}
    """
    alone = Layout.of(layout.mesh, layout.shape)
    return alone.with_state(axis, state_of_units(0, owned_by(rank, layout.mesh[axis]), layout.shape[0]))


def undone(layout: Layout, wider: Layout) -> bool:
    """Whether an axis that cuts `layout` cuts `wider` otherwise."""
    return any(isinstance(a, CUTS) and a != b for a, b in zip(layout.states, wider.states))


def _below(layout: Layout, dim: int) -> int:
    """How many pieces of `dim` lie above a digit that comes after all that cut it."""
    return max((s.pre * layout.mesh[a] for a, s in layout.shards(dim)), default=1)


def _fits(layout: Layout, dim: int, n: int, blocks: int) -> bool:
    return blocks > 0 and blocks % (_below(layout, dim) * n) == 0


def sharded_further(
    sharding: NamedSharding, shape: tuple[int, ...], axis: str, block: Block | None = None, owner: int | None = None
) -> NamedSharding:
    """`sharding` of a tensor of this shape, extended by `axis`; the names of dims stay where the spec says them.

    block: what is updated together, if not each element by itself. owner: the rank along `axis` that holds it whole.
    """
    layout = sharding.layout(shape)
    if owner is not None:
        has_one = any(owner_of(s) is not None for s in layout.states)
        wider = layout if has_one else owned(layout, axis, owner)
    else:
        wider = extended(layout, axis, block.shape if block else ())
    if wider == layout:
        return sharding
    names = [getattr(d, "name", "") for d in sharding.spec.dims]
    plain = len(names) == len(shape) and all(n.isidentifier() and n != "_" for n in names)
    return NamedSharding(sharding.mesh, str(spec_of(wider, names if plain else None)))
