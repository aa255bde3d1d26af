"""What a rank runs in place of an operation that knows global positions: plain torch functions on local tensors.

`owned` are the runs (start, stop) of global positions that this rank holds of an indexed dim, in local order, and
`size` is the global extent of that dim. Reads of positions held elsewhere give zeros, so that the sum over ranks is
the read; writes to them are dropped. A position outside [0, size) raises, as it does in torch. A rank may hold
nothing. No function writes to its operands or returns memory of theirs: what is overwritten in a step rests on that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from vescale_fn.sharding.comm import identity
from vescale_fn.sharding.layout import Kind

Tensor = torch.Tensor
Runs = tuple[tuple[int, int], ...]

aten = torch.ops.aten


# --- positions ----------------------------------------------------------------------------------------------------


def extent(owned: Runs) -> int:
    """How many positions a rank holds.

    >>> extent(((2, 4), (8, 10)))
    4
    """
    return sum(stop - start for start, stop in owned)


def local_positions(index: Tensor, owned: Runs, size: int, elsewhere: int) -> tuple[Tensor, Tensor]:
    """Local positions of global ones, `elsewhere` for those that this rank does not hold, and which it holds.

    >>> local_positions(torch.tensor([1, 4, 5, 2]), ((1, 2), (4, 6)), 6, elsewhere=0)
    (tensor([0, 1, 2, 0]), tensor([ True,  True,  True, False]))
    """
    if len(owned) == 1:
        ((start, stop),) = owned
        _require(((index >= 0) & (index < size)).all(), size)
        local = index - start
        held = (local >= 0) & (index < stop)
        return local.masked_fill(~held, elsewhere), held
    table = torch.full((size,), -1, dtype=index.dtype, device=index.device)
    at = 0
    for start, stop in owned:
        table[start:stop] = torch.arange(at, at + stop - start, dtype=index.dtype, device=index.device)
        at += stop - start
    local = table[_not_negative(index, size)]
    held = local >= 0
    return local.masked_fill(~held, elsewhere), held


def _not_negative(index: Tensor, size: int) -> Tensor:
    _require((index >= 0).all(), size)
    return index


def _require(fits: Tensor, size: int) -> None:
    """Raise where the comparison fails; on a GPU when the device gets there, without waiting for it."""
    aten._assert_async.msg(fits, f"index out of range: this dim has {size} positions")


def _wrapped(index: Tensor, size: int) -> Tensor:
    """Negative positions count from the end."""
    return torch.where(index < 0, index + size, index)


def _along(index: Tensor, dim: int, rank: int) -> Tensor:
    """A vector as a tensor of `rank` dims, of size one but for `dim`."""
    return index.reshape([-1 if d == dim else 1 for d in range(rank)])


def _with_spare(x: Tensor, dim: int) -> Tensor:
    """x with one more position at the end of `dim`, for writes that are dropped."""
    return torch.cat([x, x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])], dim)


def _without_spare(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1).contiguous()


# --- reads --------------------------------------------------------------------------------------------------------


def _held_at(index: int, owned: Runs) -> int | None:
    """The local position of a global one; None if another rank holds it."""
    at = 0
    for start, stop in owned:
        if start <= index < stop:
            return at + index - start
        at += stop - start
    return None


def select_shard(x: Tensor, dim: int, index: int, owned: Runs) -> Tensor:
    """x.select along a dim of which this rank holds some positions.

    >>> [select_shard(torch.tensor([5.0, 6.0]), 0, i, ((2, 4),)).item() for i in (0, 3)]
    [0.0, 6.0]
    """
    at = _held_at(index, owned)
    if at is None:
        return x.new_zeros([n for d, n in enumerate(x.shape) if d != dim])
    return x.select(dim, at).clone(memory_format=torch.contiguous_format)


def embedding_shard(weight: Tensor, indices: Tensor, owned: Runs, size: int) -> Tensor:
    """Rows of a table of which this rank holds some.

    >>> embedding_shard(torch.tensor([[5.0], [6.0]]), torch.tensor([1, 2, 3]), ((2, 4),), 4)
    tensor([[0.],
            [5.],
            [6.]])
    """
    local, held = local_positions(indices, owned, size, elsewhere=0)
    if not extent(owned):
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    rows: Tensor = aten.embedding.default(weight, local)
    return rows.masked_fill(~held.unsqueeze(-1), 0)


def gather_shard(x: Tensor, dim: int, index: Tensor, owned: Runs, size: int) -> Tensor:
    """torch.gather along a dim of which this rank holds some positions."""
    local, held = local_positions(index, owned, size, elsewhere=0)
    if not extent(owned):
        return x.new_zeros(index.shape)
    return x.gather(dim, local).masked_fill(~held, 0)


def index_select_shard(x: Tensor, dim: int, index: Tensor, owned: Runs, size: int) -> Tensor:
    """torch.index_select along a dim of which this rank holds some positions."""
    local, held = local_positions(index.reshape(-1), owned, size, elsewhere=0)
    if not extent(owned):
        return x.new_zeros([local.numel() if d == dim else n for d, n in enumerate(x.shape)])
    return x.index_select(dim, local).masked_fill(~_along(held, dim, x.dim()), 0)


def index_shard(
    x: Tensor, indices: Sequence[Tensor | None], owned: Sequence[Runs | None], sizes: Sequence[int]
) -> Tensor:
    """x[indices], where this rank holds `owned` of each indexed dim; None where the dim is whole, or not indexed."""
    local, held = _local_indices(indices, owned, sizes)
    if not all(runs is None or extent(runs) for runs in owned):
        x = x.new_zeros([max(n, 1) for n in x.shape])
    out: Tensor = aten.index.Tensor(x, local)
    return out.masked_fill(~_indexed_mask(held, indices, x.dim()), 0)


def _local_indices(
    indices: Sequence[Tensor | None], owned: Sequence[Runs | None], sizes: Sequence[int]
) -> tuple[list[Tensor | None], Tensor]:
    """Local positions in each indexed dim, 0 for those held elsewhere, and which elements this rank holds."""
    local: list[Tensor | None] = []
    masks: list[Tensor] = []
    for index, runs, size in zip(indices, owned, sizes):
        if index is None or runs is None:
            local.append(index)
            continue
        position, held = local_positions(_wrapped(index, size), runs, size, elsewhere=0)
        local.append(position)
        masks.append(held)
    return local, functools.reduce(torch.logical_and, masks)


def _indexed_mask(held: Tensor, indices: Sequence[Tensor | None], rank: int) -> Tensor:
    """A mask over the broadcast indices, shaped like x[indices]: the indexed dims take the place of the first one when
    they are next to each other, else they lead."""
    where = [d for d, v in enumerate(indices) if v is not None]
    picked = max(v.dim() for v in indices if v is not None)
    held = held.reshape([*[1] * (picked - held.dim()), *held.shape])
    adjacent = where[-1] - where[0] == len(where) - 1
    after = rank - where[-1] - 1 if adjacent else rank - len(where)
    return held.reshape([*held.shape, *[1] * after])


# --- writes -------------------------------------------------------------------------------------------------------


def select_backward_shard(grad: Tensor, dim: int, index: int, owned: Runs) -> Tensor:
    """The gradient of what `select_shard` read from: zeros but at the position that was selected."""
    out = grad.new_zeros([*grad.shape[:dim], extent(owned), *grad.shape[dim:]])
    at = _held_at(index, owned)
    if at is not None:
        out.select(dim, at).copy_(grad)
    return out


def embedding_backward_shard(
    grad: Tensor, indices: Tensor, owned: Runs, size: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """The gradient of this rank's rows of a table."""
    n = extent(owned)
    local, _ = local_positions(indices, owned, size, elsewhere=n)
    local = local.masked_fill(indices == padding_idx, n)  # row n is the kernel's padding: it is not added to
    table: Tensor = aten.embedding_dense_backward.default(grad, local, n + 1, n, scale_grad_by_freq)
    return table[:n]


