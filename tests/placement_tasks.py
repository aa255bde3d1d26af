"""What the worker processes run for the tests of Arrays on several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import vescale_fn as vf
from vescale_fn.dtensor import device_mesh

VALUE = torch.arange(8.0).reshape(4, 2)


def own_rows_make_an_array(process: int, processes: int, spec: str) -> Any:
    """Full value, text and shape of an Array that each process gives its own rows of."""
    mesh = vf.make_mesh(dp=2)
    dim = {"b/dp d": 0, "b d/dp": 1}.get(spec)
    mine = VALUE if dim is None else VALUE.chunk(processes, dim)[process]
    a = vf.local_put({"x": mine}, spec, mesh)["x"]
    return a.full().tolist(), repr(a), list(a.shape)


def every_way_to_make_an_array(process: int, processes: int) -> Any:
    """Whether device_put holds this process's rows only; the value by device_put and by a callback."""
    mesh = vf.make_mesh(dp=-1)
    a = vf.device_put(VALUE, "b/dp d", mesh)
    (shard,) = a.addressable_shards
    held = torch.equal(shard.data, VALUE[2 * process : 2 * process + 2])
    b = vf.make_array_from_callback((4, 2), "b/dp d", mesh, lambda i: VALUE[i])
    return held, a.full().tolist(), b.full().tolist()


def to_dtensor_and_back(process: int, processes: int, spec: str) -> Any:
    """Placements, whether storage is shared, and the values as DTensor and as Array again."""
    mesh = vf.make_mesh(dp=2)
    a = vf.device_put(VALUE, spec, mesh)
    d = a.to_dtensor()
    back = vf.Array.from_dtensor(d)
    shared = d.to_local().data_ptr() == a.shards[0].data_ptr() == back.shards[0].data_ptr()
    return str(d.placements), shared, d.full_tensor().tolist(), back.full().tolist(), back.type == a.type


def from_a_foreign_dtensor(process: int, processes: int) -> Any:
    """A DTensor that DTensor itself made, as an Array; and what is said about a mesh that does not fit."""
    mesh = vf.make_mesh(dp=2, tp=1)
    d = DTensor.from_local(VALUE.chunk(2)[process], device_mesh(mesh), [Shard(0), Replicate()])
    a = vf.Array.from_dtensor(d, mesh)
    said = []
    for other in (vf.make_mesh(x=2, y=1), vf.make_mesh(dp=2)):
        try:
            vf.Array.from_dtensor(d, other)
        except ValueError as error:
            said.append(str(error))
    return str(a.sharding), a.full().tolist(), said
