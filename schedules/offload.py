"""Optimizer state in host memory (Ren et al., 2021, "ZeRO-Offload"), moved by the program: a device holds that of some
parameters at a time, while they are updated."""

from __future__ import annotations

from typing import Any

import torch

from vescale_fn.host import TO_DEVICE, TO_HOST
from vescale_fn.optim import Optimizer
from vescale_fn.schedules.kinds import check_kind
from vescale_fn.schedules.zero import Zero, zero
from vescale_fn.tree import flatten, map_leaves


def offload(optimizer: Optimizer) -> Optimizer:
    """The optimizer with its state in host memory, pinned where the device is a GPU: the same numbers, bit for bit.

    `init` leaves the state there; `step` moves each part of it to the device, updates, and moves it back. State without
    dims, such as the number of updates, stays on the device. On a CPU, which has one memory, state is copied instead.
    `lower(...).memory_analysis()` counts what lies in host memory by itself. Inside and around `zero` it is the same:
    each rank moves what it holds.
    Raises TypeError when `optimizer` is none.

    >>> import vescale_fn as vf
    >>> opt, params = offload(vf.optim.adamw(lr=0.1)), {"w": torch.ones(2)}
    >>> params, state = opt.step({"w": torch.ones(2)}, opt.init(params), params)
    >>> opt, params["w"]
    (offload(adamw(lr=0.1, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)), tensor([0.8990, 0.8990]))
    """
    check_kind("offload", "optimizer", optimizer)
    if isinstance(optimizer, Zero):
        return zero(offload(optimizer.inner), optimizer.axis, stage=optimizer.stage)

    def init(params: Any) -> Any:
        return map_leaves(lambda x: TO_HOST(x) if _is_moved(x) else x, optimizer.init_fn(params))

    def step(grads: Any, state: Any, params: Any, skip: torch.Tensor | None) -> tuple[Any, Any]:
        device = next((p.device for p in flatten(params)[0] if p is not None), None)
        moved = map_leaves(lambda x: TO_DEVICE(x, device) if _is_moved(x) else x, state)
        params, new = optimizer.step_fn(grads, moved, params, skip)

        def back(x: Any, here: Any, there: Any) -> Any:
            return there if x is here else TO_HOST(x) if _is_moved(x) else x

        return params, map_leaves(back, new, moved, state)

    return Optimizer(f"offload({optimizer.name})", init, step, optimizer.blocks)


def _is_moved(x: Any) -> bool:
    return x is not None and x.ndim > 0