def scatter_shard(
    x: Tensor, dim: int, index: Tensor, src: Tensor | float, owned: Runs, size: int, reduce: str = "", **options: Any
) -> Tensor:
    """torch.scatter, scatter_add (reduce="add") or scatter_reduce onto the positions that this rank holds.

    >>> scatter_shard(torch.zeros(2), 0, torch.tensor([3, 0]), torch.tensor([1.0, 2.0]), ((2, 4),), 4)
    tensor([0., 1.])
    """
    n = extent(owned)
    local, held = local_positions(index, owned, size, elsewhere=n)
    if reduce == "add" or (not reduce and index.shape[dim] == 1):
        return _scatter_without_spare(x, dim, local, held, src, reduce)
    spare = _with_spare(x, dim)
    if not reduce:
        return _without_spare(spare.scatter(dim, local, src), dim)
    assert isinstance(src, Tensor)
    return _without_spare(spare.scatter_reduce(dim, local, src, reduce, **options), dim)


def scatter_combined_shard(
    x: Tensor, dim: int, index: Tensor, src: Tensor | float, owned: Runs, size: int, reduce: str
) -> Tensor:
    """torch.scatter that adds to, or multiplies, the positions that this rank holds."""
    local, _ = local_positions(index, owned, size, elsewhere=extent(owned))
    return _without_spare(_with_spare(x, dim).scatter(dim, local, src, reduce=reduce), dim)


