"""Operations without results: what each rank does in their place. They run whatever the layouts of their operands."""

from __future__ import annotations

from typing import Any

from vescale_fn.effects import DEBUG_PRINT
from vescale_fn.local_print import print_once, print_parts
from vescale_fn.localize.context import Context, Handler
from vescale_fn.program import AxisIndex
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import MANUAL, Layout


def _print(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    values, text, batch_dims, per_rank = args
    mesh = ctx.ins[0].mesh
    if per_rank:
        coords = tuple((axis, AxisIndex((axis,))) for axis in mesh.names)
        return ctx.emit(print_parts, (AxisIndex(mesh.names), coords, values, text, batch_dims))
    manual = [a for a in mesh.names if any(x[a] == MANUAL for x in ctx.ins)]
    others = AxisIndex(tuple(a for a in mesh.names if a not in manual))
    own = tuple((axis, AxisIndex((axis,))) for axis in manual)
    whole = [
        ctx.reshard(v, Layout.of(mesh, v.shape, {a: s for a, s in zip(mesh.names, x.states) if s == MANUAL}))
        for v, x in zip(values, ctx.ins)
    ]
    return ctx.emit(print_once, (others, own, whole, text, batch_dims))


HANDLERS: dict[Any, Handler] = {DEBUG_PRINT: _print}
