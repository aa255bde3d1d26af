"""Loading a checkpoint onto any mesh: every process reads the tiles that its ranks need, and no others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vescale_fn.checkpoint import manifest, messages
from vescale_fn.checkpoint.lane import Lane, lane
from vescale_fn.checkpoint.manifest import Manifest, Stored, Value
from vescale_fn.checkpoint.messages import CheckpointError
from vescale_fn.checkpoint.targets import described, kind_text, room, targets
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.tracing import ShapeDtype
from vescale_fn.tree import flatten_with_paths, unflatten


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    shardings: Any = None,
    *,
    mesh: Mesh | None = None,
    partial: bool = False,
    **sizes: int | Sequence[int],
) -> Any:
    """The pytree that `save` put in folder `path`, on any mesh, whatever it was saved from.

    like: a tree of the form that was saved. Its tensors, Arrays and `ShapeDtype`s say shape and dtype, and where the
        value goes: Arrays to their own mesh and layout, tensors to their device; nothing in it is written to. By
        default everything comes as plain tensors and values, in a dict by dotted path.
    shardings: a prefix tree of spec strings, P, S, NamedSharding, rules and None; where it says something the value
        becomes an Array in that layout.
    mesh: where Arrays go, if not to the mesh of a NamedSharding or of an Array in `like`.
    partial: `like` may have less than what was saved, which then is not read.
    sizes: sizes of factors named in the specs (`h=16`).
    All processes must call it; each reads the parts that its ranks hold, once, and checks what it reads. Raises
    CheckpointError when there is no checkpoint, when it is damaged, newer than this library, or another tree.

    >>> import tempfile, torch, vescale_fn as vf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vf.save(folder, {"w": torch.arange(4.), "step": 7})
    ...     vf.load(folder, {"w": vf.ShapeDtype((4,)), "step": 0}, {"w": "d/tp", "step": None}, mesh=vf.make_mesh(tp=2))
    {'w': Array(f32[4] 'd/tp' on tp=2; rank 0 [0:2] [0, 1]), 'step': 7}
    """
    folder, together = Path(path).absolute(), lane()
    together.clear()
    while True:
        found = together.agree(lambda: manifest.read(folder))
        values = _load(folder, found, together, like, shardings, mesh, partial, sizes)
        if values is not None:
            return values[0]


def _load(
    folder: Path,
    found: Manifest,
    together: Lane,
    like: Any,
    shardings: Any,
    mesh: Mesh | None,
    partial: bool,
    sizes: Mapping[str, int | Sequence[int]],
) -> tuple[Any] | None:
    """The loaded tree; None when another checkpoint has taken the place of this one meanwhile."""
    from vescale_fn.checkpoint.exchange import read  # the first load loads torch.distributed.checkpoint

    if like is None:
        like = {path: _described(x) if isinstance(x, Stored) else x for path, x in found.leaves.items()}
    paths, leaves, treedef = flatten_with_paths(like)
    check_tree(folder, found, dict(zip(paths, leaves)), partial)
    goals = targets(like, shardings, mesh, "vf.load", **sizes)
    rooms = {path: room(goal) for path, goal in zip(paths, goals) if goal is not None}
    parts = {path: r.parts for path, r in rooms.items() if 0 not in r.target.shape}
    if not read(folder, found, parts, together):
        return None
    return (unflatten(treedef, [rooms[p].value() if p in rooms else found.leaves[p] for p in paths]),)


def check_tree(folder: Path, found: Manifest, asked: Mapping[str, Any], partial: bool) -> None:
    """Raise CheckpointError where the leaves that are asked for are not those of the checkpoint."""
    differences = list(_differences(found.leaves, asked, partial))
    if differences:
        raise CheckpointError(messages.other_tree(folder, differences, partial))


def _differences(have: Mapping[str, Stored | Value], asked: Mapping[str, Any], partial: bool) -> Iterator[str]:
    lost = [p for p in have if p not in asked]
    for path, leaf in asked.items():
        if path not in have:
            yield messages.not_in_checkpoint(path, lost)
        elif (wanted := _kind_of_leaf(leaf)) != (there := _kind(have[path])):
            yield messages.other_type(path, wanted, there)
    if not partial:
        fresh = [p for p in asked if p not in have]
        yield from (messages.not_in_like(path, fresh) for path in lost)


def _kind_of_leaf(leaf: Any) -> str:
    kind = described(leaf)
    return _value_kind(leaf) if kind is None else kind_text(kind)


def _kind(x: Stored | Value) -> str:
    return kind_text((x.shape, getattr(torch, x.dtype))) if isinstance(x, Stored) else _value_kind(x)


def _value_kind(x: Any) -> str:
    for kind in (bool, int, float, str, bytes):
        if isinstance(x, kind):
            return f"of type {kind.__name__}"
    return "None" if x is None else f"of type {type(x).__name__}"


def _described(x: Stored) -> ShapeDtype:
    return ShapeDtype(x.shape, getattr(torch, x.dtype))