def _scatter_without_spare(
    x: Tensor, dim: int, local: Tensor, held: Tensor, src: Tensor | float, reduce: str
) -> Tensor:
    """Without a spare position: what is not held adds zero to position 0, or, being the only write of its line, puts
    back what is there."""
    if not x.shape[dim]:
        return x.clone()
    local = local.masked_fill(~held, 0)
    if isinstance(src, Tensor):
        src = src[tuple(slice(n) for n in local.shape)]
    if reduce == "add":
        assert isinstance(src, Tensor)
        return x.scatter_add(dim, local, src.masked_fill(~held, 0))
    return x.scatter(dim, local, torch.where(held, src, x.gather(dim, local)).to(x.dtype))


def index_add_shard(
    x: Tensor, dim: int, index: Tensor, source: Tensor, owned: Runs, size: int, alpha: float = 1
) -> Tensor:
    """torch.index_add onto the positions that this rank holds."""
    if not extent(owned):
        local_positions(index, owned, size, elsewhere=0)
        return x.clone()
    local, held = local_positions(index.reshape(-1), owned, size, elsewhere=0)
    return x.index_add(dim, local, source.masked_fill(~_along(held, dim, x.dim()), 0), alpha=alpha)


def index_copy_shard(x: Tensor, dim: int, index: Tensor, source: Tensor, owned: Runs, size: int) -> Tensor:
    """torch.index_copy onto the positions that this rank holds."""
    local, _ = local_positions(index.reshape(-1), owned, size, elsewhere=extent(owned))
    return _without_spare(_with_spare(x, dim).index_copy(dim, local, source), dim)


def index_fill_shard(x: Tensor, dim: int, index: Tensor, value: float, owned: Runs, size: int) -> Tensor:
    """torch.index_fill onto the positions that this rank holds."""
    local, _ = local_positions(_wrapped(index.reshape(-1), size), owned, size, elsewhere=extent(owned))
    return _without_spare(_with_spare(x, dim).index_fill(dim, local, value), dim)


def index_put_shard(
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool,
    owned: Sequence[Runs | None],
    sizes: Sequence[int],
) -> Tensor:
    """torch.index_put onto the positions that this rank holds; see `index_shard` for `owned`."""
    if accumulate:
        return _index_put_added(x, indices, values, owned, sizes)
    local: list[Tensor | None] = []
    spared: list[int] = []
    for d, (index, runs, size) in enumerate(zip(indices, owned, sizes)):
        if index is None or runs is None:
            local.append(index)
            continue
        local.append(local_positions(_wrapped(index, size), runs, size, elsewhere=extent(runs))[0])
        x = _with_spare(x, d)
        spared.append(d)
    out: Tensor = aten.index_put.default(x, local, values)
    for d in spared:
        out = _without_spare(out, d)
    return out


def _index_put_added(
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    owned: Sequence[Runs | None],
    sizes: Sequence[int],
) -> Tensor:
    """What is held elsewhere adds zero to position 0."""
    local, held = _local_indices(indices, owned, sizes)
    if not all(runs is None or extent(runs) for runs in owned):
        return x.clone()
    mine = torch.where(_indexed_mask(held, indices, x.dim()), values, values.new_zeros(()))
    out: Tensor = aten.index_put.default(x, local, mine, True)
    return out


# --- kernels that refuse empty tensors ----------------------------------------------------------------------------


def unless_empty(
    op: str,
    shapes: Sequence[Sequence[int] | None],
    dtypes: Sequence[Any],
    kind: Kind,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `aten.<op>` unless this rank's part of an operand is empty; then its results are tensors of `shapes` (None
    for results that are not made) that change nothing in a reduction of `kind`.

    >>> unless_empty("amax.default", [()], [torch.float32], "max", torch.ones(0))
    tensor(-inf)
    """
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if all(t.numel() for t in tensors):
        packet, _, overload = op.partition(".")
        return getattr(getattr(aten, packet), overload)(*args, **kwargs)
    device = tensors[0].device
    out = tuple(
        None if shape is None else torch.full(shape, identity(kind, dtype), dtype=dtype, device=device)
        for shape, dtype in zip(shapes, dtypes)
    )
    return out if len(out) > 1 else out[0]


# --- regions ------------------------------------------------------------------------------------------------------


def keep(x: Tensor, position: int, index: int) -> Tensor:
    """x on the rank whose position is `index`, zeros on the others.

    >>> keep(torch.ones(2), 1, 0)
    tensor([0., 0.])
    """
    return x.clone() if position == index else torch.zeros_like(x)
