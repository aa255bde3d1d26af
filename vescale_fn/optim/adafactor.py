"""Adafactor: second moments of a matrix as the product of a column and a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vescale_fn.optim import checks
from vescale_fn.optim.algorithm import Algorithm, Moments, Now, Slot, one_by_one
from vescale_fn.optim.masks import Mask
from vescale_fn.optim.optimizer import Optimizer
from vescale_fn.optim.schedules import Rate, rate_text


def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """Adafactor, with the arguments of torch.optim.Adafactor; `lr` and `decay` as for `adamw`.

    A parameter of two or more dims has the moments "row_var" (its shape, but 1 in the last dim) and "col_var" (1 in the
    last dim but one), another has "variance". Shazeer and Stern, https://arxiv.org/abs/1804.04235, with torch's
    choices: lr bounds the relative step and scales the weight decay, eps[0] (by default that of the dtype) bounds the
    denominators.
    """
    checks.settings("adafactor", lr=lr, weight_decay=weight_decay, eps=eps[1])
    if not beta2_decay <= 0 or not d >= 1:
        raise ValueError(f"adafactor: beta2_decay={beta2_decay} must be at most 0, and d={d} at least 1.")
    update = _Update(beta2_decay, eps, d, weight_decay, maximize)
    name = f"adafactor(lr={rate_text(lr)}, weight_decay={weight_decay})"
    return Algorithm(name, lr, ("row_var", "col_var", "variance"), _slots, one_by_one(update), decay).optimizer()


def _slots(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Slot]:
    if len(shape) < 2:
        return {"variance": Slot(shape)}
    *rest, rows, columns = shape
    return {"row_var": Slot((*rest, rows, 1)), "col_var": Slot((*rest, 1, columns))}


@dataclass(frozen=True)
class _Update:
    beta2_decay: float
    eps: tuple[float | None, float]
    d: float
    weight_decay: float
    maximize: bool

    def __call__(self, param: Tensor, grad: Tensor, moments: Moments, now: Now) -> tuple[Tensor, Moments]:
        eps = self.eps[0] if self.eps[0] is not None else torch.finfo(param.dtype).eps
        grad = -grad if self.maximize else grad
        count = now.count.double()
        limit = torch.as_tensor(now.lr, dtype=count.dtype, device=count.device)
        size = (_rms(param).clamp(min=self.eps[1]) * torch.minimum(limit, count.rsqrt())).to(torch.float64)
        moments = self._averaged(grad, moments, count**self.beta2_decay)
        direction = grad * _variance(moments, eps).clamp(min=eps * eps).rsqrt()
        size = size / (_rms(direction) / self.d).clamp(min=1.0)
        if self.weight_decay and now.decays:
            param = param * (1 - now.lr * self.weight_decay)
        return param - direction * size, moments

    def _averaged(self, grad: Tensor, moments: Moments, weight: Tensor) -> Moments:
        """Moments with this gradient's part in them."""
        squared = grad.square()
        dims = {"row_var": -1, "col_var": -2}
        news = {m: squared.mean(dims[m], keepdim=True) if m in dims else squared for m in moments}
        return {m: x.lerp(news[m], weight.to(x.dtype)) for m, x in moments.items()}


def _variance(moments: Moments, eps: float) -> Tensor:
    """The second moment of each element."""
    if "variance" in moments:
        return moments["variance"]
    row, column = moments["row_var"], moments["col_var"]
    return row * column / row.mean(-2, keepdim=True).clamp(min=eps)


def _rms(x: Tensor) -> Tensor:
    """Root of the mean square (0-d float64)."""
    norm: Tensor = torch.linalg.vector_norm(x)
    return norm.double() / math.sqrt(max(x.numel(), 1))
