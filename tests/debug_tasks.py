"""What the worker processes run to look inside a step."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch

import vescale_fn as vf


def printed(process: int, processes: int) -> str:
    """What this process prints in a step, and outside of it."""
    out = io.StringIO()
    mesh = vf.make_mesh(dp=2)
    x = vf.device_put(torch.arange(4.0), "d/dp", mesh)

    def step(x: Any) -> Any:
        vf.debug_print("whole {}", x)
        vf.debug_print("part {}", x, per_rank=True)
        return x.sum()

    with contextlib.redirect_stdout(out):
        vf.pjit(step)(x)
        step(x)
    return out.getvalue()


def watched(process: int, processes: int) -> str:
    """What a watched step says on this process; rank 1 makes a NaN."""
    mesh = vf.make_mesh(dp=2)
    x = vf.device_put(torch.tensor([1.0, 2.0, -3.0, 4.0]), "d/dp", mesh)
    try:
        with vf.debug(nans=True):
            vf.pjit(lambda x: x.log().sum())(x)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"
