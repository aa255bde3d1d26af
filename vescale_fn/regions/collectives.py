"""The collectives of a region: tensor first, then the mesh axis (or axes, major to minor) or a pattern.

Each works on any pytree of tensors. States (see `states`) are checked and changed as the table in `moves` says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vescale_fn.loop import requires_grad
from vescale_fn.regions import moves, ops, texts
from vescale_fn.regions.casts import axes_with_sizes, bring, changes, recast
from vescale_fn.regions.marks import mark, states_of
from vescale_fn.regions.pattern import Moved, is_pattern, read, require
from vescale_fn.regions.ragged import exchange_rows
from vescale_fn.regions.region import Region, current_region
from vescale_fn.regions.states import UNCHECKED, I, R, State, U, V, state_named
from vescale_fn.regions.texts import RegionError
from vescale_fn.sharding.sizes import check_rank
from vescale_fn.sharding.spec import SpecError
from vescale_fn.source import user_source
from vescale_fn.tree import flatten, map_leaves

Axes = str | Sequence[str]

_LOW_PRECISION = (torch.bfloat16, torch.float16)


# ---- reductions


def psum(x: Any, axis: Axes) -> Any:
    """The sum over the ranks along `axis`, on every rank: varying or unreduced -> invarying.

    >>> import torch, vescale_fn as vf
    >>> total = vf.shard_map(lambda x: vf.psum(x, "dp"), mesh=vf.make_mesh(dp=2), in_specs="b/dp", out_specs="b")
    >>> total(torch.arange(4.0))
    tensor([2., 4.])
    """
    moved = _pattern("psum", x, axis, "psum")
    return _each("psum", x, moved.axes if moved else axis, lambda site, t: _reduced(site, t, "sum"))


def pmean(x: Any, axis: Axes) -> Any:
    """The mean over the ranks along `axis`, on every rank: varying or unreduced -> invarying."""
    return _each("pmean", x, axis, lambda site, t: _reduced(site, t, "sum") / site.size)


def pmax(x: Any, axis: Axes) -> Any:
    """The largest over the ranks along `axis`, on every rank: varying -> invarying. It has no derivative."""
    return _each("pmax", x, axis, lambda site, t: _reduced(site, t, "max"))


def pmin(x: Any, axis: Axes) -> Any:
    """The smallest over the ranks along `axis`, on every rank: varying -> invarying. It has no derivative."""
    return _each("pmin", x, axis, lambda site, t: _reduced(site, t, "min"))


def psum_scatter(x: Any, axis: Axes, dim: int = 0, *, tiled: bool = False) -> Any:
    """This rank's piece, along `dim`, of the sum over the ranks along `axis`: varying or unreduced -> varying.

    tiled: the dim is cut in pieces; otherwise it has one entry for each rank, and goes away.
    A pattern, "b s d {sum: tp} -> b s/tp d", says axis and dim, and is tiled.
    """
    moved = _pattern("psum_scatter", x, axis, "psum_scatter", "own_slice")
    if moved:
        return psum_scatter(x, moved.axes, moved.dim, tiled=True)

    def scatter(site: Site, t: Tensor) -> Tensor:
        before = site.state_of(t, (V, U))
        at = site.dim("dim", dim, t.ndim)
        site.check_split("dim", at, t, tiled)
        out = moves.ReduceScatter(site.axes, at, site.states(before, V))(site.cast(t, before))
        return out if tiled else out.squeeze(at)

    return _each("psum_scatter", x, axis, scatter)


# ---- moves


def all_gather(
    x: Any,
    axis: Axes,
    dim: int = 0,
    *,
    tiled: bool = False,
    to: str = "varying",
    grad_dtype: torch.dtype | None = None,
) -> Any:
    """The pieces of all ranks along `axis`: varying -> `to` ("varying", "invarying" or "reduced").

    tiled: pieces are joined along `dim`; otherwise they are stacked in a new dim there.
    grad_dtype: in which dtype the gradient is summed; must be given for bf16 and f16 that need one.
    A pattern, "b s/tp d -> b s d", says axis and dim, and is tiled; "... {ct: tp}" on its right is to="reduced".
    """
    moved = _pattern("all_gather", x, axis, "all_gather")
    if moved:
        to = "reduced" if moved.reduced else to
        return all_gather(x, moved.axes, moved.dim, tiled=True, to=to, grad_dtype=grad_dtype)

    def gather(site: Site, t: Tensor) -> Tensor:
        site.state_of(t, (V,))
        at = site.dim("dim", dim, t.ndim + (not tiled))
        after = state_named(to)
        if after not in (V, I, R):
            raise RegionError(texts.bad_state(to))
        t = site.cast(t if tiled else t.unsqueeze(at), V)
        move: moves.Move = moves.AllGather(site.axes, at, site.states(V, after))
        return site.widened(move, t, grad_dtype, reduces=after != I)

    return _each("all_gather", x, axis, gather)


def all_to_all(x: Any, axis: Axes, split_dim: int = 0, concat_dim: int = 0, *, tiled: bool = False) -> Any:
    """Rank i gets piece i along `split_dim` of every rank, joined along `concat_dim`: varying -> varying.

    tiled: dims are cut and joined; otherwise `split_dim` has one entry for each rank and goes away, and the pieces are
    stacked in a new dim at `concat_dim`. A pattern, "e c/ep d -> e/ep c d", says axis and dims, and is tiled.
    """
    moved = _pattern("all_to_all", x, axis, "all_to_all")
    if moved:
        return all_to_all(x, moved.axes, moved.split_dim, moved.dim, tiled=True)

    def exchange(site: Site, t: Tensor) -> Tensor:
        site.state_of(t, (V,))
        split, concat = site.dim("split_dim", split_dim, t.ndim), site.dim("concat_dim", concat_dim, t.ndim)
        site.check_split("split_dim", split, t, tiled)
        t = site.cast(t, V)
        if tiled:
            return moves.AllToAll(site.axes, split, concat, site.states(V, V))(t)
        return moves.AllToAll(site.axes, concat, concat, site.states(V, V))(t.movedim(split, concat))

    return _each("all_to_all", x, axis, exchange)


def ppermute(x: Any, axis: Axes, perm: Sequence[tuple[int, int]] | None = None, *, shift: int | None = None) -> Any:
    """Sends what this rank holds to another: varying -> varying. Who gets nothing holds zeros.

    perm: (source, destination) pairs of positions along `axis`. shift: everyone sends to the rank so many places
    further, around the ring.
    """

    def permute(site: Site, t: Tensor) -> Tensor:
        site.state_of(t, (V,))
        pairs = tuple(i for pair in site.pairs(perm, shift) for i in pair)
        return moves.PPermute(site.axes, pairs, site.states(V, V))(site.cast(t, V))

    return _each("ppermute", x, axis, permute)


def pbroadcast(x: Any, axis: Axes, source: int) -> Any:
    """What the rank at `source` along `axis` holds, on every rank: varying -> varying."""

    def broadcast(site: Site, t: Tensor) -> Tensor:
        site.state_of(t, (V,))
        if not 0 <= source < site.size:
            raise RegionError(texts.bad_pairs("pbroadcast", site.names, site.size, f"source={source} is no rank"))
        return moves.Broadcast(site.axes, source, site.states(V, V))(site.cast(t, V))

    return _each("pbroadcast", x, axis, broadcast)


def pcast(x: Any, axis: Axes, *, to: Literal["varying", "invarying", "unreduced", "reduced"] | str) -> Any:
    """The same value in another state. Free, but for the gradient, which meets the transpose of the cast.

    Legal are invarying -> varying, reduced, unreduced; reduced -> varying, invarying; varying -> unreduced.
    """
    after = state_named(to)
    if after is None:
        raise RegionError(texts.bad_state(to))

    def change(site: Site, t: Tensor) -> Tensor:
        if not site.region.checked:
            return t
        for step, axes in changes(states_of(t), dict.fromkeys(site.names, after)).items():
            if step == (I, U):
                t = moves.Keep(axes_with_sizes(site.region, axes), 0, "I->U")(t)
            elif step in _LEGAL:
                t = recast(t, {step: axes}, site.region)
            else:
                raise RegionError(texts.no_cast(axes[0], *step))
        return t

    return _each("pcast", x, axis, change)


_LEGAL = {(I, V), (I, R), (R, V), (R, I), (V, U)}


def ragged_all_to_all(
    operand: Tensor,
    output: Tensor,
    input_offsets: Tensor,
    send_sizes: Tensor,
    output_offsets: Tensor,
    recv_sizes: Tensor,
    axis: Axes,
) -> Tensor:
    """Sends rows, as many to each rank as data says.

    Rows operand[input_offsets[i] : input_offsets[i] + send_sizes[i]] go to rank i, where they land in `output` from row
    output_offsets[i] of that rank on; recv_sizes[i] rows come from rank i. Rows of `output` that nobody writes stay.
    The four are integer tensors with one entry for each rank along `axis`. Returns a tensor like `output`.
    Source of the semantics: jax.lax.ragged_all_to_all.
    """
    site = Site.of("ragged_all_to_all", axis)
    given = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    rows, out, *sizes = (site.cast(bring(site.region, t), V) for t in given)
    return exchange_rows(site.axes, rows, out, (sizes[0], sizes[1], sizes[2], sizes[3]))


def reshard_by(x: Any, text: str) -> Any:
    """`vf.reshard` in a region: the one collective by which the value goes from one layout to another, and stays the
    same value. What is whole on the right is the same on all ranks."""
    kinds = ("psum", "all_gather", "psum_scatter", "all_to_all", "own_slice", "pcast")
    moved = _pattern("reshard", x, text, *kinds)
    assert moved is not None
    if moved.kind == "psum":
        return psum(x, moved.axes)
    if moved.kind == "pcast":
        return pcast(x, moved.axes, to="reduced" if moved.reduced else "unreduced")
    if moved.kind == "all_gather":
        return all_gather(x, moved.axes, moved.dim, tiled=True, to="reduced" if moved.reduced else "invarying")
    if moved.kind == "psum_scatter":
        return psum_scatter(x, moved.axes, moved.dim, tiled=True)
    if moved.kind == "all_to_all":
        return all_to_all(x, moved.axes, moved.split_dim, moved.dim, tiled=True)

    def own(site: Site, t: Tensor) -> Tensor:
        at = site.dim("dim", moved.dim, t.ndim)
        site.check_split("dim", at, t, True)
        for a in site.names:
            state = (states_of(t) or {}).get(a, I)
            if site.region.checked and state != I:
                raise RegionError(texts.not_whole(text, a, state))
        return moves.OwnSlice(site.axes, at, site.states(I, V))(t)

    return _each("reshard", x, moved.axes, own)


# ---- where am I


def axis_index(axis: Axes) -> Tensor:
    """This rank's position along `axis` (major to minor), an int64 tensor without dims: varying."""
    site = Site.of("axis_index", axis)
    if site.region.at_once is not None:
        index = site.region.at_once.index(site.axes)
        mark(index, {a: V if a in site.names else I for a in site.region.manual})
        return index
    return ops.AXIS_INDEX(site.axes, torch.device(site.region.mesh.device_of(0)))  # type: ignore[no-any-return]


