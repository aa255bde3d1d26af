"""Muon: momentum whose directions are made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_fn.errors import one_line
from vescale_fn.optim import checks
from vescale_fn.optim.algorithm import Algorithm, Moments, Now, Slot, one_by_one
from vescale_fn.optim.masks import Mask
from vescale_fn.optim.optimizer import Block, Optimizer
from vescale_fn.optim.schedules import Rate, rate_text
from vescale_fn.orthogonal import ORTHOGONAL, work

# How much larger the step of a matrix with so many rows and columns is than lr.
_ADJUST: Mapping[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def muon(
    lr: Rate = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    precision: torch.dtype = torch.bfloat16,
    decay: Mask = None,
) -> Optimizer:
    """Muon, with the arguments of torch.optim.Muon; `lr` and `decay` as for `adamw`. Decoupled weight decay.

    precision: in which directions are made orthogonal. That takes whole matrices: on a mesh every rank gathers and
        makes all of them, unless `schedules.zero` gives each to one rank, so that all have as much to do.
    Raises ValueError for a parameter that is no matrix: train those with another optimizer, see `groups`.
    Jordan, https://kellerjordan.github.io/posts/muon/; Liu et al., https://arxiv.org/abs/2502.16982.
    """
    checks.settings("muon", lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
    if adjust_lr_fn not in _ADJUST:
        known = one_line([repr(k) for k in _ADJUST])
        raise ValueError(f"muon: adjust_lr_fn={adjust_lr_fn!r} is not known. It must be one of {known}.")
    settings = (list(ns_coefficients), ns_steps, eps, precision)
    update = _Update(weight_decay, momentum, nesterov, settings, _ADJUST[adjust_lr_fn])
    name = f"muon(lr={rate_text(lr)}, weight_decay={weight_decay}, momentum={momentum})"
    slots = ("momentum_buffer",)
    return Algorithm(
        name,
        lr,
        slots,
        lambda shape, dtype: {"momentum_buffer": Slot(shape)},
        one_by_one(update),
        decay,
        admits=_matrix,
        block=lambda shape: Block(shape, work(*shape, ns_steps)) if len(shape) == 2 else None,
    ).optimizer()


def _matrix(path: str, param: Tensor) -> None:
    if param.ndim != 2:
        raise ValueError(
            f"muon: {path or 'the parameter'} has shape {list(param.shape)}, but muon trains matrices only. Give it to "
            'another optimizer: groups({"*.weight": muon(), "*": adamw()}).'
        )


@dataclass(frozen=True)
class _Update:
    weight_decay: float
    momentum: float
    nesterov: bool
    orthogonal: tuple[Any, ...]  # the settings of ORTHOGONAL
    adjust: Callable[[int, int], float]

    def __call__(self, param: Tensor, grad: Tensor, moments: Moments, now: Now) -> tuple[Tensor, Moments]:
        average = moments["momentum_buffer"].lerp(grad, 1 - self.momentum)
        direction = grad.lerp(average, self.momentum) if self.nesterov else average
        direction = ORTHOGONAL(direction, *self.orthogonal)
        lr = now.lr * self.adjust(*param.shape)
        if self.weight_decay and now.decays:
            param = param * (1 - now.lr * self.weight_decay)
        new = param - direction * lr if isinstance(lr, Tensor) else param.add(direction, alpha=-lr)
        return new.to(param.dtype), {"momentum_buffer": average}
