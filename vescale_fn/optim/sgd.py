"""Stochastic gradient descent."""

from __future__ import annotations

from vescale_fn.optim import checks
from vescale_fn.optim.list_update import ListUpdate
from vescale_fn.optim.masks import Mask
from vescale_fn.optim.optimizer import Optimizer
from vescale_fn.optim.schedules import Rate, rate_text


def sgd(
    lr: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """Stochastic gradient descent, with momentum when `momentum` is not 0. Arguments as torch.optim.SGD, whose bits it
    gives with `fused=True`; `lr` and `decay` as for `adamw`."""
    checks.settings("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("sgd: nesterov=True needs momentum > 0 and dampening=0.")
    settings = {
        "momentum": float(momentum),
        "dampening": float(dampening),
        "weight_decay": float(weight_decay),
        "nesterov": nesterov,
        "maximize": maximize,
    }
    name = f"sgd(lr={rate_text(lr)}, momentum={momentum}, weight_decay={weight_decay})"
    return ListUpdate("sgd", ("momentum_buffer" if momentum else None,), settings).optimizer(name, lr, decay)
