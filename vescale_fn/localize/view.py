"""Views and shape arguments: literal sizes of the global program become local sizes.

A local view uses reshape: collectives return contiguous tensors, so strides may differ from the global trace.
"""

from __future__ import annotations

from typing import Any

import torch

from vescale_fn.localize.context import Context, Handler, local_dim
from vescale_fn.localize.index import cuts
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import Layout
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


def _slice(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    (x,), (out,), named = ctx.ins, ctx.outs, bound_args(ctx.eqn)
    dim = named["dim"] % x.ndim
    start, end = _bounds(named, x, out, dim)
    return ctx.emit(aten.slice.Tensor, (args[0], dim, start, end, named["step"]))


def _slice_backward(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    (part,), (out,), named = ctx.ins, ctx.outs, bound_args(ctx.eqn)
    dim = named["dim"] % out.ndim
    start, end = _bounds(named, out, part, dim)
    return ctx.emit(aten.slice_backward.default, (args[0], ctx.local_shape(out), dim, start, end, named["step"]))


def _bounds(named: dict[str, Any], whole: Layout, part: Layout, dim: int) -> tuple[Any, Any]:
    """Where a slice starts and ends on a rank. A dim that is cut has all of it sliced, or one of equal pieces, of
    each of which the rank holds as much."""
    size, length = whole.shape[dim], part.shape[dim]
    if not cuts(whole, dim) or length == size:
        return named["start"], named["end"]
    local = local_dim(part, dim)
    assert isinstance(local, int)  # what follows another factor is never uneven
    piece = (named["start"] or 0) % size // length
    return piece * local, (piece + 1) * local


def _sizes_first(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    """op(grad, sizes, ...): the backward of selecting, whose second argument is the shape of the result."""
    return ctx.emit(ctx.eqn.op, (args[0], ctx.local_shape(ctx.outs[0]), *args[2:]), kwargs)


HANDLERS: dict[Any, Handler] = {
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.expand.default: _expand,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: _split,
    aten.split_copy.Tensor: _split,
    aten.split_with_sizes_copy.default: _split,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.diagonal_backward.default: _sizes_first,
    aten.unfold_backward.default: _sizes_first,
}
