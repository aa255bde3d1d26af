"""Gradient functions: `grad_and_value`, which also takes losses that are kept as sum and count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn.schedules.kinds import GradFunction, check_kind, wrong_kind
from vescale_fn.schedules.weighted import Weighted


@dataclass(frozen=True)
class Gradient(GradFunction):
    """The gradient of a loss with respect to its first argument."""

    loss: Callable[..., Any]

    def sums(self, params: Any, *batch: Any) -> tuple[Any, Weighted]:
        constant: list[int] = []

        def total(params: Any) -> tuple[Any, Any]:
            value = as_weighted(self.loss(params, *batch), "vf.grad_and_value", self.loss)
            if isinstance(value.count, int):  # torch.func passes tensors only
                constant.append(value.count)
                return value.sum, ()
            return value.sum, (value.count,)

        grads, (value, counts) = torch.func.grad_and_value(total, has_aux=True)(params)
        (count,) = constant or counts
        return grads, Weighted(value, count)


def grad_and_value(loss: Callable[..., Any]) -> Gradient:
    """The function (params, *batch) -> (gradients with respect to params, value) of a loss.

    loss: (params, *batch) -> 0-d tensor, or `weighted(sum, count)`, whose mean is meant. As torch.func.grad_and_value,
        which takes plain losses only. Raises TypeError when the loss returns something else.

    >>> import vescale_fn as vf
    >>> grad_fn = grad_and_value(lambda w, x: vf.weighted((w * x).sum(), (x > 0).sum()))
    >>> grad_fn(torch.tensor([1.0, 1.0]), torch.tensor([3.0, 0.0]))
    (tensor([3., 0.]), tensor(3.))
    """
    check_kind("grad_and_value", "loss", loss)
    return Gradient(loss)


def as_weighted(value: Any, what: str, fn: Any) -> Weighted:
    """The value of a loss as sum and count: a plain one counts as one item."""
    if isinstance(value, Weighted):
        return value
    if isinstance(value, torch.Tensor) and not value.ndim:
        return Weighted(value, 1)
    name = getattr(fn, "__name__", "the loss")
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.Tensor) and not value[1].ndim:
        raise TypeError(wrong_kind(what.rpartition(".")[2], "loss", "gradient function", name))
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise TypeError(f"{what}: {name} must return a 0-d tensor or vf.weighted(sum, count), but it returned {got}.")
