"""Random numbers: a rank draws its own part of what the whole mesh draws."""

from __future__ import annotations

from typing import Any

from vescale_fn.localize.context import Context, Handler
from vescale_fn.program import Owned
from vescale_fn.random.bits import RANDOM_BITS
from vescale_fn.random.philox import random_bits
from vescale_fn.sharding.graph import Var


def _bits(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Var, ...]:
    (key,), (out,) = ctx.ins, ctx.outs
    owned = [Owned(out, d) for d in range(key.ndim - 1, out.ndim)]
    return ctx.emit(random_bits, (*args, owned), kwargs)


HANDLERS: dict[Any, Handler] = {RANDOM_BITS: _bits}
