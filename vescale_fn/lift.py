"""Torch functions on Arrays: inside a trace the Arrays become inputs of the step, in a region that runs at once they
enter it, outside the function is a pjit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from vescale_fn.array import Array
from vescale_fn.pjit import Jitted, pjit
from vescale_fn.regions.casts import bring
from vescale_fn.regions.region import current_region
from vescale_fn.tracing import current_trace
from vescale_fn.tree import map_leaves


def apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs) with Arrays among the arguments."""
    trace, region = current_trace(), current_region()
    if trace is not None:
        enter: Callable[[Any], Any] = trace.bring
    elif region is not None:
        enter = partial(bring, region)
    else:
        return _one_operation(func).run(args, kwargs)
    args, kwargs = map_leaves(lambda x: enter(x) if isinstance(x, Array) else x, (args, kwargs))
    return func(*args, **kwargs)


@lru_cache(maxsize=512)
def _one_operation(func: Callable[..., Any]) -> Jitted[..., Any]:
    def operation(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    operation.__name__ = getattr(func, "__name__", "operation")
    return pjit(operation)
