"""What each collective means, as functions of the list of tensors that a group holds, in the group's order.

The virtual engine runs `collective`; torch.distributed moves the pieces that `cut` makes and `join` reads. Reductions
add in the order of the ranks, so results repeat bit for bit. The notation (dim, pre, n, rest) is that of
`sharding.comm`; `sizes` are the extents of the pieces along a dim, one per member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vescale_fn.sharding.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    Permute,
    PPermute,
    ReduceScatter,
    common_runs,
    identity,
)
from vescale_fn.sharding.layout import Kind
from vescale_fn.sharding.mesh import MeshShape


def split(x: Tensor, dim: int, pre: int, sizes: Sequence[int]) -> list[Tensor]:
    """(pre, n, rest) -> one (pre, rest) for each member.

    >>> [p.tolist() for p in split(torch.arange(8), 0, 2, (4, 4))]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    if pre == 1:
        return list(torch.split(x, list(sizes), dim))
    rows = torch.unflatten(x, dim, (pre, x.shape[dim] // pre))
    return [p.flatten(dim, dim + 1) for p in torch.split(rows, [s // pre for s in sizes], dim + 1)]


def merge(pieces: Sequence[Tensor], dim: int, pre: int) -> Tensor:
    """The inverse of `split`: one (pre, rest) from each member -> (pre, n, rest).

    >>> merge([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], 0, 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if pre == 1:
        return torch.cat(list(pieces), dim)
    rows = [torch.unflatten(p, dim, (pre, p.shape[dim] // pre)) for p in pieces]
    return torch.cat(rows, dim + 1).flatten(dim, dim + 1)


def own_slice(x: Tensor, dim: int, pre: int, start: int, length: int) -> Tensor:
    """This rank's digit of a whole piece, as a contiguous copy: (pre, n, rest) -> (pre, rest), the run
    start : start + length of (n, rest)."""
    if pre > 1:
        rows = torch.unflatten(x, dim, (pre, x.shape[dim] // pre)).narrow(dim + 1, start, length)
        return rows.flatten(dim, dim + 1).contiguous()
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def to_partial(x: Tensor, kind: Kind, index: int) -> Tensor:
    """A whole value as a pending reduction: member 0 keeps it, the others hold the identity of `kind`."""
    return x if index == 0 else torch.full_like(x, identity(kind, x.dtype), memory_format=torch.contiguous_format)


_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce(pieces: Sequence[Tensor], kind: Kind) -> Tensor:
    """A new tensor: the pieces combined in order."""
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    combine = _COMBINE[kind]
    out = combine(pieces[0], pieces[1])
    for p in pieces[2:]:
        out = combine(out, p, out=out)
    return out


def source_of(comm: Permute, mesh: MeshShape, member: int) -> int:
    """Which member's block the given member receives; members are counted in the order of `comm.src`.

    >>> source_of(Permute(("x", "y"), ("y", "x")), MeshShape(("x", "y"), (2, 3)), 1)
    2
    """
    order = MeshShape(comm.src, tuple(mesh[a] for a in comm.src))
    target = MeshShape(comm.dst, tuple(mesh[a] for a in comm.dst))
    return target.rank(order.coords(member))


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, by their coordinates, in the order of its axes. `sizes`: extents, one
    per member, of the pieces of the dim that a ReduceScatter or AllToAll splits; empty when they are equal."""

    mesh: MeshShape
    members: tuple[Mapping[str, int], ...]
    sizes: tuple[int, ...] = ()


def cut(comm: Collective, group: Group, x: Tensor, i: int) -> list[Tensor]:
    """What member i sends of its operand x: one piece for each member."""
    n = len(group.members)
    match comm:
        case ReduceScatter():
            if comm.flat:
                x = x.flatten(comm.dim, comm.dim + len(comm.flat) - 1)
            return split(x, comm.dim, comm.pre, group.sizes or [x.shape[comm.dim] // n] * n)
        case AllToAll():
            return split(x, comm.split_dim, comm.split_pre, group.sizes or [x.shape[comm.split_dim] // n] * n)
        case Exchange():
            return [_taken(x, [[(a, k) for a, _, k in d] for d in _common(comm, group, i, j)]) for j in range(n)]
        case Permute():
            return [x if source_of(comm, group.mesh, j) == i else x.new_empty(0) for j in range(n)]
        case PPermute():
            to = comm.destination_of.get(i)
            pieces = [x if j == to else x.new_empty(0) for j in range(n)]
            if i not in comm.source_of:
                pieces[i] = torch.zeros_like(x)  # who hears from nobody sends itself zeros
            return pieces
        case Broadcast():
            return [x if i == comm.source else x.new_empty(0)] * n
    return [x] * n


def join(comm: Collective, group: Group, pieces: Sequence[Tensor], j: int) -> Tensor:
    """What member j makes of the pieces it received, one from each member: a new contiguous tensor."""
    match comm:
        case AllReduce() | ReduceScatter():
            return reduce(pieces, comm.kind).contiguous()
        case AllToAll():
            return merge(pieces, comm.concat_dim, comm.concat_pre).contiguous()
        case AllGather():
            whole = merge(pieces, comm.dim, comm.pre).contiguous()
            return torch.unflatten(whole, comm.dim, comm.flat) if comm.flat else whole
        case Permute():
            return pieces[source_of(comm, group.mesh, j)].clone(memory_format=torch.contiguous_format)
        case PPermute():
            return pieces[comm.source_of.get(j, j)].clone(memory_format=torch.contiguous_format)
        case Broadcast():
            return pieces[comm.source].clone(memory_format=torch.contiguous_format)
    assert isinstance(comm, Exchange)
    out = pieces[0].new_empty(comm.dst.local_shape(group.members[j]))
    for i, piece in enumerate(pieces):
        _place(out, piece, [[(b, k) for _, b, k in d] for d in _common(comm, group, i, j)])
    return out


def _common(comm: Exchange, group: Group, i: int, j: int) -> list[list[tuple[int, int, int]]]:
    """Per dim, the runs that member i holds and member j wants."""
    a, b = group.members[i], group.members[j]
    return [list(common_runs(comm.src.intervals(d, a), comm.dst.intervals(d, b))) for d in range(comm.src.ndim)]


def _taken(x: Tensor, runs: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """The given (start, length) runs of each dim of x."""
    for d, parts in enumerate(runs):
        x = torch.cat([x.narrow(d, a, k) for a, k in parts], d) if parts else x.narrow(d, 0, 0)
    return x


def _place(out: Tensor, piece: Tensor, runs: Sequence[Sequence[tuple[int, int]]], d: int = 0) -> None:
    """Write a piece into the given (start, length) runs of dims d.. of out."""
    if d == len(runs):
        out.copy_(piece)
        return
    at = 0
    for start, length in runs[d]:
        _place(out.narrow(d, start, length), piece.narrow(d, at, length), runs, d + 1)
        at += length


def collective(comm: Collective, group: Group, xs: Sequence[Tensor]) -> list[Tensor]:
    """What each member gets from a collective on the members' tensors `xs`: new contiguous tensors, each on the device
    of its member."""
    if isinstance(comm, AllReduce):
        total = reduce(_on(xs, xs[0].device), comm.kind).contiguous()
        return [total, *(total.to(x.device, copy=True) for x in xs[1:])]
    sent = [cut(comm, group, x, i) for i, x in enumerate(xs)]
    return [join(comm, group, _on([row[j] for row in sent], x.device), j) for j, x in enumerate(xs)]


def _on(xs: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [x.to(device) for x in xs]
