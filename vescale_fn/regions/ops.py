"""The library operations of regions: one opaque node each in a trace. They have shapes, but no kernels: a program runs
collectives of its engine in their place, and an eager region runs them on all ranks at once.

`axes` is text, "dp=2,tp=4": the mesh axes that take part, major to minor, and their sizes. `states` says what the
operation makes of its operand along these axes, "V->I".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vescale_fn.sharding.bind import bind_sized
from vescale_fn.sharding.grammar import parse
from vescale_fn.sharding.layout import Layout, Shard
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.spec import Spec

_LIBRARY: Any = torch.library.Library("vescale_fn", "FRAGMENT")  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1024)
def group_of(axes: str) -> MeshShape:
    """The axes that a text names.

    >>> group_of("dp=2,tp=4").size
    8
    """
    pairs = [pair.split("=") for pair in axes.split(",") if pair]
    return MeshShape(tuple(name for name, _ in pairs), tuple(int(size) for _, size in pairs))


@lru_cache(maxsize=4096)
def boundary_layout(spec: str, axes: str, shape: tuple[int, ...]) -> Layout:
    """The layout, on the axes of a region, of a global tensor that enters or leaves it. 'ct' speaks of the gradient:
    the value itself is whole."""
    parsed = parse(spec)
    kept = Spec(parsed.dims, tuple(e for e in parsed.state if e.kind != "ct"), parsed.text)
    return bind_sized(kept, shape, group_of(axes), {})


def local_shape(spec: str, axes: str, shape: Sequence[int]) -> tuple[int, ...]:
    """What a rank in the region sees of a global shape.

    >>> local_shape("b/dp d", "dp=2", (8, 3))
    (4, 3)
    """
    return boundary_layout(spec, axes, tuple(shape)).max_local_shape


def global_shape(spec: str, axes: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The global shape of which a rank in the region holds `shape`.

    >>> global_shape("b/dp d", "dp=2", (4, 3))
    (8, 3)
    """
    group = group_of(axes)
    out, parsed = list(shape), parse(spec)
    first_after = next((i for i, d in enumerate(parsed.dims) if d == "..."), len(parsed.dims))
    for i, dim in enumerate(parsed.dims):
        if dim == "...":
            continue
        at = i if i < first_after else len(shape) - len(parsed.dims) + i
        cut = dim.axes + tuple(a for f in getattr(dim, "factors", ()) for a in f.axes)
        out[at] *= group.extent(cut)
    return tuple(out)


def sharded_dims(layout: Layout) -> dict[str, int]:
    """The dim that each axis shards."""
    return {a: s.dim for a, s in zip(layout.mesh.names, layout.states) if isinstance(s, Shard)}


# ---- the operations

Shape = tuple[int, ...]


SHAPES: dict[Any, Callable[..., Shape]] = {}  # by operation: the shape of its result, from operand's shape and the rest


def _define(schema: str, shape: Callable[..., Shape]) -> Any:
    """An operation whose result has the dtype of its operand, and the shape that `shape` gives."""
    name = schema.partition("(")[0]
    _LIBRARY.define(f"{schema} -> Tensor")
    _LIBRARY.impl(name, lambda x, *args: x.new_empty(shape(tuple(x.shape), *args)), "Meta")
    op = getattr(torch.ops.vescale_fn, name).default
    SHAPES[op] = shape
    return op


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _gathered(shape: Shape, axes: str, dim: int, _: str) -> Shape:
    return _with(shape, dim, shape[dim] * group_of(axes).size)


def _scattered(shape: Shape, axes: str, dim: int, _: str) -> Shape:
    return _with(shape, dim, shape[dim] // group_of(axes).size)


def _exchanged(shape: Shape, axes: str, split_dim: int, concat_dim: int, _: str) -> Shape:
    n = group_of(axes).size
    split = _with(shape, split_dim, shape[split_dim] // n)
    return _with(split, concat_dim, split[concat_dim] * n)


def _from_global(shape: Shape, axes: str, spec: str) -> Shape:
    return local_shape(spec, axes, shape)


def _from_local(shape: Shape, axes: str, spec: str) -> Shape:
    return global_shape(spec, axes, shape)


def _same(shape: Shape, *_: Any) -> Shape:
    return shape


TO_LOCAL = _define("to_local(Tensor x, str axes, str spec)", _from_global)
TO_GLOBAL = _define(
    "to_global(Tensor x, str axes, str spec)", lambda shape, axes, spec: global_shape(spec, axes, shape)
)
CAST = _define("cast(Tensor x, str axes, str states)", _same)
KEEP = _define("keep(Tensor x, str axes, int index, str states)", _same)
ALL_REDUCE = _define("all_reduce(Tensor x, str axes, str kind, str states)", _same)
ALL_GATHER = _define("all_gather(Tensor x, str axes, int dim, str states)", _gathered)
REDUCE_SCATTER = _define("reduce_scatter(Tensor x, str axes, int dim, str states)", _scattered)
OWN_SLICE = _define("own_slice(Tensor x, str axes, int dim, str states)", _scattered)
ALL_TO_ALL = _define("all_to_all(Tensor x, str axes, int split_dim, int concat_dim, str states)", _exchanged)
PPERMUTE = _define("ppermute(Tensor x, str axes, int[] pairs, str states)", _same)
BROADCAST = _define("broadcast(Tensor x, str axes, int source, str states)", _same)

_LIBRARY.define("axis_index(str axes, Device device) -> Tensor")
_LIBRARY.impl(
    "axis_index", lambda axes, device: torch.empty((), dtype=torch.int64, device=device), "CompositeExplicitAutograd"
)
AXIS_INDEX = torch.ops.vescale_fn.axis_index.default


def _ragged_result(operand: Tensor, output: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(output)


_LIBRARY.define(
    "ragged_all_to_all(Tensor operand, Tensor output, Tensor input_offsets, Tensor send_sizes, Tensor output_offsets, "
    "Tensor recv_sizes, str axes) -> Tensor"
)
_LIBRARY.impl("ragged_all_to_all", _ragged_result, "Meta")
RAGGED_ALL_TO_ALL = torch.ops.vescale_fn.ragged_all_to_all.default

NAMESPACE = "vescale_fn"


def is_ours(op: Any) -> bool:
    """Whether an operation is one of this package's library."""
    return isinstance(op, torch._ops.OpOverload) and op.namespace == NAMESPACE
