"""Where loaded values go: Arrays in a layout on a mesh, plain tensors, or plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vescale_fn.array import Array, ArrayType
from vescale_fn.checkpoint import messages
from vescale_fn.checkpoint.messages import CheckpointError
from vescale_fn.checkpoint.parts import Parts, parts_of_shards, parts_of_tensor, without_pending
from vescale_fn.sharding.graph import dtype_text
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.shardings import NamedSharding, layouts_for
from vescale_fn.tracing import ShapeDtype
from vescale_fn.tree import flatten, flatten_with_paths


@dataclass(frozen=True)
class Target:
    """A tensor to be loaded: an Array if it has a layout, else a tensor on `device`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    layout: Layout | None = None
    mesh: Mesh | None = None
    spec: str | None = None


@dataclass(frozen=True, eq=False)
class Room:
    """Memory for a target, and the parts of it that must be read."""

    target: Target
    held: list[Tensor]
    parts: Parts

    def value(self) -> Tensor | Array:
        """What was loaded, once all parts are filled."""
        layout, mesh = self.target.layout, self.target.mesh
        if layout is None or mesh is None:
            return self.held[0]
        shards = dict(zip(mesh.local_ranks, self.held))
        for group in without_pending(layout).replicas():
            first, *others = [r for r in group if r in shards] or [-1]
            for r in others:
                shards[r].copy_(shards[first])
        for r, shard in shards.items():  # a pending sum: the first rank holds everything
            if any(kind == "sum" and mesh.shape.coords(r)[axis] for axis, kind in layout.partial):
                shard.zero_()
        return Array(ArrayType(layout, self.target.dtype, mesh), self.held, self.target.spec)


def room(target: Target) -> Room:
    """Uninitialised memory on this process for a target."""
    layout, mesh = target.layout, target.mesh
    if layout is None or mesh is None:
        x = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        return Room(target, [x], parts_of_tensor(x))
    shards = [
        torch.empty(layout.local_shape(mesh.shape.coords(r)), dtype=target.dtype, device=mesh.device_of(r))
        for r in mesh.local_ranks
    ]
    return Room(target, shards, parts_of_shards(without_pending(layout), shards, mesh))


def described(leaf: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of a leaf that stands for a tensor."""
    if isinstance(leaf, (Array, Tensor, ShapeDtype)):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, (np.ndarray, np.generic)) and not isinstance(leaf, (float, str, bytes)):
        return tuple(leaf.shape), torch.as_tensor(leaf).dtype
    return None


def kind_text(kind: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    """`f32[8, 4]`."""
    return "no tensor" if kind is None else f"{dtype_text(kind[1])}{list(kind[0])}"


def targets(
    like: Any, shardings: Any, mesh: Mesh | None, what: str, **sizes: int | Sequence[int]
) -> list[Target | None]:
    """Where each leaf of `like` goes, None for plain values: by `shardings` where they say something, else as in
    `like`, whose Arrays keep their specs when they go to another mesh."""
    paths, leaves, _ = flatten_with_paths(like)
    mesh = mesh or _mesh_among([*flatten(shardings)[0], *leaves])
    if shardings is not None and mesh is None:
        raise CheckpointError(messages.no_mesh(what))
    named = [(None, None)] * len(leaves)
    if shardings is not None and mesh is not None:
        named = layouts_for(shardings, like, mesh, what=what, **sizes)  # type: ignore[assignment]
    found: list[Target | None] = []
    for path, leaf, (layout, spec) in zip(paths, leaves, named):
        kind = described(leaf)
        if kind is None:
            found.append(None)
        elif spec is not None:
            found.append(Target(*kind, "cpu", layout, mesh, str(spec)))
        elif isinstance(leaf, Array):
            if mesh is None:
                raise CheckpointError(messages.abstract_mesh(what, path, leaf.mesh))
            own = (
                leaf.layout
                if leaf.mesh.shape == mesh.shape
                else NamedSharding(mesh, leaf.sharding.spec).layout(kind[0])
            )
            found.append(Target(*kind, "cpu", own, mesh, leaf.spec))
        else:
            device = str(leaf.device) if isinstance(leaf, (Tensor, ShapeDtype)) else "cpu"
            found.append(Target(*kind, "cpu" if device == "meta" else device))
    return found


def _mesh_among(values: list[Any]) -> Mesh | None:
    meshes = (x.mesh for x in values if isinstance(x, (Array, NamedSharding)))
    return next((m for m in meshes if m.kind != "abstract"), None)
