"""Torch functions on Arrays: inside a trace the Arrays become inputs of the step, outside the function runs as a pjit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import optree

from vescale_fn import errors
from vescale_fn.array import Array
from vescale_fn.pjit import Jitted, pjit
from vescale_fn.trace import current_trace


def apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs) with Arrays among the arguments."""
    name = getattr(func, "__name__", str(func))
    trace = current_trace()
    if trace is not None:
        args, kwargs = optree.tree_map(lambda x: trace.lift(x) if isinstance(x, Array) else x, (args, kwargs))
        return func(*args, **kwargs)
    if getattr(func, "__module__", "").startswith("torch._functorch"):
        raise TypeError(errors.func_over_array(name))
    return _one_operation(func)(*args, **kwargs)


@lru_cache(maxsize=512)
def _one_operation(func: Callable[..., Any]) -> Jitted[..., Any]:
    def operation(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    operation.__name__ = getattr(func, "__name__", "operation")
    return pjit(operation)
