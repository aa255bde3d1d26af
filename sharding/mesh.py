"""Meshes: named axes over ranks, row-major (the first axis is the slowest).

`MeshShape` is the pure part (names and sizes) that layouts, rules and solver see; `Mesh` adds where the
ranks live (virtual devices of this process, a torch.distributed world, or nowhere).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

MeshKind = Literal["virtual", "torchdist", "abstract"]


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the axes of a mesh, major to minor.

    >>> m = MeshShape(("dp", "tp"), (2, 4))
    >>> m.size, m["tp"], m.coords(5)
    (8, 4, {'dp': 1, 'tp': 1})
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __getitem__(self, axis: str) -> int:
        return self.sizes[self.names.index(axis)]

    def __contains__(self, axis: object) -> bool:
        return axis in self.names

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def extent(self, axes: Iterable[str]) -> int:
        """Number of ranks along `axes` taken together."""
        return math.prod(self[a] for a in axes)

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis name."""
        out: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes)):
            rank, out[name] = divmod(rank, size)[0], rank % size
        return {n: out[n] for n in self.names}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at `coords` (axes left out count as 0)."""
        r = 0
        for name, size in zip(self.names, self.sizes):
            r = r * size + coords.get(name, 0)
        return r

    def all_coords(self) -> Iterator[dict[str, int]]:
        """Coordinates of every rank, in rank order."""
        return (self.coords(r) for r in range(self.size))

    def group(self, coords: Mapping[str, int], axes: tuple[str, ...]) -> tuple[int, ...]:
        """Ranks that share all coordinates of `coords` except those along `axes`; the first axis is major.

        >>> MeshShape(("dp", "tp"), (2, 2)).group({"dp": 1, "tp": 0}, ("tp",))
        (2, 3)
        """
        sub = MeshShape(axes, tuple(self[a] for a in axes))
        return tuple(self.rank({**coords, **c}) for c in sub.all_coords())

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Every group along `axes`, in order of its first rank."""
        return tuple(dict.fromkeys(self.group({**c, **dict.fromkeys(axes, 0)}, axes) for c in self.all_coords()))

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes))


def axes_text(axes: Sequence[str]) -> str:
    """Axes as specs and programs write them: `tp`, or `(dp tp)`."""
    return axes[0] if len(axes) == 1 else f"({' '.join(axes)})"


@dataclass(frozen=True)
class Mesh:
    """A mesh whose ranks live somewhere. Made by `make_mesh` or `abstract_mesh`.

    `processes` processes hold the ranks, in equal runs of consecutive ranks; `process` is this one.
    `device` is the torch device type; `devices` lists devices for virtual ranks (round robin), if given.
    """

    shape: MeshShape
    kind: MeshKind = "virtual"
    device: str = "cpu"
    devices: tuple[str, ...] = ()
    processes: int = 1
    process: int = 0

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.shape.names

    @property
    def size(self) -> int:
        return self.shape.size

    @property
    def local_ranks(self) -> range:
        """The ranks that this process holds."""
        if self.kind == "abstract":
            return range(0)
        per = self.size // self.processes
        return range(self.process * per, (self.process + 1) * per)

    def axis_rank(self, axis: str) -> int:
        """Coordinate along `axis` of the first rank this process holds."""
        return self.shape.coords(self.local_ranks[0])[axis]

    def device_of(self, rank: int) -> str:
        """The torch device that holds a rank."""
        if self.devices:
            return self.devices[rank % len(self.devices)]
        return self.device

    def at(self, **fixed: int) -> Mesh:
        """The sub-mesh of the ranks with these coordinates; it has the other axes. Not over several processes.

        >>> Mesh(MeshShape(("pp", "tp"), (2, 4)), devices=("cpu:0", "cpu:1")).at(pp=1).shape
        MeshShape(names=('tp',), sizes=(4,))
        """
        for axis, c in fixed.items():
            if axis not in self.shape or not 0 <= c < self.shape[axis]:
                raise ValueError(f"Mesh.at: there is no {axis}={c} on the mesh {self}.")
        if self.processes > 1:
            raise ValueError(f"Mesh.at: the mesh {self} lies over {self.processes} processes, and has no sub-meshes.")
        rest = tuple(a for a in self.shape.names if a not in fixed)
        devices = tuple(self.device_of(r) for r in self.shape.group(fixed, rest)) if self.devices else ()
        return replace(self, shape=MeshShape(rest, tuple(self.shape[a] for a in rest)), devices=devices)

    def __str__(self) -> str:
        return str(self.shape)


def rank_text(rank: int, coords: Mapping[str, int]) -> str:
    """`rank 3 (dp=1, tp=1)`."""
    return f"rank {rank} ({', '.join(f'{a}={i}' for a, i in coords.items())})"
