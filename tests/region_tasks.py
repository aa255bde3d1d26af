"""What workers of a pool run: regions at once and lowered, right and wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad

import vescale_fn as vf


def body(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.tanh(vf.all_gather(x, "tp", dim=0, tiled=True) @ w)
    ring = vf.ppermute(hidden, "tp", shift=1)
    return vf.psum_scatter(ring * hidden, "tp", dim=0, tiled=True) + vf.axis_index("tp")


def results(process: int, processes: int, ranks: int) -> list[Any]:
    """Value and gradients of a body with collectives, at once and lowered, and each collective by itself."""
    mesh = vf.make_mesh(processes=processes, tp=ranks)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * ranks, 4, dtype=torch.float64, generator=generator)
    w = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    mapped = vf.shard_map(body, mesh=mesh, in_specs=("b/tp d", "d n"), out_specs="b/tp n")

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return mapped(x, w).sin().sum()

    def derivatives(x: Tensor, w: Tensor) -> Any:
        return mapped(x, w), *grad(loss, argnums=(0, 1))(x, w)

    lowered = [y.full() for y in vf.pjit(derivatives, mesh=mesh, deterministic=True)(x, w)]
    return [*derivatives(x, w), *lowered]


def other_order(process: int, processes: int) -> str:
    """Ranks that reach other collectives: what each process says."""
    mesh = vf.make_mesh(dp=2)

    def wrong(x: Tensor) -> Tensor:
        first = vf.psum(x, "dp")
        if process == 1:
            return first + vf.pmax(x, "dp")
        return first + vf.psum(2 * x, "dp")

    try:
        for _ in range(2):
            vf.shard_map(wrong, mesh=mesh, in_specs="b/dp", out_specs="b")(torch.ones(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def one_raises(process: int, processes: int) -> str:
    """A body that raises on one process, between collectives."""
    mesh = vf.make_mesh(dp=2)

    def wrong(x: Tensor) -> Tensor:
        if process == 1:
            raise ValueError("no more data")
        return vf.psum(x, "dp")

    try:
        vf.shard_map(wrong, mesh=mesh, in_specs="b/dp", out_specs="b")(torch.ones(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
