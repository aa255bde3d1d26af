"""What generated code refers to and is bound later: collectives at their places, and values that differ by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn.engines.kernels import Group
from vescale_fn.program import AxisIndex, Owned, Unbound, bind_constant
from vescale_fn.sharding.comm import AllToAll, Collective, ReduceScatter, Slice
from vescale_fn.sharding.layout import CUTS, Layout, Ragged
from vescale_fn.sharding.mesh import MeshShape


@dataclass(frozen=True, eq=False)
class Site:
    """A collective at its place in a program. `ins` and `outs` are the layouts of its operands and results.
    `overwritable`: operands whose memory nothing reads afterwards. `where`: the user's line."""

    index: int
    name: str
    comm: Collective
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    dtypes: tuple[torch.dtype, ...]
    overwritable: tuple[bool, ...]
    where: str = ""

    @property
    def mesh(self) -> MeshShape:
        return self.outs[0].mesh

    def group(self, coords: Mapping[str, int], operand: int = 0) -> Group:
        """The ranks among which the rank at `coords` exchanges an operand."""
        comm, out = self.comm, self.outs[operand]
        members = tuple(self.mesh.coords(r) for r in self.mesh.group(coords, comm.axes))
        within_dim = isinstance(comm, AllToAll) and comm.split_dim == comm.concat_dim  # always in equal pieces
        if out.is_even or within_dim or not isinstance(comm, (ReduceScatter, AllToAll)):
            return Group(self.mesh, members)
        dim = comm.dim if isinstance(comm, ReduceScatter) else comm.split_dim
        return Group(self.mesh, members, tuple(out.flat.local_size(dim, m) for m in members))

    def __str__(self) -> str:
        return f"{self.name} = {self.comm}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True, eq=False)
class Start:
    """Begins a collective. Its answer is what `Wait` takes."""

    site: Site


@dataclass(frozen=True, eq=False)
class Wait:
    """Ends a collective. Its answer is the results."""

    site: Site


@dataclass(frozen=True, eq=False)
class Link:
    """What one stage of a pipeline sends to another, for every microbatch: tensors of these layouts, from the rank at
    `source` along the axis to the one at `target`. `actions`: what the table calls the two ends, `0SEND_F` and
    `1RECV_F`, say."""

    axis: str
    source: int
    target: int
    layouts: tuple[Layout, ...]
    dtypes: tuple[torch.dtype, ...]
    actions: tuple[str, str]

    @property
    def mesh(self) -> MeshShape:
        return self.layouts[0].mesh


@dataclass(frozen=True)
class Send:
    """Hands what a link takes of one microbatch to the other rank. Its answer is empty, and comes at once."""

    link: Link
    microbatch: int

    def __str__(self) -> str:
        return f"{self.link.actions[0]}{self.microbatch}"


@dataclass(frozen=True)
class Receive:
    """Waits for what a link brings of one microbatch. Its answer is the tensors."""

    link: Link
    microbatch: int

    def __str__(self) -> str:
        return f"{self.link.actions[1]}{self.microbatch}"


@dataclass(frozen=True)
class Cut:
    """Start and length, on this rank, of its own digit of a whole dim; see `Slice`. Binds to (start, length)."""

    op: Slice
    layout: Layout  # of the result

    def bind(self, mesh: MeshShape, coords: Mapping[str, int]) -> tuple[int, int]:
        members = [mesh.coords(r) for r in mesh.group(coords, self.op.axes)]
        sizes = [self.layout.flat.local_size(self.op.dim, m) // self.op.pre for m in members]
        index = bind_constant(AxisIndex(self.op.axes), mesh, coords)
        return sum(sizes[:index]), sizes[index]


@dataclass(frozen=True)
class Device:
    """The device of this rank. With `traced`, a device the trace saw: another one only if of another type."""

    traced: torch.device | None = None

    def bind(self, device: torch.device) -> torch.device:
        return device if self.traced is None or self.traced.type == device.type else self.traced


Constant = Unbound | Cut | Device


def bind_to_rank(c: Constant, mesh: MeshShape, coords: Mapping[str, int], device: torch.device) -> Any:
    """The value of a constant on the rank at `coords`."""
    if isinstance(c, Device):
        return c.bind(device)
    return c.bind(mesh, coords) if isinstance(c, Cut) else bind_constant(c, mesh, coords)


def same_everywhere(c: Unbound, mesh: MeshShape) -> bool:
    """Whether an unbound constant has one value on all ranks."""
    if isinstance(c, AxisIndex):
        return mesh.extent(c.axes) == 1
    cuts = [s for s in c.layout.states if isinstance(s, CUTS) and s.dim == c.dim]
    if isinstance(c, Owned):
        return not cuts
    return not any(isinstance(s, Ragged) or s.uneven for s in cuts)
