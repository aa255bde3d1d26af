"""The region under way: its axes, and the states of the values that are born in it.

States live on the innermost tensor, below the wrappers of torch.func, where forward and backward meet: a dispatch mode
works them out from those of the operands, operation by operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fn.array import Array
from vescale_fn.regions import ops
from vescale_fn.regions.check import infer_sub_program
from vescale_fn.regions.infer import as_equation, infer
from vescale_fn.regions.marks import mark, states_of
from vescale_fn.regions.states import States
from vescale_fn.sharding.graph import Call, Scan
from vescale_fn.sharding.mesh import Mesh, MeshShape
from vescale_fn.trace_modes import map_tensors


class AtOnce(Protocol):
    """How values enter a region that runs at once, on all ranks of this process; see `rank_tensor`."""

    def parts(self, x: Any, axes: str, spec: str) -> Tensor: ...

    def same(self, x: Any) -> Any: ...

    def index(self, axes: str) -> Tensor: ...

    def array(self, x: Any, axes: str, spec: str) -> Array: ...


@dataclass(frozen=True, eq=False)
class Region:
    """axes: the manual axes that this region adds. outer: the region around it. checked: whether states are typed."""

    name: str
    mesh: Mesh
    axes: MeshShape
    checked: bool = True
    outer: Region | None = None
    at_once: AtOnce | None = None  # where it runs at once instead of being traced
    entered: dict[Any, tuple[Any, Tensor]] = field(default_factory=dict)  # closed-over values, what stands for them

    @property
    def manual(self) -> dict[str, int]:
        """Name and size of every manual axis, those of regions around this one first."""
        outside = self.outer.manual if self.outer else {}
        return {**outside, **dict(zip(self.axes.names, self.axes.sizes))}

    def note(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Mark the results of an operation with their states."""
        e, operands = as_equation(op, args, kwargs, out)
        states = infer(e, [states_of(x) or {} for x in operands], self.manual)
        map_tensors(out, lambda x: mark(x, states))

    def note_sub_program(self, op: Scan | Call, operands: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Mark the results of a sub-program with their states."""
        given = [states_of(x) or {} for x in operands if isinstance(x, Tensor)]
        for x, states in zip(results, infer_sub_program(op, given, self.manual)):
            mark(x, states)


_current: ContextVar[Region | None] = ContextVar("vescale_fn_region", default=None)


def current_region() -> Region | None:
    """The innermost region under way, if any."""
    return _current.get()


@contextlib.contextmanager
def inside(region: Region | None) -> Iterator[None]:
    """Inside, `region` is under way: states are worked out, and casts inserted."""
    from vescale_fn.regions.casts import InsertCasts  # which asks for the region under way

    token = _current.set(region)
    try:
        with contextlib.ExitStack() as stack:
            if region is not None:
                stack.enter_context(WorkOutStates(region))
                stack.enter_context(InsertCasts(region))
            yield
    finally:
        _current.reset(token)


class WorkOutStates(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the results of every operation, forward and backward, with their states."""

    def __init__(self, region: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.region.at_once is not None and not ops.is_ours(func):  # what it makes out of nothing
            out = map_tensors(out, self.region.at_once.same)
        self.region.note(func, args, kwargs, out)
        return out


# ---- sub-programs


@dataclass(frozen=True)
class Ambient:
    """The region in which a sub-program was called, and the states of what it was given: its body runs again for each
    derivative, perhaps when the region is no longer under way."""

    region: Region | None
    states: tuple[States | None, ...]

    @staticmethod
    def of(operands: Sequence[Any]) -> Ambient:
        return Ambient(current_region(), tuple(map(states_of, operands)))

    @contextlib.contextmanager
    def around(self, operands: Sequence[Any]) -> Iterator[None]:
        """Inside, the region is under way and the operands have the states that they had."""
        if self.region is None:
            yield
            return
        for x, states in zip(operands, self.states):
            if states is not None:
                mark(x, states)
        with inside(self.region):
            yield
