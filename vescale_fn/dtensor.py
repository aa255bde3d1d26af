"""Arrays as DTensors and back, sharing memory: one rank per process, the same process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vescale_fn.array import Array, ArrayType
from vescale_fn.mesh import make_mesh
from vescale_fn.sharding.convert import from_placements, to_placements
from vescale_fn.sharding.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The torch DeviceMesh with the same axes. Every process must call it."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(mesh.device.split(":")[0], mesh.shape.sizes, mesh_dim_names=mesh.axis_names)


def to_dtensor(x: Array, on: DeviceMesh | None = None) -> DTensor:
    """x as a DTensor that shares its storage. `on`: the DeviceMesh to use; made when not given.

    Raises ValueError when x does not live on one process per rank, or in a layout that placements cannot say.
    """
    from torch.distributed.tensor import DTensor

    if x.mesh.kind != "torchdist" or x.mesh.processes != x.mesh.size:
        raise ValueError(
            f"to_dtensor: the Array ({x.type}) has {x.mesh.size} ranks on a {x.mesh.kind} mesh with "
            f"{x.mesh.processes} process(es), and a DTensor needs one process per rank. Run under torchrun."
        )
    placements = to_placements(x.layout)
    stride = torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(
        x.shards[0], on or device_mesh(x.mesh), placements, run_check=False, shape=x.shape, stride=stride
    )


def from_dtensor(x: DTensor, mesh: Mesh | None = None) -> Array:
    """A DTensor as an Array that shares its storage where that is contiguous. mesh: by default one with the axes of
    the DTensor's own, which must have names then.

    Raises ValueError when the meshes differ.
    """
    own, names = tuple(x.device_mesh.shape), x.device_mesh.mesh_dim_names
    if mesh is None:
        if names is None:
            raise ValueError("from_dtensor: the DTensor's mesh has no axis names. Pass mesh=vf.make_mesh(...).")
        axes: dict[str, Any] = dict(zip(names, own))
        mesh = make_mesh(**axes)
    if mesh.shape.sizes != own or names not in (None, mesh.axis_names):
        raise ValueError(
            f"from_dtensor: the DTensor lives on a mesh of shape {list(own)} with axes {names}, not on {mesh}. "
            "Pass a mesh with the same axes."
        )
    layout = from_placements(x.placements, tuple(x.shape), mesh.shape)
    return Array(ArrayType(layout, x.dtype, mesh), [x.to_local().detach().contiguous()])
