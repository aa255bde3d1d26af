"""Moves between a device and the memory of its host, as operations of a program.

On CUDA the host's side is pinned, so that a copy needs no detour; on a CPU, which has one memory, both ways are copies
all the same, and a program runs as it would there. A value that `to_host` made is read by `to_device` only. `KERNELS`
maps both to functions that need only torch; `RULES` says how they may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_fn.program import Program
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.rules.pointwise import elementwise
from vescale_fn.sharding.rules.registry import Entry


def to_host(x: Tensor) -> Tensor:
    """A copy of x in host memory."""
    if not x.is_cuda:
        return x.clone()
    copy = torch.empty_like(x, device="cpu", pin_memory=True)
    return copy.copy_(x)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of x, which lies in host memory, on a device."""
    return x.to(device, non_blocking=True, copy=True)


_LIBRARY: Any = torch.library.Library("vescale_fn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("to_host(Tensor x) -> Tensor")
_LIBRARY.define("to_device(Tensor x, Device device) -> Tensor")
_LIBRARY.impl("to_host", to_host, "CompositeExplicitAutograd")
_LIBRARY.impl("to_device", to_device, "CompositeExplicitAutograd")
TO_HOST = torch.ops.vescale_fn.to_host.default
TO_DEVICE = torch.ops.vescale_fn.to_device.default


def _fake(x: Tensor, device: torch.device | None = None) -> Tensor:
    """In a trace every tensor is on the device; which of them are not is what these operations say."""
    return torch.empty_like(x)


torch.library.register_fake("vescale_fn::to_host", _fake, lib=_LIBRARY)
torch.library.register_fake("vescale_fn::to_device", _fake, lib=_LIBRARY)


KERNELS: dict[Any, Callable[..., Tensor]] = {TO_HOST: to_host, TO_DEVICE: to_device}
RULES: dict[Any, Entry] = dict.fromkeys((TO_HOST, TO_DEVICE), elementwise)


def on_host(program: Program) -> frozenset[Var]:
    """The inputs of a program that it only moves to the device, and the outputs that it has moved to the host."""
    graph = program.graph
    elsewhere = {v for e in graph.eqns if e.op is not TO_DEVICE for v in e.reads} | {*graph.outputs}
    moved = {v for e in graph.eqns if e.op is TO_DEVICE for v in e.reads}
    made = {v for e in graph.eqns if e.op is TO_HOST for v in e.outs}
    return frozenset((moved - elsewhere) & {*graph.inputs} | made)
