"""What the worker processes run for the tests of ragged Arrays and of flat buffers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.func import grad

import vescale_fn as vf
from vescale_fn import optim

SPECS = {  # by the number of ranks
    3: {"up": "(a b)~[5 91 0]/dp", "bias": "a~[0 1 1]/dp", "down": "a~@2/dp b"},
    4: {"up": "(a b)~[5 90 0 1]/dp", "bias": "a~[0 1 0 1]/dp", "down": "a~@2/dp b"},
}
MOVES = {
    3: ("b~[1 0 5]/dp d", "(b d)~[3 0 1]/dp", "b~@2/dp d", "b d", "b d~[0 1 1]/dp"),
    4: ("b~[1 0 4 1]/dp d", "(b d)~[3 0 0 1]/dp", "b~@3/dp d", "b d", "b d~[0 1 1 0]/dp"),
}


def values(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape).sin()


def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]).square().mean()


def ragged(process: int, processes: int, ranks: int) -> list[list[torch.Tensor]]:
    """Conversions, and two steps of training with ragged parameters: what each rank of this process holds then."""
    mesh = vf.make_mesh(dp=ranks, processes=None if process < 0 else processes)
    x = vf.device_put(values(12, 12), "b/dp d", mesh)
    params = vf.device_put({"up": values(12, 8), "bias": values(8), "down": values(8, 3)}, SPECS[ranks], mesh)
    opt = optim.adamw(lr=0.1)

    def step(params: Any, state: Any, x: torch.Tensor) -> Any:
        return opt.step(grad(loss)(params, x), state, params)

    run, state = vf.pjit(step, deterministic=True), opt.init(params)
    for _ in range(2):
        params, state = run(params, state, x)
    moved = x
    kept = []
    for spec in MOVES[ranks]:
        moved = vf.reshard(moved, spec)
        kept.append(moved)
    arrays = [*params.values(), *state["exp_avg"].values(), *kept]
    return [[a.shards[i] for a in arrays] for i, _ in enumerate(mesh.local_ranks)]
