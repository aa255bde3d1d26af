"""Making meshes: over the processes of torch.distributed, over virtual devices of this process, or over nothing."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from vescale_fn.sharding.mesh import Mesh, MeshShape


def make_mesh(*, processes: int | None = None, device: str | None = None, **axes: int) -> Mesh:
    """A mesh with these axes, major to minor.

    Under torchrun, or when torch.distributed is initialised, the ranks are the processes of the world, and one size may
    be -1. Otherwise they are virtual devices in this process.
    processes: the number of processes, when each is to hold several ranks; it must be the size of the world.
    device: torch device of the ranks. Default: a process's own GPU under torchrun where there are GPUs, else the CPU;
        torch's default device for virtual ranks, which share GPUs in turn.
    Raises ValueError when the sizes do not multiply to the number of ranks.

    >>> mesh = make_mesh(dp=2, tp=4)
    >>> mesh.size, mesh.kind, str(mesh)
    (8, 'virtual', 'dp=2,tp=4')
    """
    _check_axes(axes)
    world = _world_size()
    if world is None:
        return _virtual_mesh(processes, device, axes)
    if processes not in (None, world):
        raise ValueError(
            f"make_mesh: processes={processes}, but torch.distributed has a world of {world} processes. "
            f"Leave processes out, or start {processes} processes."
        )
    sizes = _fill(axes, world if processes is None else None, world)
    shape = MeshShape(tuple(axes), sizes)
    _check_size(shape, world, several=processes is not None)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    own = _join_world(device)
    kind = torch.device(device).type
    return Mesh(shape, "torchdist", kind, () if own == kind else (own,), processes=world, process=dist.get_rank())


def abstract_mesh(**axes: int) -> Mesh:
    """A mesh without devices: steps can be lowered and costed on it, not run.

    >>> abstract_mesh(dp=2048, tp=8).size
    16384
    """
    _check_axes(axes)
    if -1 in axes.values():
        raise ValueError(
            f"abstract_mesh: {_text(axes)} has a -1, but there is no world to fill it from. Give the size."
        )
    return Mesh(MeshShape(tuple(axes), tuple(axes.values())), "abstract")


def process_index() -> int:
    """The rank of this process in torch.distributed; 0 without it."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """The number of processes in torch.distributed; 1 without it."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def print0(*values: Any, **options: Any) -> None:
    """`print` on process 0 only."""
    if process_index() == 0:
        print(*values, **options)


def _world_size() -> int | None:
    """Number of processes, or None when there is no torch.distributed and no torchrun."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return None


def _join_world(device: str) -> str:
    """Initialise torch.distributed if nobody has; the device of this process."""
    own = device
    if torch.device(device).type == "cuda" and ":" not in device:
        own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(own)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.device(device).type == "cuda" else "gloo")
    return own


def _virtual_mesh(processes: int | None, device: str | None, axes: dict[str, int]) -> Mesh:
    if processes not in (None, 1):
        raise ValueError(
            f"make_mesh: processes={processes}, but torch.distributed is not initialised. "
            f"Start the program with: torchrun --nproc-per-node {processes} {sys.argv[0] or 'script.py'}"
        )
    if -1 in axes.values():
        raise ValueError(
            f"make_mesh: {_text(axes)} has a -1, which the number of processes fills, but torch.distributed is not "
            "initialised. Give all sizes for virtual devices, or start the program with torchrun."
        )
    shape = MeshShape(tuple(axes), tuple(axes.values()))
    if device is None and torch.cuda.is_available():
        _hint_torchrun(shape.size)
    device = device or str(torch.get_default_device())
    kind = torch.device(device).type
    gpus = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count())) if device == "cuda" else ()
    return Mesh(shape, "virtual", kind, gpus or (() if device == kind else (device,)))


def _hint_torchrun(ranks: int) -> None:
    count = torch.cuda.device_count()
    command = f"torchrun --nproc-per-node {min(ranks, count)} {sys.argv[0] or 'script.py'}"
    print(f"make_mesh: {count} GPU(s) seen, but this is one process with {ranks} virtual ranks. Use them by: {command}")


def _check_axes(axes: dict[str, int]) -> None:
    if not axes:
        raise ValueError("make_mesh: a mesh has at least one axis, for example make_mesh(dp=2).")
    for name, size in axes.items():
        if not isinstance(size, int) or size < -1 or size == 0:
            raise ValueError(f"make_mesh: axis {name}={size!r} needs a positive size, or -1 for what is left.")
        if name.startswith("_"):
            raise ValueError(f"make_mesh: the axis name {name!r} must start with a letter, so that specs can name it.")
    unknown = [a for a, n in axes.items() if n == -1]
    if len(unknown) > 1:
        raise ValueError(f"make_mesh: {_text(axes)} leaves {' and '.join(unknown)} open. Only one axis may be -1.")


def _fill(axes: dict[str, int], ranks: int | None, world: int) -> tuple[int, ...]:
    """The sizes with -1 filled in."""
    if -1 not in axes.values():
        return tuple(axes.values())
    if ranks is None:
        raise ValueError(
            f"make_mesh: with processes={world} the number of ranks is open, so {_text(axes)} needs all sizes."
        )
    known = math.prod(n for n in axes.values() if n != -1)
    if ranks % known:
        raise ValueError(
            f"make_mesh: {_text(axes)} cannot be filled: the world has {ranks} processes, not a multiple of {known}."
        )
    return tuple(ranks // known if n == -1 else n for n in axes.values())


def _check_size(shape: MeshShape, world: int, several: bool) -> None:
    if several and shape.size % world == 0:
        return
    if several:
        raise ValueError(
            f"make_mesh: {shape} has {shape.size} ranks, which {world} processes cannot share equally. "
            "Make the number of ranks a multiple of the number of processes."
        )
    if shape.size > world:
        share = f", or pass processes={world} to let each hold {shape.size // world}" if shape.size % world == 0 else ""
        raise ValueError(
            f"make_mesh: {shape} has {shape.size} ranks, but the world has {world} process(es). "
            f"Start {shape.size} processes{share}."
        )
    if shape.size < world:
        raise ValueError(
            f"make_mesh: {shape} has {shape.size} ranks, but the world has {world} processes, and every process must "
            f"hold a rank. Give one axis the size -1 to use all of them."
        )


def _text(axes: dict[str, int]) -> str:
    return ", ".join(f"{a}={n}" for a, n in axes.items())
