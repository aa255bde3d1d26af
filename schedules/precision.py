"""Mixed precision: a loss computed in a narrow dtype, with parameters, gradients and reductions in wider ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn.cast import cast
from vescale_fn.schedules.gradient import as_weighted
from vescale_fn.schedules.kinds import Loss, check_kind
from vescale_fn.schedules.weighted import Weighted
from vescale_fn.tree import flatten_with_paths, map_leaves


@dataclass(frozen=True)
class MixedPrecision(Loss):
    """A loss that computes in another dtype; see `mixed_precision`."""

    loss: Callable[..., Any]
    compute: torch.dtype
    params: torch.dtype
    reduce: torch.dtype

    def __call__(self, params: Any, *batch: Any) -> Any:
        for path, p in zip(*flatten_with_paths(params)[:2]):
            if p is not None and p.dtype != self.params:
                raise TypeError(
                    f"schedules.mixed_precision: the parameter {path or 'itself'} is {p.dtype}, but params="
                    f"{self.params}. Convert it, or state its dtype."
                )
        value = self.loss(*map_leaves(self._narrow, (params, *batch)))
        name = "schedules.mixed_precision"
        as_weighted(value, name, self.loss)
        if isinstance(value, Weighted):
            return Weighted(self._cast(value.sum, self.params), value.count)
        return self._cast(value, self.params)

    def _narrow(self, x: Any) -> Any:
        return self._cast(x, self.compute) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def _cast(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype) if self.reduce == self.compute else cast(x, dtype)


def mixed_precision(
    loss: Callable[..., Any],
    compute: torch.dtype = torch.bfloat16,
    params: torch.dtype = torch.float32,
    reduce: torch.dtype | None = None,
) -> MixedPrecision:
    """The loss with its parameters and floating-point data cast to `compute`, and its value cast to `params`.

    compute: what the loss computes in. Shards of parameters are cast before they are gathered.
    params: dtype of the parameters, and so of gradients and of the value. A parameter of another is a TypeError.
    reduce: dtype in which ranks add up gradients, and the loss itself: `params` (the default), so that no rounding of
        the narrow dtype enters the sum, or `compute`, which sends fewer bytes.
    Casts are operations of the step like any other. The result equals that of one device up to the rounding of
    `compute`. Raises ValueError for a `reduce` that is neither.

    >>> loss = mixed_precision(lambda w, x: (w @ x).sum())
    >>> loss(torch.ones(2, 2), torch.ones(2))
    tensor(4.)
    """
    check_kind("mixed_precision", "loss", loss)
    reduce = params if reduce is None else reduce
    if reduce not in (params, compute):
        raise ValueError(
            f"schedules.mixed_precision: reduce={reduce} must be the dtype of the parameters, {params}, or the one "
            f"that the loss computes in, {compute}."
        )
    for name, dtype in (("compute", compute), ("params", params)):
        if not dtype.is_floating_point:
            raise ValueError(f"schedules.mixed_precision: {name}={dtype} is no floating-point dtype.")
    return MixedPrecision(loss, compute, params, reduce)
