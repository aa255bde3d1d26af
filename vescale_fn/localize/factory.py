"""Tensors made inside the step: each rank makes its own part."""

from __future__ import annotations

from typing import Any

import torch

from vescale_fn.localize.context import Context, Handler
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import Layout

aten = torch.ops.aten


def _sized(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    """full(sizes, ...): the same value everywhere."""
    return ctx.emit(ctx.eqn.op, (ctx.local_shape(ctx.outs[0]), *args[1:]), kwargs)


def _by_position(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    """Values that depend on the position: made whole, then cut (no communication)."""
    (out,) = ctx.outs
    (whole,) = ctx.emit(ctx.eqn.op, args, kwargs, layouts=(Layout.of(out.mesh, out.shape),))
    return (ctx.reshard(whole, out),)


HANDLERS: dict[Any, Handler] = {
    aten.full.default: _sized,
    aten.zeros.default: _sized,
    aten.ones.default: _sized,
    aten.empty.memory_format: _sized,
    aten.arange.default: _by_position,
    aten.arange.start: _by_position,
    aten.arange.start_step: _by_position,
    aten.linspace.default: _by_position,
    aten.eye.default: _by_position,
    aten.eye.m: _by_position,
    aten.tril_indices.default: _by_position,
    aten.triu_indices.default: _by_position,
}
