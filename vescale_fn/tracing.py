"""What the rest asks of a trace: how arguments are described, which trace is under way, what came with a sharding.

Apart from the trace itself, which is imported when the first step is traced.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vescale_fn.array import Array
from vescale_fn.sharding.graph import Graph
from vescale_fn.shardings import NamedSharding

if TYPE_CHECKING:
    from vescale_fn.trace import Trace


@dataclass(frozen=True)
class Aval:
    """Shape, dtype and device of a tensor argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"


@dataclass(frozen=True)
class ShapeDtype:
    """A tensor that is only described: stands for an argument when a step is lowered but not run.

    >>> ShapeDtype((8, 16), torch.bfloat16)
    ShapeDtype(shape=(8, 16), dtype=torch.bfloat16, device='cpu')
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced step.

    graph: inputs are the arguments in order, then the captured values.
    captured: tensors and Arrays that the step closed over; read them again on each call.
    static: indices of float arguments whose value the program depends on: it holds for the values traced with only.
    """

    graph: Graph
    captured: tuple[Any, ...] = ()
    static: frozenset[int] = frozenset()


CURRENT: ContextVar[Trace | None] = ContextVar("vescale_fn_trace", default=None)


# The region of a shard_map under way, which may run at once, outside any trace; see `regions.region`.
REGION: ContextVar[Any] = ContextVar("vescale_fn_region", default=None)


def current_trace() -> Trace | None:
    """The trace under way, if any."""
    return CURRENT.get()


def sharding_of(value: Any) -> NamedSharding | None:
    """The sharding with which a value came: that of an Array, and inside a step that of an argument, or of something
    that the step closes over. None for what the step computes, and for plain tensors.

    So a function can say where its results should live by where its arguments do, and still runs without a mesh.

    >>> import vescale_fn as vf
    >>> w = vf.device_put(torch.ones(4, 2), "d/dp f", vf.make_mesh(dp=2))
    >>> step = vf.pjit(lambda w: print(vf.sharding_of(w), vf.sharding_of(w + 1)) or w)
    >>> _ = step(w)
    NamedSharding(dp=2: 'd/dp f') None
    """
    if isinstance(value, Array):
        return value.sharding
    if not isinstance(value, torch.Tensor):
        return None
    trace, chain = current_trace(), wrappers(value)
    while trace is not None:
        for x in chain:
            if id(x) in trace.placed:
                return trace.placed[id(x)]
        trace = trace.parent
    return None


def wrappers(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, what it wraps, and so on down to a plain one."""
    chain = [tensor]
    while torch._C._functorch.is_functorch_wrapped_tensor(chain[-1]):
        chain.append(torch._C._functorch.get_unwrapped(chain[-1]))
    return chain


def aval_of(value: Any) -> Any:
    """The Aval of a tensor or Array. A number stands for itself in sub-programs too."""
    if isinstance(value, torch.SymFloat):
        return value
    device = str(value.device) if isinstance(value, torch.Tensor) else value.mesh.device_of(0)
    return Aval(tuple(value.shape), value.dtype, device)
