"""Learning rates as functions of the number of updates done."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Schedule = Callable[[Tensor], Tensor]
Rate = float | Tensor | Schedule


def rate_at(lr: Rate, done: Tensor) -> float | Tensor:
    """The learning rate after `done` updates (0-d)."""
    return lr(done.double()) if callable(lr) else lr


def rate_text(lr: Any) -> str:
    return str(lr) if isinstance(lr, (int, float)) else "schedule" if callable(lr) else "tensor"


def warmup_cosine(peak: float, warmup: int, total: int, floor: float = 0.0) -> Schedule:
    """Linear warmup to `peak` over the first `warmup` updates, then a cosine down to `floor` at update `total`, and
    `floor` from there on. A schedule maps the number of updates done (0-d float64 tensor, 0 in the first step) to the
    learning rate (0-d tensor); the first update uses peak / warmup, not zero.

    >>> [round(float(warmup_cosine(1.0, 2, 10)(torch.tensor(float(i)))), 3) for i in (0, 1, 2, 6, 10, 12)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    return _warmup(peak, warmup, total, lambda done: floor + (peak - floor) * 0.5 * (1 + torch.cos(math.pi * done)))


def warmup_linear(peak: float, warmup: int, total: int, floor: float = 0.0) -> Schedule:
    """As `warmup_cosine`, with a straight line down.

    >>> [float(warmup_linear(1.0, 2, 10)(torch.tensor(float(i)))) for i in (0, 1, 2, 6, 10, 12)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    return _warmup(peak, warmup, total, lambda done: peak + (floor - peak) * done)


def _warmup(peak: float, warmup: int, total: int, decay: Schedule) -> Schedule:
    if not 0 <= warmup < total:
        raise ValueError(f"warmup={warmup} must be at least 0 and less than total={total}.")

    def rate(step: Tensor) -> Tensor:
        done = ((step - warmup) / (total - warmup)).clamp(0, 1)  # part of the decay that lies behind
        return torch.where(step < warmup, peak * (step + 1) / max(warmup, 1), decay(done))

    return rate
