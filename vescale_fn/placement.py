"""Making Arrays: from tensors that every process has, from this process's own rows, from a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vescale_fn import errors
from vescale_fn.array import Array, ArrayType
from vescale_fn.move import move_to
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.shardings import layouts_for
from vescale_fn.tree import flatten, unflatten


def cut(x: torch.Tensor, layout: Layout, coords: Mapping[str, int]) -> torch.Tensor:
    """A contiguous copy of the part of x that the rank at `coords` holds."""
    for dim in range(layout.ndim):
        runs = layout.intervals(dim, coords)
        if runs == ((0, layout.shape[dim]),):
            continue
        pieces = [x.narrow(dim, a, b - a) for a, b in runs] or [x.narrow(dim, 0, 0)]
        x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    for axis, _ in layout.partial:
        if coords[axis] > 0:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return x.clone(memory_format=torch.contiguous_format)


def distribute(x: torch.Tensor, layout: Layout, mesh: Mesh, spec: str | None = None) -> Array:
    """The tensor x, which this process holds whole, as an Array."""
    names = mesh.shape
    shards = [cut(x.to(mesh.device_of(r)), layout, names.coords(r)) for r in mesh.local_ranks]
    return Array(ArrayType(layout, x.dtype, mesh), shards, spec)


def device_put(tree: Any, specs: Any = None, mesh: Mesh | None = None, *, may_alias: bool = False, **sizes: int) -> Any:
    """Put a pytree of tensors, numbers or Arrays on a mesh, by specs.

    tree: leaves of global shape; under torchrun every process passes the same values. Arrays are moved.
    specs: a prefix tree of spec strings, P, S, NamedSharding or rules; None keeps whole.
    may_alias: an Array that is already in the asked layout is returned as it is, not copied.
    sizes: sizes of factors named in the specs (`h=16`).
    Raises ValueError naming the leaf when a spec does not fit its shape.

    >>> import torch, vescale_fn as vf
    >>> mesh = vf.make_mesh(dp=2, tp=2)
    >>> vf.device_put({"w": torch.ones(4, 6)}, {"w": "d f/tp"}, mesh)["w"].addressable_shards[0].data.shape
    torch.Size([4, 3])
    """
    leaves, treedef = flatten(tree)
    mesh = mesh or next((x.mesh for x in leaves if isinstance(x, Array)), None)
    if mesh is None:
        raise ValueError(errors.no_mesh("vf.device_put"))
    tensors = [x if x is None or isinstance(x, Array) else torch.as_tensor(x) for x in leaves]
    placed = layouts_for(specs, unflatten(treedef, tensors), mesh, what="device_put", **sizes)
    out = [
        None if x is None else _put(x, layout, mesh, None if spec is None else str(spec), may_alias)
        for x, (layout, spec) in zip(tensors, placed, strict=True)
    ]
    return unflatten(treedef, out)


def _put(x: torch.Tensor | Array, layout: Layout, mesh: Mesh, spec: str | None, may_alias: bool) -> Array:
    if isinstance(x, torch.Tensor):
        return distribute(x, layout, mesh, spec)
    if x.mesh != mesh:
        return distribute(x.full(), layout, mesh, spec)
    out = move_to(x, layout)
    shards = out.shards if out is not x or may_alias else [s.clone() for s in x.shards]
    return Array(out.type, shards, spec)


def local_put(tree: Any, specs: Any, mesh: Mesh, **sizes: int) -> Any:
    """Arrays from each process's own rows: leaves have the shape of what this process holds of the global value.

    The global size of a dim is its local size times the number of processes along the axes that shard it. With one
    process this is device_put.
    """
    leaves, treedef = flatten(tree)
    tensors = [torch.as_tensor(x) for x in leaves]
    if mesh.processes == 1:
        return device_put(unflatten(treedef, tensors), specs, mesh, **sizes)
    first = dict.fromkeys(mesh.axis_names, 0)
    probe = layouts_for(specs, unflatten(treedef, [_grown(x, mesh) for x in tensors]), mesh, what="local_put", **sizes)
    out = []
    for x, (layout, spec) in zip(tensors, probe, strict=True):
        shape = tuple(n * _processes_along(layout, d, mesh) for d, n in enumerate(x.shape))
        real = Layout.of(layout.mesh, shape, dict(zip(layout.mesh.names, layout.states)))
        start = mesh.shape.coords(mesh.local_ranks[0]) if mesh.local_ranks else first
        shards = [_own_rows(x, real, start, mesh.shape.coords(r)).to(mesh.device_of(r)) for r in mesh.local_ranks]
        out.append(Array(ArrayType(real, x.dtype, mesh), shards, str(spec)))
    return unflatten(treedef, out)


def _grown(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """x as a tensor without storage whose dims are divisible by whatever a spec may ask."""
    return torch.empty([n * mesh.size for n in x.shape], dtype=x.dtype, device="meta")


def _processes_along(layout: Layout, dim: int, mesh: Mesh) -> int:
    """How many processes' rows make up a dim."""
    starts = {
        layout.intervals(dim, mesh.shape.coords(p * (mesh.size // mesh.processes)))[0] for p in range(mesh.processes)
    }
    per = {layout.intervals(dim, mesh.shape.coords(r)) for r in mesh.local_ranks}
    return max(1, len(starts) if len(per) == 1 else layout.mesh.extent(a for a, _ in layout.shards(dim)) // len(per))


def _own_rows(x: torch.Tensor, layout: Layout, start: Mapping[str, int], coords: Mapping[str, int]) -> torch.Tensor:
    """The part of x, this process's rows, that belongs to one of its ranks."""
    for dim in range(layout.ndim):
        first, mine = layout.intervals(dim, start)[0], layout.intervals(dim, coords)
        offset = min(a for a, _ in mine) - first[0]
        length = sum(b - a for a, b in mine)
        if x.shape[dim] != length:
            x = x.narrow(dim, offset, length)
    return x.clone(memory_format=torch.contiguous_format)


def make_array_from_callback(
    shape: tuple[int, ...], spec: Any, mesh: Mesh, callback: Callable[[tuple[slice, ...]], Any], **sizes: int
) -> Array:
    """An Array whose parts come from `callback(index)`, called once for each distinct part that this process holds.

    index: one slice of the global tensor per dim. The callback returns a tensor (or array) of the part's shape.
    """
    ((layout, named),) = layouts_for(spec, torch.empty(shape, device="meta"), mesh, what="make_array", **sizes)
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    shards = []
    for rank in mesh.local_ranks:
        coords = mesh.shape.coords(rank)
        runs = tuple(layout.intervals(d, coords) for d in range(layout.ndim))
        if any(len(r) != 1 for r in runs):
            raise ValueError(errors.strided_callback(str(named)))
        index = tuple(slice(*r[0]) for r in runs)
        if runs not in made:
            made[runs] = torch.as_tensor(callback(index))
        part = made[runs]
        if tuple(part.shape) != layout.local_shape(coords):
            raise ValueError(errors.callback_shape(index, tuple(part.shape), layout.local_shape(coords)))
        shards.append(part.to(mesh.device_of(rank)).clone(memory_format=torch.contiguous_format))
    return Array(ArrayType(layout, shards[0].dtype, mesh), shards, str(named))


def make_array_from_process_local_data(sharding: Any, local: Any, mesh: Mesh | None = None, **sizes: int) -> Array:
    """One Array from this process's own rows; `sharding` is a NamedSharding, or a spec together with `mesh`."""
    mesh = mesh or sharding.mesh
    out: Array = local_put(local, sharding, mesh, **sizes)
    return out
