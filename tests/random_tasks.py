"""A step that draws, for worker processes and for files."""

from __future__ import annotations

from typing import Any

import torch

import vescale_fn as vf

KEY = vf.random.key(2)
X = torch.linspace(0, 1, 40).reshape(8, 5)


def step(key: torch.Tensor, x: torch.Tensor) -> Any:
    inner, outer = vf.random.split(vf.random.fold_in(key, 7))
    with vf.random.scope(outer):
        y = vf.call(lambda x: torch.nn.functional.dropout(x, 0.5), x, remat=True)
        rows = vf.scan(lambda c, _: (c, torch.rand(3)), x, length=2)[1]
    return y, rows, vf.random.normal(inner, (8, 5)), inner


def draw(process: int, processes: int) -> Any:
    """What the step gives on all processes together."""
    mesh = vf.make_mesh(x=processes)
    jitted = vf.pjit(step, mesh=mesh, out_shardings=("a/x b", "...", "a b~/x", "..."))
    return [v.full().tolist() for v in jitted(KEY, X)]
