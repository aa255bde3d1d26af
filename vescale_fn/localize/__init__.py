"""How an equation is rewritten for one rank: handlers by operation; without one, the same operation runs locally."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vescale_fn.localize import effects, factory, index, kernels, random, view
from vescale_fn.localize.context import Builder, Context, Handler

HANDLERS: Mapping[Any, Handler] = MappingProxyType(
    view.HANDLERS | factory.HANDLERS | index.HANDLERS | kernels.HANDLERS | random.HANDLERS | effects.HANDLERS
)

__all__ = ["HANDLERS", "Builder", "Context", "Handler"]
