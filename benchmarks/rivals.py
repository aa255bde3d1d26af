"""What vescale_fn is measured against: PyTorch's own wrappers, and the parts of a step alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import Config, batch, cross_entropy, make
from race import Step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def _trainer(model: Any, optimizer: torch.optim.Optimizer, c: Config, rank: int) -> Step:
    x, y = batch(c, rank)

    def step() -> Any:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def ddp(c: Config, rank: int, world: int) -> Step:
    model = DistributedDataParallel(make(c))
    return _trainer(model, torch.optim.AdamW(model.parameters()), c, rank)


def ddp_fused(c: Config, rank: int, world: int) -> Step:
    model = DistributedDataParallel(make(c))
    return _trainer(model, torch.optim.AdamW(model.parameters(), fused=True), c, rank)


def fsdp2(c: Config, rank: int, world: int) -> Step:
    model, mesh = make(c), init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trainer(model, torch.optim.AdamW(model.parameters(), fused=True), c, rank)


def dtensor_tp(c: Config, rank: int, world: int) -> Step:
    """Megatron's plan with vocabulary-sharded embedding, head and loss. All ranks see the same batch."""
    model, mesh = make(c), init_device_mesh("cpu", (world,))
    plan: dict[str, Any] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    plan |= {f"blocks.*.{w}": ColwiseParallel() for w in ("wq", "wk", "wv", "up")}
    plan |= {f"blocks.*.{w}": RowwiseParallel() for w in ("wo", "down")}
    parallelize_module(model, mesh, plan)
    # One fused update per kind of tensor: a fused list must not mix DTensors with tensors.
    sharded = [p for p in model.parameters() if hasattr(p, "placements")]
    whole = [p for p in model.parameters() if not hasattr(p, "placements")]
    optimizer = torch.optim.AdamW(sharded, fused=True)
    rest = torch.optim.AdamW(whole, fused=True)
    x, y = batch(c)

    def step() -> Any:
        optimizer.zero_grad()
        rest.zero_grad()
        with loss_parallel():
            loss = cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rest.step()
        return loss

    return step


def compute_alone(c: Config, rank: int, world: int) -> Step:
    """Forward and backward of this rank's batch: no communication, no update."""
    model, (x, y) = make(c), batch(c, rank)
    params = list(model.parameters())
    return lambda: torch.autograd.grad(cross_entropy(model(x), y), params)


def update_alone(c: Config, rank: int, world: int) -> Step:
    """The fused AdamW update of all parameters."""
    params = list(make(c).parameters())
    for p in params:
        p.grad = torch.ones_like(p)
    return torch.optim.AdamW(params, fused=True).step


def reduction_alone(c: Config, rank: int, world: int) -> Step:
    """All-reduce of all gradients in one buffer."""
    flat = torch.zeros(sum(p.numel() for p in make(c).parameters()))
    return lambda: dist.all_reduce(flat)


def one_process(c: Config, rank: int, world: int) -> Step:
    """The whole step without any wrapper, on this rank's batch."""
    model = make(c)
    return _trainer(model, torch.optim.AdamW(model.parameters(), fused=True), c, rank)
