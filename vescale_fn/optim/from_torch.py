"""Any algorithm of torch.optim as pure functions: torch's own step runs on copies, with the state handed in.

Inside a step that is traced, the copies and the writes to them become values. Outside, it runs as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vescale_fn.functional import unseen
from vescale_fn.optim import checks
from vescale_fn.optim.algorithm import Algorithm, Moments, Now, Rows, Slot
from vescale_fn.optim.masks import Mask
from vescale_fn.optim.optimizer import Optimizer
from vescale_fn.optim.scalars import TensorsAsNumbers
from vescale_fn.optim.schedules import Rate, rate_at, rate_text
from vescale_fn.trace import compiling_flag

Betas = tuple[float, float]


def from_torch(algorithm: type[torch.optim.Optimizer], lr: Rate, *, decay: Mask = None, **settings: Any) -> Optimizer:
    """A class of torch.optim that updates each parameter by itself, as pure functions.

    lr, decay: as for `adamw`. settings: further arguments of the class.
    Raises ValueError for settings that the class refuses, in its words.

    >>> from_torch(torch.optim.RMSprop, lr=0.01, alpha=0.9)
    rmsprop(lr=0.01, alpha=0.9)
    """
    name = algorithm.__name__.lower()
    checks.settings(name, lr=lr)
    more = "".join(f", {k}={v}" for k, v in settings.items())
    borrowed = Borrowed(name, algorithm, lr, settings)
    text = f"{name}(lr={rate_text(lr)}{more})"
    return Algorithm(text, lr, tuple(borrowed.first), borrowed.slots, borrowed.update, decay).optimizer()


class Fill(NamedTuple):
    """The first value of a moment. scalar: the dtype of one that is 0-d, None for one of the parameter's shape."""

    value: float
    scalar: torch.dtype | None


@dataclass(frozen=True)
class Borrowed:
    """A class of torch.optim with its settings."""

    name: str
    algorithm: type[torch.optim.Optimizer]
    lr: Rate
    settings: Mapping[str, Any]

    @cached_property
    def first(self) -> dict[str, Fill]:
        """What torch keeps for a new parameter, but for the step."""
        if not isinstance(self.lr, (Tensor, torch.SymFloat)):
            with unseen():
                return self._first(float(rate_at(self.lr, torch.zeros(()))))
        fills = self._first(1.0)
        if fills != self._first(2.0):
            raise ValueError(f"{self.name}: the first state depends on lr, which must be a number or a schedule here.")
        return fills

    def _first(self, lr: float) -> dict[str, Fill]:
        """The state that torch makes for a small parameter, as numbers."""
        with unseen():
            p = torch.zeros(2, dtype=torch.float64)
            p.grad = torch.zeros_like(p)
            optimizer: Any = self._on([p], lr, self.settings)
            lists = [name for name in inspect.signature(optimizer._init_group).parameters if name != "group"]
            optimizer._init_group(optimizer.param_groups[0], *([] for _ in lists))
            state = {k: x for k, x in optimizer.state[p].items() if k != "step"}
            return {k: Fill(float(x.flatten()[0]), None if x.ndim else x.dtype) for k, x in state.items()}

    def slots(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Slot]:
        return {m: Slot((), x.value, x.scalar) if x.scalar else Slot(shape, x.value) for m, x in self.first.items()}

    def update(self, rows: Rows, now: Now) -> tuple[Sequence[Tensor], Sequence[Moments]]:
        params = [p.clone() for p in rows.params]
        settings = dict(self.settings) if now.decays else {**self.settings, "weight_decay": 0.0}
        with compiling_flag(), TensorsAsNumbers(), torch.no_grad():
            optimizer = self._on(params, 1.0, settings)
            optimizer.param_groups[0]["lr"] = now.lr
            for p, g, moments in zip(params, rows.grads, rows.moments):
                p.grad = g
                # In float64, so that powers of the step are as exact as those of the number that torch reads.
                optimizer.state[p] = {"step": (now.count - 1).double(), **{m: x.clone() for m, x in moments.items()}}
            optimizer.step()
        return params, [{m: optimizer.state[p][m] for m in self.first} for p in params]

    def _on(self, params: list[Tensor], lr: float, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        """The optimizer in the form without decisions that depend on values."""
        make: Any = self.algorithm
        known = inspect.signature(make).parameters
        form = {k: v for k, v in {"foreach": False, "capturable": True}.items() if k in known}
        try:
            made: torch.optim.Optimizer = make(params, lr=lr, **form, **settings)
            return made
        except ValueError as e:
            raise ValueError(f"{self.name}: {e}") from None


# ---- the algorithms of torch.optim, with its arguments and defaults


def adadelta(
    lr: Rate = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """Adadelta, as torch.optim.Adadelta. Zeiler, https://arxiv.org/abs/1212.5701."""
    more = {"rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    return from_torch(torch.optim.Adadelta, lr, decay=decay, **more)


def adagrad(
    lr: Rate = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    *,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """Adagrad, as torch.optim.Adagrad. Duchi, Hazan and Singer, https://jmlr.org/papers/v12/duchi11a.html."""
    more = {"lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
    more["initial_accumulator_value"] = initial_accumulator_value
    return from_torch(torch.optim.Adagrad, lr, decay=decay, **more)


def adamax(
    lr: Rate = 2e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """Adamax, as torch.optim.Adamax. Kingma and Ba, https://arxiv.org/abs/1412.6980, section 7."""
    more: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    return from_torch(torch.optim.Adamax, lr, decay=decay, **more)


def asgd(
    lr: Rate = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """Averaged stochastic gradient descent, as torch.optim.ASGD: the averages are state["ax"].

    Polyak and Juditsky, https://doi.org/10.1137/0330046.
    """
    more = {"lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": weight_decay, "maximize": maximize}
    return from_torch(torch.optim.ASGD, lr, decay=decay, **more)


def nadam(
    lr: Rate = 2e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """Adam with Nesterov momentum, as torch.optim.NAdam. Dozat, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ."""
    more: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    more |= {"momentum_decay": momentum_decay, "decoupled_weight_decay": decoupled_weight_decay}
    return from_torch(torch.optim.NAdam, lr, decay=decay, **more)


def radam(
    lr: Rate = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """Rectified Adam, as torch.optim.RAdam. Liu et al., https://arxiv.org/abs/1908.03265."""
    more: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    more["decoupled_weight_decay"] = decoupled_weight_decay
    return from_torch(torch.optim.RAdam, lr, decay=decay, **more)


def rmsprop(
    lr: Rate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """RMSprop, as torch.optim.RMSprop. Hinton's lecture 6; centered: Graves, https://arxiv.org/abs/1308.0850."""
    more: dict[str, Any] = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    more |= {"momentum": momentum, "centered": centered}
    return from_torch(torch.optim.RMSprop, lr, decay=decay, **more)


def rprop(
    lr: Rate = 1e-2,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
    *,
    maximize: bool = False,
) -> Optimizer:
    """Resilient propagation, as torch.optim.Rprop. Riedmiller and Braun, https://doi.org/10.1109/ICNN.1993.298623."""
    return from_torch(torch.optim.Rprop, lr, etas=etas, step_sizes=step_sizes, maximize=maximize)
