"""What torch.distributed.checkpoint sees of a leaf: the distinct boxes of one tensor that this process holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vescale_fn.checkpoint.boxes import boxes
from vescale_fn.sharding.layout import WHOLE, Layout, Partial
from vescale_fn.sharding.mesh import Mesh

if TYPE_CHECKING:  # loaded by the first save or load: it takes as long as all of this package
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Start = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Parts:
    """Boxes of a tensor of global `shape`: views of the tensors that hold them, by where they start.

    Offers the three methods by which torch.distributed.checkpoint saves and loads anything.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    views: Mapping[Start, Tensor]

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, size = TensorProperties(dtype=self.dtype), torch.Size(self.shape)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(at), x.shape) for at, x in self.views.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.views[tuple(index.offset)]

    def snapshot(self, device_only: bool = False) -> Parts:
        """The same values, safe from later writes to the tensors; `device_only` copies only what is not on the CPU."""
        kept = {
            at: x if device_only and x.device.type == "cpu" else x.to("cpu", copy=True) for at, x in self.views.items()
        }
        return replace(self, views=kept)


def parts_of_tensor(x: Tensor) -> Parts:
    """A tensor that this process holds whole."""
    return Parts(tuple(x.shape), x.dtype, {(0,) * x.ndim: x.detach()} if x.numel() else {})


def parts_of_shards(layout: Layout, shards: Sequence[Tensor], mesh: Mesh) -> Parts:
    """What the ranks of this process hold; of replicas, the first. `layout` has no pending reduction."""
    return parts_of_ranks(layout, dict(zip(mesh.local_ranks, shards, strict=True)), shards[0].dtype)


def parts_of_ranks(layout: Layout, shards: Mapping[int, Tensor], dtype: torch.dtype) -> Parts:
    """What some ranks hold."""
    views: dict[Start, Tensor] = {}
    for rank, shard in shards.items():
        for box in boxes(layout, layout.mesh.coords(rank)):
            if box.start not in views:
                views[box.start] = box.of(shard)
    return Parts(layout.shape, dtype, views)


def without_pending(layout: Layout) -> Layout:
    """The layout with whole values in the place of pending reductions."""
    return layout.with_states({a: WHOLE for a, s in zip(layout.mesh.names, layout.states) if isinstance(s, Partial)})
