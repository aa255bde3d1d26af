"""Layouts said in other notations: DTensor placements, and tuples like JAX's PartitionSpec.

DTensor applies placements mesh dim by mesh dim, each to what the earlier ones left, so where two axes cut one dim the
order of the mesh matters: an axis that is more major in the dim but later in the mesh makes the earlier one a strided
shard. What a notation cannot say is refused with the reason; nothing is approximated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch.distributed.tensor.placement_types import Partial as PartialPlacement
from torch.distributed.tensor.placement_types import Placement, Replicate, _StridedShard
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from vescale_fn.sharding.bind import bind
from vescale_fn.sharding.forms import P
from vescale_fn.sharding.layout import WHOLE, Layout, Manual, Partial, Ragged, Shard, State, Whole
from vescale_fn.sharding.mesh import MeshShape


def to_placements(layout: Layout) -> tuple[Placement, ...]:
    """The DTensor placements, one for each mesh dim, that put the same rows on every rank.

    Raises ValueError for ragged units, and for uneven shards other than those of torch.chunk of whole dims.

    >>> m = MeshShape(("dp", "tp"), (2, 2))
    >>> to_placements(Layout.of(m, (8,), {"dp": Shard(0, 2), "tp": Shard(0)}))  # b/(tp dp)
    (_StridedShard(dim=0, sf=2), Shard(dim=0))
    """
    return tuple(_placement(layout, i) for i in range(len(layout.states)))


def _placement(layout: Layout, i: int) -> Placement:
    state = layout.states[i]
    match state:
        case Whole():
            return Replicate()
        case Partial(kind):
            return PartialPlacement(kind)
        case Ragged() | Manual():
            raise _refuse(layout, i, f"DTensor has no placement for {state}")
    factor = state.pre // math.prod(n for p, n in _cut_before(layout, i) if p < state.pre)
    if state.uneven and (state.uneven != layout.shape[state.dim] or factor > 1):
        raise _refuse(layout, i, "DTensor cuts unequal shards in mesh order and in single rows")
    if not state.uneven and state.pre >= max(s.uneven for _, s in layout.shards(state.dim)) > 0:
        raise _refuse(layout, i, f"DTensor cannot cut a factor below unequal shards of dim {state.dim}")
    return ShardPlacement(state.dim) if factor == 1 else _StridedShard(state.dim, split_factor=factor)


def _cut_before(layout: Layout, i: int) -> list[tuple[int, int]]:
    """Position (`pre`) and size of the digits of the same dim that earlier axes of the mesh take."""
    dim = getattr(layout.states[i], "dim", None)
    earlier = zip(layout.states[:i], layout.mesh.sizes)
    return sorted((s.pre, n) for s, n in earlier if isinstance(s, Shard) and s.dim == dim)


def from_placements(placements: Sequence[Placement], shape: Sequence[int], mesh: MeshShape) -> Layout:
    """The layout of a DTensor of global `shape` with these placements, one for each axis of `mesh`.

    Raises ValueError for kinds of placement, and cuts, that layouts do not have.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> from_placements([Shard(0), Replicate()], (8,), MeshShape(("dp", "tp"), (2, 2))).states
    (Shard(dim=0, pre=1, uneven=0), Whole())
    """
    if len(placements) != len(mesh.names):
        raise ValueError(f"There are {len(placements)} placements for the {len(mesh.names)} axes of mesh {mesh}.")
    layout = Layout.of(mesh, shape)
    for axis, placement in zip(mesh.names, placements):
        if mesh[axis] > 1:
            layout = layout.with_state(axis, _state(layout, axis, placement))
    return _with_uneven(layout)


def _state(layout: Layout, axis: str, placement: Placement) -> State:
    if isinstance(placement, Replicate):
        return WHOLE
    if type(placement) is PartialPlacement:  # its subclasses pend in other ways
        match placement.reduce_op:
            case "sum" | "max" | "min" as kind:
                return Partial(kind)
        raise ValueError(f"Axis '{axis}': a layout has no pending reduction '{placement.reduce_op}'. Reduce it first.")
    if not isinstance(placement, (ShardPlacement, _StridedShard)):
        raise ValueError(f"Axis '{axis}': a layout cannot say the placement {placement!r}. Redistribute it first.")
    dim = placement.dim % layout.ndim
    factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
    pre, n = factor, layout.mesh[axis]
    for taken, size in ((s.pre, layout.mesh[a]) for a, s in layout.shards(dim)):
        if pre % taken == 0:
            pre *= size
        elif taken % (pre * n):
            raise ValueError(
                f"Axis '{axis}': {placement!r} cuts across the shards of earlier axes, which no layout says."
            )
    return Shard(dim, pre)


def _with_uneven(layout: Layout) -> Layout:
    """The layout with shards that do not divide marked as those of torch.chunk."""
    for dim, size in enumerate(layout.shape):
        shards = layout.shards(dim)
        if not shards or size % (shards[-1][1].pre * layout.mesh[shards[-1][0]]) == 0:
            continue
        axes = [a for a, _ in shards]
        nested = [math.prod(layout.mesh[a] for a in axes[:i]) for i in range(len(axes))]
        if [s.pre for _, s in shards] != nested or axes != sorted(axes, key=layout.mesh.names.index):
            raise ValueError(f"Dim {dim} of size {size} has strided shards that are not equal, which no layout says.")
        layout = layout.with_states({a: Shard(dim, s.pre, size) for a, s in shards})
    return layout


def to_partition_spec(layout: Layout) -> tuple[str | tuple[str, ...] | None, ...]:
    """For each dim the axis that shards it, a tuple of axes (major to minor) or None, as in JAX's PartitionSpec.

    Raises ValueError for what that cannot say: factors inside a dim, unequal shards, pending reductions.

    >>> to_partition_spec(Layout.of(MeshShape(("dp", "tp"), (2, 2)), (8, 4), {"dp": Shard(0), "tp": Shard(0, 2)}))
    (('dp', 'tp'), None)
    """
    found: list[str | tuple[str, ...] | None] = []
    for i, state in enumerate(layout.states):
        if isinstance(state, Partial):
            raise _refuse(layout, i, "a PartitionSpec cannot say a pending reduction")
        if isinstance(state, Ragged) or (isinstance(state, Shard) and state.uneven):
            raise _refuse(layout, i, "the shards of a PartitionSpec are equal")
    for dim in range(layout.ndim):
        pre = 1
        for axis, shard in layout.shards(dim):
            if shard.pre != pre:
                reason = f"a PartitionSpec cannot shard a factor inside dim {dim}"
                raise _refuse(layout, layout.mesh.names.index(axis), reason)
            pre *= layout.mesh[axis]
        axes = tuple(a for a, _ in layout.shards(dim))
        found.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return tuple(found)


def from_partition_spec(
    entries: Iterable[str | tuple[str, ...] | None], shape: Sequence[int], mesh: MeshShape
) -> Layout:
    """The layout that a PartitionSpec, or a tuple like one, gives to a tensor of global `shape`.

    >>> from_partition_spec((None, "tp"), (8, 4), MeshShape(("tp",), (2,))).states
    (Shard(dim=1, pre=1, uneven=0),)
    """
    return bind(P(*entries), shape, mesh)


def _refuse(layout: Layout, i: int, reason: str) -> ValueError:
    return ValueError(f"Axis '{layout.mesh.names[i]}' of {layout}: {reason}.")
