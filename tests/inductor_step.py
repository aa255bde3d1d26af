"""A train step on one rank, compiled by inductor and not: prints "equal" when both give the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import grad_and_value

import vescale_fn as vf


def train(compile: Any) -> torch.Tensor:
    """A parameter after three steps with donated state."""
    opt, mesh = vf.optim.adamw(lr=0.1), vf.make_mesh(dp=1)
    x = vf.device_put(torch.linspace(-1, 2, 96).reshape(12, 8), "b/dp d", mesh)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ p["up"]) @ p["down"] - x).square().mean()

    @vf.pjit(donate_argnums=0, compile=compile)
    def step(state: Any, x: torch.Tensor) -> Any:
        grads, value = grad_and_value(loss)(state["params"], x)
        params, moments = opt.step(grads, state["opt"], state["params"])
        return {"params": params, "opt": moments}, value

    shapes = {"up": (8, 16), "down": (16, 8)}
    params = vf.device_put({k: torch.linspace(-1, 1, 128).reshape(s) for k, s in shapes.items()}, None, mesh)
    state: Any = {"params": params, "opt": opt.init(params)}
    for _ in range(3):
        state, _ = step(state, x)
    out: torch.Tensor = state["params"]["up"].full()
    return out


if __name__ == "__main__":
    torch.testing.assert_close(train("inductor"), train(None))
    print("equal")
