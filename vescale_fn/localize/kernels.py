"""Fused kernels: literal sizes among their arguments become local ones, and ranks that hold nothing do not call
kernels that refuse empty tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale_fn import local_ops
from vescale_fn.localize.context import Context, Handler, local_dim
from vescale_fn.localize.index import local_args
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import Kind, Layout, shifted
from vescale_fn.sharding.rules import attention, conv, fft, reduce
from vescale_fn.sharding.rules.registry import operand_slots

aten = torch.ops.aten

Change = Callable[[Context, dict[str, Any]], dict[str, Any]]  # arguments that change on a rank


def changed(
    ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any], change: Change
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of which `change` replaces some."""
    named = local_args(ctx, args, kwargs)
    by_name = change(ctx, named)
    if not by_name:
        return args, kwargs
    named |= by_name
    declared = [a.name for a in ctx.eqn.op._schema.arguments if not a.kwarg_only]
    return tuple(named.pop(n) for n in declared), named


def _kernel(change: Change | None = None, kind: Kind = "sum") -> Handler:
    """The same operation with changed arguments. Where a rank holds nothing, results are what a reduction of `kind`
    ignores."""

    def handler(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
        if change is not None:
            args, kwargs = changed(ctx, args, kwargs, change)
        if all(x is None or x.is_even for x in (*ctx.ins, *ctx.outs)):
            return ctx.emit(ctx.eqn.op, args, kwargs)
        shapes = [ctx.local_shape(x) if v.is_tensor else None for x, v in zip(ctx.outs, ctx.eqn.outs)]
        dtypes = [v.dtype if v.is_tensor else None for v in ctx.eqn.outs]
        name = str(ctx.eqn.op).removeprefix("aten.")
        return ctx.emit(local_ops.unless_empty, (name, shapes, dtypes, kind, *args), kwargs)

    return handler


def _layout_of(ctx: Context, name: str) -> Layout:
    """Layout of the operand that is the argument `name`."""
    return ctx.ins[operand_slots(ctx.eqn)[name][0]]


def _group_norm(ctx: Context, named: dict[str, Any]) -> dict[str, Any]:
    x = _layout_of(ctx, "input")
    statistics = _layout_of(ctx, "mean") if "mean" in named else ctx.outs[1]
    return {"N": local_dim(x, 0), "C": local_dim(x, 1), "group": local_dim(statistics, 1)}


def _convolution(ctx: Context, named: dict[str, Any]) -> dict[str, Any]:
    """Groups that this rank holds: axes that shard groups cut the leading factor of the channels."""
    x, groups = _layout_of(ctx, "input"), named["groups"]
    cut = {a: shifted(x[a], -1) for a, letter in ctx.letters.items() if letter == "g"}
    change: dict[str, Any] = {"groups": local_dim(Layout.of(x.mesh, (groups,), cut), 0)}
    if named.get("bias_sizes") is not None:
        change["bias_sizes"] = [local_dim(_layout_of(ctx, "grad_output"), 1)]
    return change


def _result_shape(name: str) -> Change:
    """The argument `name` is the shape of the result."""
    return lambda ctx, named: {name: ctx.local_shape(ctx.outs[0])}


def _merged_dims(ctx: Context, named: dict[str, Any]) -> dict[str, Any]:
    """The dims of a reduction as dims of local tensors, in which a Ragged state merges several into one."""
    x, dim = ctx.ins[0], named.get("dim")
    if x.flat is x or dim is None or dim in ([], ()):
        return {}
    dims = sorted({x.flat_dim(d % x.ndim) for d in ([dim] if isinstance(dim, int) else dim)})
    return {"dim": dims[0] if isinstance(dim, int) else dims}


def _reduction(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    return ctx.emit(ctx.eqn.op, *changed(ctx, args, kwargs, _merged_dims))


_RESAMPLE = [op for op in conv.ENTRIES if "upsample" in str(op)]
_REFUSE_EMPTY = [
    *attention.ENTRIES,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d.default,
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    aten.adaptive_max_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    *(op for op in _RESAMPLE if "backward" not in str(op)),
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.replication_pad3d_backward.default,
    aten.pixel_unshuffle.default,
    aten.im2col.default,
    aten.col2im.default,
    *fft.ENTRIES,
]

HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(reduce.ENTRIES, _reduction),
    **dict.fromkeys(_REFUSE_EMPTY, _kernel()),
    **dict.fromkeys([aten.amax.default, aten.max.default], _kernel(_merged_dims, kind="max")),
    **dict.fromkeys([aten.amin.default, aten.min.default], _kernel(_merged_dims, kind="min")),
    **dict.fromkeys([aten.native_group_norm.default, aten.native_group_norm_backward.default], _kernel(_group_norm)),
    **dict.fromkeys([aten.convolution.default, aten.convolution_backward.default], _kernel(_convolution)),
    **{op: _kernel(_result_shape("input_size")) for op in _RESAMPLE if "backward" in str(op)},
    aten.unfold_backward.default: _kernel(_result_shape("input_sizes")),
}