def axis_size(axis: Axes) -> int:
    """The number of ranks along `axis`.

    >>> import torch, vescale_fn as vf
    >>> mesh = vf.make_mesh(dp=2)
    >>> scaled = vf.shard_map(lambda x: x * vf.axis_size("dp"), mesh=mesh, in_specs="b/dp", out_specs="b/dp")
    >>> scaled(torch.ones(2))
    tensor([2., 2.])
    """
    return Site.of("axis_size", axis).size


# ---- one call of a collective


class Site:
    """A call of a collective: its region and axes, and what it asks of its operand."""

    def __init__(self, function: str, names: Sequence[str], region: Region) -> None:
        self.function = function
        self.names = tuple(names)
        self.region = region
        self.axes = axes_with_sizes(region, names)
        self.size = ops.group_of(self.axes).size

    @staticmethod
    def of(function: str, axis: Axes) -> Site:
        """Raises RegionError outside a region, and for axes that are not manual here."""
        region = current_region()
        if region is None:
            raise RegionError(texts.outside(function))
        names = (axis,) if isinstance(axis, str) else axis
        if not isinstance(names, Sequence) or not all(isinstance(a, str) for a in names):
            raise RegionError(texts.axis_is_number(function, axis))
        for a in names:
            if a not in region.manual:
                raise RegionError(texts.unbound_axis(function, a, list(region.manual), region.mesh.axis_names))
        return Site(function, names, region)

    def state_of(self, t: Tensor, wanted: Sequence[State]) -> State:
        """The state of the operand over all axes, as one of those wanted: what is the same everywhere can be called
        varying. Raises RegionError where the axes differ, or a sum is pending that nobody wanted."""
        if not self.region.checked:
            return UNCHECKED
        states: dict[str, State] = {a: (states_of(t) or {}).get(a, I) for a in self.names}
        found: set[State] = {V if s in (I, R) else s for s in states.values()}
        if len(found) > 1:
            raise RegionError(texts.mixed_states(self.function, states))
        (state,) = found or {V}
        if state not in wanted:
            raise RegionError(texts.of_unreduced(self.function, self.names))
        return state

    def states(self, before: State, after: State) -> str:
        return f"{before}->{after}" if self.region.checked else f"{UNCHECKED}->{UNCHECKED}"

    def cast(self, t: Tensor, to: State) -> Tensor:
        """The operand as varying, where it is not."""
        if not self.region.checked or to != V:
            return t
        return recast(t, changes(states_of(t), dict.fromkeys(self.names, V)), self.region)

    def widened(self, move: moves.Move, t: Tensor, dtype: torch.dtype | None, reduces: bool) -> Tensor:
        """The move, its gradient summed in `dtype`, which must be said for dtypes that round a lot."""
        if dtype is not None:
            return moves.Wide(move.axes, move, dtype)(t)
        if reduces and t.dtype in _LOW_PRECISION and requires_grad(t):
            name = str(t.dtype).removeprefix("torch.")
            raise RegionError(texts.reducing_backward(self.function, name, "psum_scatter"))
        return move(t)

    def dim(self, what: str, dim: int, ndim: int) -> int:
        """The dim counted from the front. Raises RegionError for what is none."""
        if not -ndim <= dim < ndim:
            raise RegionError(texts.bad_dim(self.function, what, dim, ndim))
        return dim % ndim

    def check_split(self, what: str, dim: int, t: Tensor, tiled: bool) -> None:
        size = t.shape[dim]
        if not tiled and size != self.size:
            raise RegionError(texts.not_one_each(self.function, what, dim, size, self.names, self.size))
        if size % self.size:
            raise RegionError(texts.not_divisible(self.function, what, dim, size, self.names, self.size))

    def pairs(self, perm: Sequence[tuple[int, int]] | None, shift: int | None) -> list[tuple[int, int]]:
        """(source, destination) of every value that is sent."""
        if (perm is None) == (shift is None):
            raise RegionError(texts.one_of_perm_and_shift())
        if perm is None:
            assert shift is not None
            return [(i, (i + shift) % self.size) for i in range(self.size)]
        for ends, what in zip(zip(*perm), ("source", "destination")):
            for i in ends:
                if not 0 <= i < self.size or ends.count(i) > 1:
                    problem = f"{what} {i} is no rank" if not 0 <= i < self.size else f"{what} {i} appears twice"
                    raise RegionError(texts.bad_pairs("ppermute", self.names, self.size, problem))
        return [(int(a), int(b)) for a, b in perm]


