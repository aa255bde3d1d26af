"""Making Arrays: from tensors that every process has, from this process's own rows, from a callback."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vescale_fn import errors
from vescale_fn.array import Array, ArrayType
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.shardings import NamedSharding, layouts_for, part_index
from vescale_fn.tracing import REGION, ShapeDtype, current_trace
from vescale_fn.tree import flatten, flatten_with_paths, unflatten


def cut(x: torch.Tensor, layout: Layout, coords: Mapping[str, int]) -> torch.Tensor:
    """A contiguous copy of the part of x that the rank at `coords` holds. Of a pending sum, the first rank holds
    everything and the others zeros; of a pending maximum or minimum all ranks hold the same."""
    layout, x = layout.flat, x.detach().reshape(layout.flat.shape)
    for dim in range(layout.ndim):
        runs = layout.intervals(dim, coords)
        if runs == ((0, layout.shape[dim]),):
            continue
        pieces = [x.narrow(dim, a, b - a) for a, b in runs] or [x.narrow(dim, 0, 0)]
        x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    if any(kind == "sum" and coords[axis] for axis, kind in layout.partial):
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return x.clone(memory_format=torch.contiguous_format)


def distribute(x: torch.Tensor, layout: Layout, mesh: Mesh, spec: str | None = None) -> Array:
    """The tensor x, which this process holds whole, as an Array."""
    shards = [cut(x.to(mesh.device_of(r)), layout, mesh.shape.coords(r)) for r in mesh.local_ranks]
    return Array(ArrayType(layout, x.dtype, mesh), shards, spec)


def device_put(tree: Any, specs: Any = None, mesh: Mesh | None = None, *, may_alias: bool = False, **sizes: int) -> Any:
    """Put a pytree of tensors, numbers or Arrays on a mesh, by specs.

    tree: leaves of global shape; under torchrun every process passes the same values. Arrays are moved. On an abstract
        mesh leaves may be `ShapeDtype`, and nothing is allocated.
    specs: a prefix tree of spec strings, P, S, NamedSharding or rules; None keeps whole.
    mesh: not needed where an Array or a NamedSharding says it.
    may_alias: an Array that is already in the asked layout is returned as it is, not copied.
    sizes: sizes of factors named in the specs (`h=16`).
    Raises ValueError naming the leaf when a spec does not fit its shape.

    >>> import torch, vescale_fn as vf
    >>> mesh = vf.make_mesh(dp=2, tp=2)
    >>> vf.device_put({"w": torch.ones(4, 6)}, {"w": "d f/tp"}, mesh)["w"].addressable_shards[0].data.shape
    torch.Size([4, 3])
    """
    _check_nothing_runs("vf.device_put")
    paths, leaves, treedef = flatten_with_paths(tree)
    mesh = mesh or _mesh_among([*flatten(specs)[0], *leaves])
    values = [_value(x, path, mesh) for x, path in zip(leaves, paths)]
    placed = layouts_for(specs, unflatten(treedef, values), mesh, what="vf.device_put", **sizes)
    out = [
        None if x is None else _put(x, layout, mesh, None if spec is None else str(spec), may_alias)
        for x, (layout, spec) in zip(values, placed, strict=True)
    ]
    return unflatten(treedef, out)


def _check_nothing_runs(what: str) -> None:
    """Raise inside a region, and inside a step: what they compute is nobody's to place."""
    region, trace = REGION.get(), current_trace()
    if region is not None:
        raise ValueError(errors.put_in_region(what, region.name))
    if trace is not None:
        raise ValueError(errors.put_in_trace(what, trace.fn_name))


def _mesh_among(values: list[Any]) -> Mesh:
    mesh = next((x.mesh for x in values if isinstance(x, (Array, NamedSharding))), None)
    if mesh is None:
        raise ValueError(errors.no_mesh_to_put_on())
    return mesh


def _value(x: Any, path: str, mesh: Mesh) -> torch.Tensor | Array | ShapeDtype | None:
    """A leaf as something with a shape."""
    if x is None or isinstance(x, (Array, torch.Tensor)):
        return x
    if isinstance(x, ShapeDtype):
        if mesh.kind != "abstract":
            raise ValueError(errors.described_only(path, mesh))
        return x
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(errors.bad_value(path, type(x).__name__)) from None


def _put(x: torch.Tensor | Array | ShapeDtype, layout: Layout, mesh: Mesh, spec: str | None, may_alias: bool) -> Array:
    if isinstance(x, ShapeDtype):
        return Array(ArrayType(layout, x.dtype, mesh), [], spec)
    if isinstance(x, torch.Tensor):
        return distribute(x, layout, mesh, spec)
    if mesh.kind == "abstract" or x.mesh.kind == "abstract":
        return Array(ArrayType(layout, x.dtype, mesh), _no_parts(x, mesh), spec)
    if x.mesh != mesh:
        return distribute(x.full(), layout, mesh, spec)
    from vescale_fn.move import move_to  # most arrays come from plain tensors, and need no program to get here

    out = move_to(x, layout)
    shards = out.shards if out is not x or may_alias else [s.clone() for s in x.shards]
    return Array(out.type, shards, spec)


def _no_parts(x: Array, mesh: Mesh) -> list[torch.Tensor]:
    if mesh.kind != "abstract":
        raise ValueError(errors.abstract_array(str(x.type)))
    return []


