"""What the worker processes run for the tests of Arrays and of pjit on several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import grad_and_value

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


def train(mesh: vf.Mesh, calls: int = 3) -> Any:
    """Losses and final weight of a few steps with donated state, and how often the step was lowered."""
    opt = vf.optim.adamw(lr=0.1)

    @vf.pjit(donate_argnums=0)
    def step(state: Any, x: torch.Tensor) -> Any:
        grads, value = grad_and_value(lambda w: torch.tanh(x @ w).square().mean())(state["w"])
        w, moments = opt.step(grads, state["opt"], state["w"])
        return {"w": w, "opt": moments}, value

    w = vf.device_put(torch.linspace(-1, 1, 12).reshape(4, 3), "d/dp f", mesh)
    state, losses = {"w": w, "opt": opt.init(w)}, []
    for i in range(calls):
        state, value = step(state, vf.device_put(torch.linspace(i, 3, 32).reshape(8, 4), "b/dp d", mesh))
        losses.append(float(value))
    doubled = state["w"] * 2  # one operation outside a step
    return losses, doubled.full().tolist(), step.cache_info().misses, repr(state["w"])[:40]


def train_on_processes(process: int, processes: int) -> Any:
    return train(vf.make_mesh(dp=processes))


def fail_in_a_step(process: int, processes: int) -> Any:
    """What a donated Array says after process 1 alone failed in a step."""
    mesh = vf.make_mesh(dp=processes)
    step = vf.pjit(lambda w, i: (w[i].sum() + w.sum(), w), donate_argnums=0)
    w = vf.device_put(VALUE, "b/dp d", mesh)
    index = vf.local_put(torch.tensor([0 if process == 0 else 99]), "n/dp", mesh)
    try:
        step(w, index)
    except (RuntimeError, IndexError) as error:
        return error.__notes__[-1], w.is_deleted
    return None


def audit_a_broken_replica(process: int, processes: int) -> Any:
    """What is said when the copies of a whole value differ."""
    mesh = vf.make_mesh(dp=processes)
    w = vf.device_put(VALUE, "b d", mesh)
    step = vf.pjit(lambda w: {"w": w * 2}, audit=1)
    step(w)
    w.shards[0][process] += 1
    try:
        step(w)
    except RuntimeError as error:
        return str(error)
    return None