def _pattern(function: str, x: Any, axis: Any, *kinds: str) -> Moved | None:
    """What a pattern says, if the second argument is one."""
    if not is_pattern(axis):
        return None
    region = current_region()
    if region is None:
        raise RegionError(texts.outside(function))
    moved = require(function, read(function, axis, region.mesh.shape), kinds, axis)
    for t in flatten(x)[0]:
        try:
            check_rank(moved.before, tuple(t.shape))
        except SpecError as e:
            raise e.within(f"vf.{function}") from None
    return moved


def _reduced(site: Site, t: Tensor, kind: str) -> Tensor:
    before = site.state_of(t, (V, U) if kind == "sum" else (V,))
    same = [a for a in site.names if site.region.checked and (states_of(t) or {}).get(a, I) in (I, R)]
    if same and kind == "sum":
        line = user_source()
        message = texts.summed_again(same, site.region.mesh.shape.extent(same))
        warnings.warn_explicit(message, UserWarning, line.file, line.line)
    return moves.AllReduce(site.axes, kind, site.states(before, I))(site.cast(t, before))


def _each(function: str, x: Any, axis: Axes, collective: Callable[[Site, Tensor], Tensor]) -> Any:
    """The collective of every tensor of a tree."""
    site = Site.of(function, axis)
    if not site.names:
        return x

    def one(t: Any) -> Any:
        if isinstance(t, (int, float)) and function in ("psum", "pmean", "pmax", "pmin"):
            return t * site.size if function == "psum" else t
        return collective(site, bring(site.region, t))

    return map_leaves(one, x)