def local_put(tree: Any, specs: Any, mesh: Mesh, **sizes: int) -> Any:
    """Arrays from each process's own rows: a leaf has the shape of what this process holds of the global value.

    The global size of a dim is its local size times the number of parts that the processes cut it in; every process
    passes the same shapes, so uneven specs need `make_array_from_callback`. With one process this is device_put.

    >>> import torch, vescale_fn as vf
    >>> vf.local_put(torch.ones(4, 2), "b/dp d", vf.make_mesh(dp=2)).shape
    torch.Size([4, 2])
    """
    _check_nothing_runs("vf.local_put")
    leaves, treedef = flatten(tree)
    tensors = [torch.as_tensor(x) for x in leaves]
    # Bound to a shape that everything divides, the specs say which part of each dim this process holds.
    grown = [torch.empty([n * mesh.size for n in x.shape], device="meta") for x in tensors]
    probes = layouts_for(specs, unflatten(treedef, grown), mesh, what="vf.local_put", **sizes)
    whole = [torch.empty(_global_shape(x, probe, mesh), device="meta") for x, (probe, _) in zip(tensors, probes)]
    placed = layouts_for(specs, unflatten(treedef, whole), mesh, what="vf.local_put", **sizes)
    out = []
    for x, (layout, spec) in zip(tensors, placed, strict=True):
        shards = [_own_part(x, layout, mesh, r).to(mesh.device_of(r)) for r in mesh.local_ranks]
        out.append(Array(ArrayType(layout, x.dtype, mesh), shards, None if spec is None else str(spec)))
    return unflatten(treedef, out)


Runs = list[tuple[int, int]]


def _held(layout: Layout, dim: int, mesh: Mesh) -> Runs:
    """The runs of a dim that this process holds, in order."""
    return sorted({run for r in mesh.local_ranks for run in layout.intervals(dim, mesh.shape.coords(r))})


def _length(runs: Runs) -> int:
    return sum(b - a for a, b in runs)


def _global_shape(x: torch.Tensor, probe: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Global shape of a value of which this process holds x; `probe`: its layout at another size."""
    held = [_length(_held(probe, d, mesh)) for d in range(probe.ndim)]
    parts = {tuple(probe.intervals(d, mesh.shape.coords(r)) for d in range(probe.ndim)) for r in mesh.local_ranks}
    if sum(math.prod(_length(list(runs)) for runs in part) for part in parts) != math.prod(held):
        raise ValueError(errors.not_rows(str(probe.mesh), mesh.processes))
    return tuple(n * size // max(h, 1) for n, size, h in zip(x.shape, probe.shape, held))


def _own_part(x: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The part of x, which is what this process holds, that belongs to one of its ranks."""
    coords = mesh.shape.coords(rank)
    for dim in range(layout.ndim):
        start = 0
        pieces = []
        for a, b in _held(layout, dim, mesh):
            if (a, b) in layout.intervals(dim, coords):
                pieces.append(x.narrow(dim, start, b - a))
            start += b - a
        x = torch.cat(pieces or [x.narrow(dim, 0, 0)], dim)
    return cut(x, Layout.of(layout.mesh, x.shape, _pending(layout)), coords)


def _pending(layout: Layout) -> dict[str, Any]:
    return {axis: layout[axis] for axis, _ in layout.partial}


def make_array_from_callback(
    shape: tuple[int, ...], spec: Any, mesh: Mesh, callback: Callable[[tuple[slice, ...]], Any], **sizes: int
) -> Array:
    """An Array whose parts come from `callback(index)`, called once for each distinct part that this process holds.

    index: one slice of the global tensor per dim. The callback returns a tensor (or array) of the part's shape.

    >>> import torch, vescale_fn as vf
    >>> vf.make_array_from_callback((4,), "b/dp", vf.make_mesh(dp=2), lambda i: torch.arange(4)[i]).full()
    tensor([0, 1, 2, 3])
    """
    what = "vf.make_array_from_callback"
    ((layout, named),) = layouts_for(spec, torch.empty(shape, device="meta"), mesh, what=what, **sizes)
    if not mesh.local_ranks:
        raise ValueError(errors.nothing_to_make(what, mesh))
    made: dict[Any, torch.Tensor] = {}
    shards = []
    for rank in mesh.local_ranks:
        coords = mesh.shape.coords(rank)
        index = part_index(layout, coords)
        if layout.flat is not layout or not all(isinstance(s, slice) for s in index):
            raise ValueError(errors.strided_callback(str(named)))
        runs = tuple(layout.intervals(d, coords) for d in range(layout.ndim))
        if runs not in made:
            part = torch.as_tensor(callback(index))  # type: ignore[arg-type]
            if tuple(part.shape) != layout.local_shape(coords):
                raise ValueError(errors.callback_shape(index, tuple(part.shape), layout.local_shape(coords)))
            made[runs] = part
        part = made[runs].to(mesh.device_of(rank))
        shards.append(cut(part, Layout.of(layout.mesh, part.shape, _pending(layout)), coords))
    return Array(ArrayType(layout, shards[0].dtype, mesh), shards, None if named is None else str(named))


def make_array_from_process_local_data(sharding: Any, local: Any, mesh: Mesh | None = None, **sizes: int) -> Array:
    """One Array from this process's own rows (see `local_put`); `sharding` is a NamedSharding, or a spec together with
    `mesh`.

    >>> import torch, vescale_fn as vf
    >>> rows = vf.NamedSharding(vf.make_mesh(dp=2), "b/dp d")
    >>> vf.make_array_from_process_local_data(rows, torch.zeros(2, 3))
    Array(f32[2, 3] 'b/dp d' on dp=2; rank 0 [0:1, :] [[0, 0, 0]])
    """
    out: Array = local_put(local, sharding, mesh or _mesh_among([sharding]), **sizes)
    return out
