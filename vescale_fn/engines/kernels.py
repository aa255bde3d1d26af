"""What each collective means, as functions of the list of tensors that a group holds, in the group's order.

The virtual engine runs these; torch.distributed moves the same pieces between processes. Reductions always add in
the order of the ranks, so results repeat bit for bit. `sizes` are the extents of the pieces along a dim, one per
member; the rest of the notation (dim, pre, n, rest) is that of `sharding.comm`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vescale_fn.sharding.comm import AllGather, AllReduce, AllToAll, Collective, Permute, ReduceScatter
from vescale_fn.sharding.layout import Kind
from vescale_fn.sharding.mesh import MeshShape


def split(x: Tensor, dim: int, pre: int, sizes: Sequence[int]) -> list[Tensor]:
    """(pre, n, rest) -> one (pre, rest) for each member.

    >>> [p.tolist() for p in split(torch.arange(8), 0, 2, (4, 4))]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    if pre == 1:
        return list(x.split(list(sizes), dim))
    rows = x.unflatten(dim, (pre, x.shape[dim] // pre))
    return [p.flatten(dim, dim + 1) for p in rows.split([s // pre for s in sizes], dim + 1)]


def merge(pieces: Sequence[Tensor], dim: int, pre: int) -> Tensor:
    """The inverse of `split`: one (pre, rest) from each member -> (pre, n, rest).

    >>> merge([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], 0, 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if pre == 1:
        return torch.cat(list(pieces), dim)
    rows = [p.unflatten(dim, (pre, p.shape[dim] // pre)) for p in pieces]
    return torch.cat(rows, dim + 1).flatten(dim, dim + 1)


def own_slice(x: Tensor, dim: int, pre: int, start: int, length: int) -> Tensor:
    """This rank's digit of a whole piece, as a contiguous copy: (pre, n, rest) -> (pre, rest), the run
    start : start + length of (n, rest)."""
    if pre > 1:
        rows = x.unflatten(dim, (pre, x.shape[dim] // pre)).narrow(dim + 1, start, length)
        return rows.flatten(dim, dim + 1).contiguous()
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def to_partial(x: Tensor, kind: Kind, index: int) -> Tensor:
    """A whole value as a pending reduction: member 0 keeps it, the others hold the identity of `kind`."""
    return x if index == 0 else torch.full_like(x, identity(kind, x.dtype), memory_format=torch.contiguous_format)


def identity(kind: Kind, dtype: torch.dtype) -> float | int | bool:
    """The value that a reduction of `kind` ignores.

    >>> identity("max", torch.float32), identity("min", torch.int8), identity("max", torch.bool)
    (-inf, 127, False)
    """
    if kind == "sum":
        return 0
    if dtype == torch.bool:
        return kind == "min"
    if dtype.is_floating_point:
        return float("-inf") if kind == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return int(limits.min if kind == "max" else limits.max)


_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


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


def exchange(
    comm: ReduceScatter | AllToAll | AllGather, xs: Sequence[Tensor], sizes: Sequence[int]
) -> list[list[Tensor]]:
    """What each member sends: row i holds the pieces of member i, one for each member. `sizes`: extents of the pieces
    along the dim that is split; empty when they are equal."""
    n = len(xs)
    if isinstance(comm, AllGather):
        return [[x] * n for x in xs]
    dim, pre = (comm.split_dim, comm.split_pre) if isinstance(comm, AllToAll) else (comm.dim, comm.pre)
    return [split(x, dim, pre, sizes or [x.shape[dim] // n] * n) for x in xs]


def combine(comm: ReduceScatter | AllToAll | AllGather, pieces: Sequence[Tensor]) -> Tensor:
    """What a member makes of the pieces it received, one from each member."""
    if isinstance(comm, ReduceScatter):
        return reduce(pieces, comm.kind).contiguous()
    if isinstance(comm, AllToAll):
        return merge(pieces, comm.concat_dim, comm.concat_pre)
    return merge(pieces, comm.dim, comm.pre)


def collective(comm: Collective, mesh: MeshShape, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """What each member gets from a collective on the members' tensors `xs`: new contiguous tensors, each on the device
    of its member. `sizes`: see `exchange`."""
    if isinstance(comm, AllReduce):
        total = reduce(_on(xs, xs[0].device), comm.kind).contiguous()
        return [total, *(total.to(x.device, copy=True) for x in xs[1:])]
    if isinstance(comm, Permute):
        return [xs[source_of(comm, mesh, j)].to(x.device, copy=True).contiguous() for j, x in enumerate(xs)]
    sent = exchange(comm, xs, sizes)
    return [combine(comm, _on([row[j] for row in sent], x.device)).contiguous() for j, x in enumerate(xs)]


def _on(xs: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [x.to(device) for x in xs]
