"""Arrays as DTensors and back, without copying: one rank per process, the same process group."""

from __future__ import annotations

from typing import Any

from vescale_fn.array import Array, ArrayType
from vescale_fn.sharding.convert import from_placements, to_placements
from vescale_fn.sharding.mesh import Mesh


def device_mesh(mesh: Mesh) -> Any:
    """The torch DeviceMesh with the same axes. Every process must call it."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(mesh.device.split(":")[0], mesh.shape.sizes, mesh_dim_names=mesh.axis_names)


def to_dtensor(x: Array, on: Any = None) -> Any:
    """x as a DTensor that shares its storage. `on`: the DeviceMesh to use; made when not given.

    Raises ValueError when x lives on virtual devices, or in a layout that placements cannot say.
    """
    from torch.distributed.tensor import DTensor

    if x.mesh.kind != "torchdist" or x.mesh.processes != x.mesh.size:
        raise ValueError(
            f"to_dtensor: {x!r} lives on a {x.mesh.kind} mesh with {x.mesh.processes} process(es) for "
            f"{x.mesh.size} ranks. A DTensor needs one process per rank: run under torchrun."
        )
    placements = to_placements(x.layout)
    stride = _contiguous_stride(tuple(x.shape))
    return DTensor.from_local(
        x.shards[0], on or device_mesh(x.mesh), placements, run_check=False, shape=x.shape, stride=stride
    )


def from_dtensor(x: Any, mesh: Mesh) -> Array:
    """A DTensor as an Array on `mesh`, whose axes must be those of its DeviceMesh."""
    layout = from_placements(x.placements, tuple(x.shape), mesh.shape)
    return Array(ArrayType(layout, x.dtype, mesh), [x.to_local().contiguous()])


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))
