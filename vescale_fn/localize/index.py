"""Look-ups and writes at positions: the indices are global, so a rank that holds part of the indexed dim is told
which positions it owns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from vescale_fn import local_ops
from vescale_fn.localize.context import Context, Handler
from vescale_fn.program import Owned
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import Layout, Ragged
from vescale_fn.sharding.rules.registry import bound_args

aten = torch.ops.aten


def cuts(layout: Layout, dim: int) -> bool:
    """Whether ranks hold different parts of `dim`."""
    return bool(layout.shards(dim)) or any(isinstance(s, Ragged) and s.dim == dim for s in layout.states)


def local_args(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Local arguments by name, with defaults filled in."""
    return bound_args(replace(ctx.eqn, args=args, kwargs=kwargs))


@dataclass(frozen=True)
class _AtPositions:
    """`fn(self, dim, index, *others, owned, size, **options)` in place of an operation along one dim of its first
    operand. `others` and `options` name arguments of the operation; `constants` are options of fn."""

    fn: Any
    others: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()

    def __call__(self, ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
        layout, named = ctx.ins[0], local_args(ctx, args, kwargs)
        dim = named["dim"] % layout.ndim if layout.ndim else 0
        if not layout.ndim or not cuts(layout, dim):
            return ctx.emit(ctx.eqn.op, args, kwargs)
        given = [named["self"], dim, named["index"], *(named[n] for n in self.others)]
        options = {n: named[n] for n in self.options} | dict(self.constants)
        return ctx.emit(self.fn, (*given, Owned(layout, dim), layout.shape[dim]), options)


def _select(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    (x,), named = ctx.ins, local_args(ctx, args, kwargs)
    dim = named["dim"] % x.ndim
    if not cuts(x, dim):
        return ctx.emit(ctx.eqn.op, args, kwargs)
    return ctx.emit(local_ops.select_shard, (args[0], dim, named["index"] % x.shape[dim], Owned(x, dim)))


def _select_backward(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    (x,), named = ctx.outs, local_args(ctx, args, kwargs)
    dim = named["dim"] % x.ndim
    if not cuts(x, dim):
        return ctx.emit(ctx.eqn.op, (args[0], ctx.local_shape(x), dim, named["index"]))
    return ctx.emit(local_ops.select_backward_shard, (args[0], dim, named["index"] % x.shape[dim], Owned(x, dim)))


def _embedding(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    weight = ctx.ins[0]
    if not cuts(weight, 0):
        return ctx.emit(ctx.eqn.op, args, kwargs)
    return ctx.emit(local_ops.embedding_shard, (*args[:2], Owned(weight, 0), weight.shape[0]))


def _embedding_backward(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    (table,), named = ctx.outs, local_args(ctx, args, kwargs)
    if not cuts(table, 0):
        return ctx.emit(ctx.eqn.op, args, kwargs)
    options = (named["padding_idx"], named["scale_grad_by_freq"])
    given = (named["grad_output"], named["indices"], Owned(table, 0), table.shape[0], *options)
    return ctx.emit(local_ops.embedding_backward_shard, given)


def _owned(ctx: Context, indices: list[Any]) -> list[Owned | None]:
    """For each dim that has an index, the positions this rank holds; None where it holds all, or there is no index."""
    x = ctx.ins[0]
    return [Owned(x, d) if index is not None and cuts(x, d) else None for d, index in enumerate(indices)]


def _index(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    owned = _owned(ctx, args[1])
    if not any(owned):
        return ctx.emit(ctx.eqn.op, args, kwargs)
    return ctx.emit(local_ops.index_shard, (args[0], args[1], owned, list(ctx.ins[0].shape[: len(owned)])))


def _index_put(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    named = local_args(ctx, args, kwargs)
    owned = _owned(ctx, named["indices"])
    if not any(owned):
        return ctx.emit(ctx.eqn.op, args, kwargs)
    given = (named["self"], named["indices"], named["values"], named["accumulate"])
    return ctx.emit(local_ops.index_put_shard, (*given, owned, list(ctx.ins[0].shape[: len(owned)])))


HANDLERS: dict[Any, Handler] = {
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _AtPositions(local_ops.gather_shard),
    aten.index_select.default: _AtPositions(local_ops.index_select_shard),
    aten.scatter.src: _AtPositions(local_ops.scatter_shard, ("src",)),
    aten.scatter.value: _AtPositions(local_ops.scatter_shard, ("value",)),
    aten.scatter.reduce: _AtPositions(local_ops.scatter_combined_shard, ("src",), ("reduce",)),
    aten.scatter.value_reduce: _AtPositions(local_ops.scatter_combined_shard, ("value",), ("reduce",)),
    aten.scatter_add.default: _AtPositions(local_ops.scatter_shard, ("src",), constants=(("reduce", "add"),)),
    aten.scatter_reduce.two: _AtPositions(local_ops.scatter_shard, ("src",), ("reduce", "include_self")),
    aten.index_add.default: _AtPositions(local_ops.index_add_shard, ("source",), ("alpha",)),
    aten.index_copy.default: _AtPositions(local_ops.index_copy_shard, ("source",)),
    aten.index_fill.int_Scalar: _AtPositions(local_ops.index_fill_shard, ("value",)),
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
}
