"""The region under way: its axes, and the states of the values that are born in it.

States live on the innermost tensor, below the wrappers of torch.func, where forward and backward meet. The trace (or
the tensor of all ranks) works them out from those of the operands, operation by operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fn.array import Array
from vescale_fn.regions import ops
from vescale_fn.regions.check import infer_sub_program
from vescale_fn.regions.infer import Unreduced, as_equation, infer, own_axes
from vescale_fn.regions.marks import mark, states_of
from vescale_fn.regions.states import I, States, U, join
from vescale_fn.sharding.graph import Call, Scan, Source
from vescale_fn.sharding.mesh import Mesh, MeshShape
from vescale_fn.tracing import REGION
from vescale_fn.tree import map_tensors


class AtOnce(Protocol):
    """How values enter a region that runs at once, on all ranks of this process; see `rank_tensor`."""

    def parts(self, x: Any, axes: str, spec: str) -> Tensor: ...

    def failed(self, error: Exception) -> None: ...

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
    variables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # the same, of derivatives taken inside

    @property
    def manual(self) -> dict[str, int]:
        """Name and size of every manual axis, those of regions around this one first."""
        outside = self.outer.manual if self.outer else {}
        return {**outside, **dict(zip(self.axes.names, self.axes.sizes))}


def current_region() -> Region | None:
    """The innermost region under way, if any."""
    region: Region | None = REGION.get()
    return region


@contextlib.contextmanager
def inside(region: Region | None) -> Iterator[None]:
    """Inside, `region` is under way, and casts are inserted."""
    from vescale_fn.regions.casts import InsertCasts  # which asks for the region under way

    token = REGION.set(region)
    try:
        with contextlib.ExitStack() as stack:
            if region is not None:
                if region.at_once is not None:
                    stack.enter_context(Spread(region))
                stack.enter_context(InsertCasts(region))
            yield
    finally:
        REGION.reset(token)


class Spread(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In a region that runs at once: what it makes out of nothing is on every rank."""

    def __init__(self, region: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.region.at_once is None or ops.is_ours(func) or func is torch.ops.prim.device.default:
            return out
        spread = map_tensors(out, self.region.at_once.same)
        if not _marked((args, kwargs)):
            note(func, args, kwargs or {}, spread, Source())
        return spread


# ---- states, operation by operation


def note(op: Any, args: Any, kwargs: Any, out: Any, source: Source) -> None:
    """Mark the results of an operation with their states: forward, and backward when the region is long over.

    Raises RegionError where parts of a sum are given to an operation that is not linear in them.
    """
    found = _marked((args, kwargs))
    axes = _axes(found)
    if axes and not ops.is_ours(op) and not any(U in states.values() for states in found):  # most: nothing to look up
        joined = {a: join(states.get(a, I) for states in found) for a in axes}
        map_tensors(out, lambda x: mark(x, joined))
    elif axes or op is ops.TO_LOCAL:
        e, operands = as_equation(op, args, kwargs, out)
        axes |= dict.fromkeys(own_axes(e))
        try:
            states = infer(e, [states_of(x) or {} for x in operands], axes)
        except Unreduced as u:
            raise u.at(source) from None
        map_tensors(out, lambda x: mark(x, states))


def note_sub_program(op: Scan | Call, operands: Sequence[Any], results: Sequence[Tensor]) -> None:
    """Mark the results of a sub-program with their states."""
    axes = _axes(_marked(operands))
    if axes:
        given = [states_of(x) or {} for x in operands if isinstance(x, Tensor)]
        for x, states in zip(results, infer_sub_program(op, given, axes)):
            mark(x, states)


def _axes(found: Sequence[States]) -> dict[str, None]:
    """The manual axes of the region under way, and of these states, in the same order in every run."""
    region = current_region()
    return dict.fromkeys([*(region.manual if region else ()), *(a for states in found for a in states)])


def _marked(tree: Any) -> list[States]:
    """The states of the tensors that have any."""
    found: list[States] = []

    def look(x: Tensor) -> None:
        states = states_of(x)
        if states is not None:
            found.append(states)

    map_tensors(tree, look)
    return found


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
