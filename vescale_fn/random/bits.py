"""Random numbers as an operation: one opaque node of a trace, under every transform of torch.func.

`random_bits(key, draw, shape, stream, form, dtype)` and `fold_in(key, data)` take a key, or a batch of keys as vmap
makes it, with one result for each. `KERNELS` maps both to functions that need only torch; `RULES` says how they may be
sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fn.array import Array
from vescale_fn.random import philox
from vescale_fn.sharding.rules.random import drawn, folded
from vescale_fn.sharding.rules.registry import Entry
from vescale_fn.tracing import current_trace

_LIBRARY: Any = torch.library.Library("vescale_fn", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vescale_fn::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.vescale_fn, name).default


RANDOM_BITS = _define(
    "random_bits(Tensor key, int draw, int[] shape, str stream, str form, ScalarType dtype) -> Tensor",
    philox.random_bits,
    lambda key, draw, shape, stream, form, dtype: key.new_empty([*key.shape[:-1], *shape], dtype=dtype),
)
FOLD_IN = _define("fold_in(Tensor key, Tensor data) -> Tensor", philox.fold_in, lambda key, data: torch.empty_like(key))

KERNELS: dict[Any, Callable[..., Tensor]] = {RANDOM_BITS: philox.random_bits, FOLD_IN: philox.fold_in}
RULES: dict[Any, Entry] = {RANDOM_BITS: drawn, FOLD_IN: folded}


class RandomBits(torch.autograd.Function):
    """Random numbers have no derivative, and under vmap each key of a batch draws its own."""

    @staticmethod
    def forward(key: Tensor, draw: int, shape: Sequence[int], *how: Any) -> Tensor:
        drawn: Tensor = RANDOM_BITS(key, draw, list(shape), *how)
        return drawn

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None,) * 6

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], key: Tensor, *how: Any) -> Any:
        return RandomBits.apply(key.movedim(in_dims[0] or 0, 0), *how), 0  # type: ignore[no-untyped-call]


class FoldIn(torch.autograd.Function):
    """Keys have no derivative, and under vmap key and number may each be one or many."""

    @staticmethod
    def forward(key: Tensor, data: Tensor) -> Tensor:
        folded: Tensor = FOLD_IN(key, data)
        return folded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], key: Tensor, data: Tensor) -> Any:
        operands = (
            x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip((key, data), in_dims)
        )
        return FoldIn.apply(*operands), 0  # type: ignore[no-untyped-call]


def random_bits(
    key: Any, draw: int, shape: Sequence[int], stream: str, form: str = "bits", dtype: torch.dtype = torch.int32
) -> Any:
    """A random number for each element of `shape`, by default 32 bits, under any transform, in a trace and outside."""
    return _applied(RandomBits, random_bits, key, draw, tuple(shape), stream, form, dtype)


def fold_key(key: Any, data: Any) -> Any:
    """The key that belongs to a number, an int64 tensor without dims."""
    return _applied(FoldIn, fold_key, key, data)


def _applied(primitive: Any, function: Callable[..., Any], *args: Any) -> Any:
    trace = current_trace()
    if trace is not None:
        return primitive.apply(*(trace.bring(a) for a in args))
    if any(isinstance(a, Array) for a in args):  # a step of one operation
        return Array.__torch_function__(function, (Array,), args)
    return primitive.apply(*args)
