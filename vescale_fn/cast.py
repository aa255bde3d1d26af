"""`cast`: another dtype, in which sums over ranks are made too where it is the wider one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fn.tracing import current_trace

_LIBRARY: Any = torch.library.Library("vescale_fn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("widen(Tensor x, ScalarType dtype) -> Tensor")
_LIBRARY.impl("widen", lambda x, dtype: x.to(dtype, copy=True), "CompositeExplicitAutograd")

WIDEN = torch.ops.vescale_fn.widen.default


class Cast(torch.autograd.Function):
    """x in another dtype; its gradient comes back in that of x."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype.itemsize <= x.dtype.itemsize:
            return x.to(dtype, copy=True)
        result: Tensor = WIDEN(x, dtype)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.dtypes = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return cast(grad, ctx.dtypes[0]), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return cast(tangent, ctx.dtypes[1])

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], x: Tensor, dtype: torch.dtype) -> Any:
        return cast(x, dtype), in_dims[0]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which says how ranks add up: sums over a mesh axis that are pending in what is cast to a wider
    dtype are made in that dtype, and so are those of its gradient where x is the wider one.

    A plain cast reduces before it, where that moves fewer bytes.

    >>> cast(torch.ones(2), torch.bfloat16)
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    if x.dtype == dtype:
        return x
    trace = current_trace()
    if trace is None:
        return x.to(dtype)
    result: Tensor = Cast.apply(trace.bring(x), dtype)  # type: ignore[no-untyped-call]
    return result
