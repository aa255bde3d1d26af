"""From one layout to another: the chain of collectives that moves least.

`plan` searches the layouts in between. Cheapest is, in this order: fewest irregular exchanges (but of parts in units),
fewest elements sent, fewest collectives, fewest steps. No layout in between holds more on a rank than source or target,
whichever holds more, so nothing is gathered that need not be (but ragged cuts that merge different dims go through the
whole).
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import astuple
from functools import lru_cache
from itertools import combinations, count

from vescale_fn.sharding.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    Step,
    ToPartial,
)
from vescale_fn.sharding.cost import sent
from vescale_fn.sharding.digits import (
    Position,
    dim_of,
    exists,
    local_dim,
    minor,
    nest,
    position,
    refill,
    slots,
    within_dim,
)
from vescale_fn.sharding.layout import CUTS, WHOLE, Kind, Layout, Partial, Ragged, Shard, State, Whole


@lru_cache(maxsize=65536)
def plan(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """The collectives that bring a tensor from layout `src` to `dst`; none when they are equal. The value is kept.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> m = MeshShape(("x", "y"), (2, 2))
    >>> rows = Layout.of(m, (8, 8), {"x": Shard(0), "y": Partial()})
    >>> [type(s.comm).__name__ for s in plan(rows, rows.with_state("y", Shard(1)))]
    ['ReduceScatter']
    """
    if (src.mesh, src.shape) != (dst.mesh, dst.shape):
        raise ValueError(
            f"A reshard keeps mesh and global shape, but the source is {src} on mesh {src.mesh} and the target is "
            f"{dst} on mesh {dst.mesh}. Give the target the shape {list(src.shape)} and the mesh {src.mesh}."
        )
    for name, layout in (("source", src), ("target", dst)):
        if not exists(layout):
            raise ValueError(
                f"The {name} of a reshard, {layout} on mesh {layout.mesh}, is no layout: axes that cut one dim must "
                "cut different digits of it, of sizes that divide it, and all pending reductions must be of one kind. "
                "Change one of the states."
            )
    limit = max(src.max_local_numel, dst.max_local_numel)
    steps = _cheapest(src, dst, limit)
    if steps is None:  # dims merged differently: only the whole tensor is regular in both
        steps = _cheapest(src, dst, math.prod(src.shape))
    assert steps is not None
    return steps


Cost = tuple[int, float, int, int]  # irregular exchanges, elements sent, collectives, steps
_NEVER: Cost = (sys.maxsize, 0.0, 0, 0)


def _cheapest(src: Layout, dst: Layout, limit: int) -> tuple[Step, ...] | None:
    """Dijkstra's search among layouts of which a rank holds at most `limit` elements; equal costs keep the order in
    which `_moves` lists them."""
    order = count()
    queue: list[tuple[Cost, int, Layout, tuple[Step, ...]]] = [((0, 0.0, 0, 0), next(order), src, ())]
    done: set[Layout] = set()
    best = {src: (0, 0.0, 0, 0)}
    while queue:
        cost, _, at, steps = heapq.heappop(queue)
        if at == dst:
            return steps
        if at in done:
            continue
        done.add(at)
        for step in _moves(at, dst):
            total, after = _add(cost, step), step.layout
            if after.max_local_numel <= limit and total < best.get(after, _NEVER):
                best[after] = total
                heapq.heappush(queue, (total, next(order), after, (*steps, step)))
    return None


def _add(cost: Cost, step: Step) -> Cost:
    exchanges, elements, collectives, steps = cost
    moved = sent(step.comm, step.layout)
    irregular = isinstance(step.comm, Exchange) and not _in_units(step.comm)
    local = isinstance(step.comm, (Slice, ToPartial))
    return exchanges + irregular, elements + moved, collectives + (not local), steps + 1


def _in_units(comm: Exchange) -> bool:
    """Whether parts are unequal anyway, so that no other collective is more regular."""
    return any(isinstance(s, Ragged) for s in (*comm.src.states, *comm.dst.states))


def _moves(at: Layout, dst: Layout) -> Iterator[Step]:
    """Single steps that lead from `at` in the direction of `dst`."""
    axes = tuple(a for a, s, t in zip(at.mesh.names, at.states, dst.states) if s != t)
    for kind_of_move, move in _MOVES:
        alike: dict[Hashable, list[str]] = {}
        for axis in axes:
            key = kind_of_move(at[axis], dst[axis])
            if key is not None:
                alike.setdefault(key, []).append(axis)
        for group in alike.values():
            for size in range(len(group), 0, -1):
                for some in combinations(group, size):
                    yield from move(at, dst, some)
    yield from _reorder(at, dst, axes)
    yield from _exchange(at, dst, axes)


Found = Iterator[Step]


def _slice(at: Layout, dst: Layout, axes: tuple[str, ...]) -> Found:
    for after, order, where in _landings(at, dst, axes):
        yield Step(Slice(order, local_dim(after, order[0]), *astuple(where)), after)


def _reduce_scatter(at: Layout, dst: Layout, axes: tuple[str, ...]) -> Found:
    for after, order, where in _landings(at, dst, axes):
        pre, *cut = astuple(where)
        yield Step(ReduceScatter(order, local_dim(after, order[0]), pre, _kind(at, axes), *cut), after)


def _all_reduce(at: Layout, dst: Layout, axes: tuple[str, ...]) -> Found:
    yield Step(AllReduce(axes, _kind(at, axes)), at.with_states(dict.fromkeys(axes, WHOLE)))


def _all_to_all(at: Layout, dst: Layout, axes: tuple[str, ...]) -> Found:
    for after, order, split in _landings(at, dst, axes):
        source, target = local_dim(at, order[0]), local_dim(after, order[0])
        concat = position(at, order)
        if source == target:
            split, concat = within_dim(at, after, order) or (split, None)
        if concat:
            pre = (split.pre, concat.pre)
            yield Step(AllToAll(order, target, source, *pre, split.uneven, concat.uneven), after)


def _all_gather(at: Layout, dst: Layout, axes: tuple[str, ...]) -> Found:
    order = _by_digit(at, axes)
    where, after = position(at, order), at.with_states(dict.fromkeys(axes, WHOLE))
    if where and exists(after):
        yield Step(AllGather(order, local_dim(at, order[0]), *astuple(where)), after)


def _to_partial(at: Layout, dst: Layout, axes: tuple[str, ...]) -> Found:
    after = at.with_states({a: dst[a] for a in axes})
    if exists(after):
        yield Step(ToPartial(axes, _kind(dst, axes)), after)


def _permute(at: Layout, dst: Layout, axes: tuple[str, ...]) -> Found:
    """When every block that the target wants on `axes` is some rank's block already."""
    have, want = slots(at, axes), slots(dst, axes)
    if have.keys() != want.keys() or len(axes) < 2:
        return
    after = at.with_states({a: dst[a] for a in axes})
    if exists(after):
        src = tuple(a for key in have for a in have[key])
        yield Step(Permute(src, tuple(a for key in have for a in want[key])), after)


