"""Views and shape arguments: literal sizes of the global program become local sizes.

A local view uses reshape: collectives return contiguous tensors, so strides may differ from the global trace.
"""

from __future__ import annotations

from typing import Any

import torch

from vescale_fn.localize.context import Context, Handler, local_dim
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.rules.registry import bound_args

aten = torch.ops.aten


def _reshape(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    return ctx.emit(aten.reshape.default, (args[0], ctx.local_shape(ctx.outs[0])))


def _expand(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    return ctx.emit(aten.expand.default, (args[0], ctx.local_shape(ctx.outs[0])))


def _split(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    """Both forms of split: sizes of the pieces as this rank holds them."""
    dim = bound_args(ctx.eqn)["dim"] % ctx.ins[0].ndim
    sizes = tuple(local_dim(out, dim) for out in ctx.outs)
    return ctx.emit(aten.split_with_sizes.default, (args[0], sizes, dim))


def _sizes_first(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    """op(grad, sizes, ...): the backward of slicing, whose second argument is the shape of the result."""
    return ctx.emit(ctx.eqn.op, (args[0], ctx.local_shape(ctx.outs[0]), *args[2:]), kwargs)


HANDLERS: dict[Any, Handler] = {
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape,
    aten.expand.default: _expand,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice_backward.default: _sizes_first,
    aten.select_backward.default: _sizes_first,
    aten.diagonal_backward.default: _sizes_first,
}