def _cut(state: State) -> int | None:
    """The dim that a state cuts."""
    return state.dim if isinstance(state, CUTS) else None


def _shards(at: State, dst: State) -> Hashable:
    return (at.dim, dst.dim) if isinstance(at, Shard) and isinstance(dst, Shard) else None


# What each move applies to: axes may move together when the function of their states in `at` and `dst` is the same,
# and not None.
_MOVES: tuple[tuple[Callable[[State, State], Hashable], Callable[[Layout, Layout, tuple[str, ...]], Found]], ...] = (
    (lambda at, dst: _cut(dst) if isinstance(at, Whole) else None, _slice),
    (lambda at, dst: (at, _cut(dst)) if isinstance(at, Partial) and _cut(dst) is not None else None, _reduce_scatter),
    (lambda at, dst: at if isinstance(at, Partial) else None, _all_reduce),
    (_shards, _all_to_all),
    (lambda at, dst: _cut(at), _all_gather),
    (lambda at, dst: dst if isinstance(at, Whole) and isinstance(dst, Partial) else None, _to_partial),
    (lambda at, dst: True, _permute),
)


def _reorder(at: Layout, dst: Layout, axes: Sequence[str]) -> Found:
    """A permute among the axes that cut one even dim: those that stay, in their order in `dst`, major to those that
    leave it, together with those that go the same way."""
    for dim in range(at.ndim):
        members = [a for a, _ in at.shards(dim) if a in axes and a not in nest(at, dim)]
        rank = {a: (s.dim != dim, s.dim, s.pre) if isinstance(s := dst[a], Shard) else (True, -1, 0) for a in members}
        after = refill(at, members, sorted(members, key=lambda a: rank[a])) if len(members) > 1 else at
        if after and after != at:
            yield from _permute(at, after, tuple(a for a in members if at[a] != after[a]))


def _exchange(at: Layout, dst: Layout, axes: tuple[str, ...]) -> Found:
    """All that remains, where nothing is pending; what becomes partial or merges dims becomes whole first."""
    if _pending(at, axes):
        return
    have = at.flat
    whole = {a: WHOLE for a in axes if isinstance(dst[a], Partial)}
    merging = {a: WHOLE for a in axes if at.with_state(a, dst[a]).flat.shape != have.shape}
    for exceptions in (whole, whole | merging):
        after = at.with_states({a: dst[a] for a in axes} | exceptions)
        want = after.flat
        if after != at and have.shape == want.shape:
            senders = tuple(a for a in axes if at[a] != after[a] and not isinstance(at[a], Whole))
            yield Step(Exchange(senders, have, want), after)
            return


def _landings(at: Layout, dst: Layout, axes: tuple[str, ...]) -> Iterator[tuple[Layout, tuple[str, ...], Position]]:
    """Layouts in which `axes` cut the dim that they cut in `dst`, with the axes major to minor and where they sit:
    as in `dst`, or minor to the axes that are in the way."""
    dim = dim_of(dst, axes[0])
    if any(dim_of(dst, a) != dim for a in axes) or dim < 0:
        return
    after = at.with_states({a: dst[a] for a in axes})
    if not exists(after) and len(axes) == 1:
        after = at.with_state(axes[0], minor(at, axes[0], dim))
    order = _by_digit(after, axes)
    where = position(after, order)
    if where and after != at and exists(after):
        yield after, order, where


def _by_digit(layout: Layout, axes: Sequence[str]) -> tuple[str, ...]:
    """`axes` in the order of the digits that they hold, when they cut one dim."""
    order = [a for a, _ in layout.shards(dim_of(layout, axes[0]))]
    return tuple(sorted(axes, key=lambda a: order.index(a) if a in order else -1))


def _pending(layout: Layout, axes: Sequence[str]) -> bool:
    return any(isinstance(layout[a], Partial) for a in axes)


def _kind(layout: Layout, axes: Sequence[str]) -> Kind:
    """The kind of reduction that pends on `axes`."""
    return next(kind for axis, kind in layout.partial if axis in axes)
