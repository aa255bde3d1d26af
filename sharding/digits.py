"""Where the axes that shard a dim sit in it: which layouts exist, and local positions for collectives.

The digits of a dim, major to minor, are those of the uneven leading factor (its *nest*) and then even ones. An even
digit can be taken out or put in anywhere and leaves the others as they are. In a nest every axis cuts what the axes
before it left, so only the last can be taken out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vescale_fn.sharding.layout import CUTS, Layout, Ragged, Shard, State


@dataclass(frozen=True)
class Position:
    """Where a digit sits in a local dim, in the words of `comm`: `pre`, or one of `uneven` and `units`."""

    pre: int = 1
    uneven: int = 0
    units: tuple[int, ...] = ()
    flat: tuple[int, ...] = ()


def dim_of(layout: Layout, axis: str) -> int:
    """The dim that `axis` cuts, -1 if none."""
    state = layout[axis]
    return state.dim if isinstance(state, CUTS) else -1


def local_dim(layout: Layout, axis: str) -> int:
    """The dim of the local tensors that `axis` cuts, -1 if none."""
    return dim_of(layout.flat, axis)


def nest(layout: Layout, dim: int) -> tuple[str, ...]:
    """Axes that cut the uneven leading factor of `dim`, major to minor; none when the dim is even."""
    lead = factor(layout, dim)
    return tuple(a for a, s in layout.shards(dim) if s.uneven or s.pre < lead)


def factor(layout: Layout, dim: int) -> int:
    """The size of the uneven leading factor of `dim`, 0 when the dim is even."""
    return max((s.uneven for _, s in layout.shards(dim)), default=0)


def factors(layout: Layout, dim: int) -> tuple[tuple[int, tuple[str, ...], bool], ...]:
    """The factors of a dim that is not ragged, major to minor: size, the axes that divide it, and whether perhaps
    unevenly. Raises ValueError where digits of two axes overlap.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> factors(Layout.of(MeshShape(("tp",), (4,)), (24,), {"tp": Shard(0, 3)}), 0)
    ((3, (), False), (8, ('tp',), False))
    """
    lead, inside = factor(layout, dim), nest(layout, dim)
    found = [(lead, inside, True)] if lead else []
    shards, done = layout.shards(dim)[len(inside) :], lead or 1  # done: the product of the sizes so far
    while shards:
        pre = shards[0][1].pre
        if pre % done:
            raise ValueError(f"The axes that cut dim {dim} of {layout} overlap.")
        if pre > done:
            found.append((pre // done, (), False))
        axes, done = [], pre
        while shards and shards[0][1].pre == done:
            axes.append(shards[0][0])
            done, shards = done * layout.mesh[axes[-1]], shards[1:]
        if shards and shards[0][1].pre % done == 0:
            done = shards[0][1].pre
        found.append((done // pre, tuple(axes), False))
    size = layout.shape[dim]
    if not found or (lead and len(found) == 1 and lead != size):
        found.append((1, (), False))
    _, of_last, uneven = found.pop()  # whose size is what the others leave of the dim
    return (*found, (size // math.prod(n for n, _, _ in found), of_last, uneven))


def exists(layout: Layout) -> bool:
    """Whether the states of a layout go together: digits that do not overlap, one kind of pending reduction.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> m = MeshShape(("x", "y"), (2, 2))
    >>> [exists(Layout.of(m, (12,), {"x": Shard(0, p), "y": Shard(0, 2)})) for p in (1, 2, 3, 4)]
    [True, False, False, False]
    """
    flat = layout.flat
    return (
        len({kind for _, kind in layout.partial}) <= 1
        and all(_alone(layout, s) for s in layout.states if isinstance(s, Ragged))
        and all(_dim_exists(flat, s.dim) for s in flat.states if isinstance(s, CUTS))
    )


def _alone(layout: Layout, state: Ragged) -> bool:
    """No other axis cuts the dims of a ragged state."""
    dims = range(state.dim, max(state.dim, state.last) + 1)
    return sum(isinstance(s, CUTS) and s.dim in dims for s in layout.states) == 1


def _dim_exists(layout: Layout, dim: int) -> bool:
    shards, inside = layout.shards(dim), nest(layout, dim)
    units = [sum(s.units) for s in layout.states if isinstance(s, Ragged) and s.dim == dim]
    if units:
        return layout.shape[dim] % max(*units, 1) == 0
    lead, end = factor(layout, dim), 1
    for axis, state in shards[: len(inside)]:
        pre, end = end, end * layout.mesh[axis]
        if state != Shard(dim, pre, lead if lead % end else 0):
            return False
    end = lead or 1  # in `pre` of the digits minor to a nest the factor stands with its global size
    for axis, state in shards[len(inside) :]:
        if state.pre % end:
            return False
        end = state.pre * layout.mesh[axis]
    return layout.shape[dim] % end == 0


def position(layout: Layout, axes: Sequence[str]) -> Position | None:
    """Where the digits of `axes` lie in the dim that all of them cut, for a rank that holds all digits of `axes` and
    its own of the other axes; None when they are not one run of the local dim in this order, or ranks differ in it.

    >>> from vescale_fn.sharding.layout import WHOLE
    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> m = MeshShape(("x", "y"), (2, 3))
    >>> both = Layout.of(m, (12,), {"x": Shard(0, 1), "y": Shard(0, 2)})
    >>> [position(layout, ("y",)).pre for layout in (both, both.with_state("x", WHOLE))]
    [1, 2]
    """
    state, dim = layout[axes[0]], dim_of(layout, axes[0])
    if dim < 0 or any(dim_of(layout, a) != dim for a in axes):
        return None
    if isinstance(state, Ragged):
        return Position(units=state.units, flat=layout.shape[dim : state.last + 1] if state.last > dim else ())
    inside, shards = nest(layout, dim), layout.shards(dim)
    if inside and axes[0] in inside:
        return Position(uneven=factor(layout, dim)) if inside[-len(axes) :] == tuple(axes) else None
    if inside:
        return None
    others = [(s.pre, layout.mesh[a]) for a, s in shards if a not in axes]
    local = [_local_pre(layout, a, others) for a in axes]
    adjacent = all(p * layout.mesh[a] == q for p, q, a in zip(local, local[1:], axes))
    return Position(pre=local[0]) if adjacent else None


def _local_pre(layout: Layout, axis: str, others: Iterable[tuple[int, int]]) -> int:
    state = layout[axis]
    assert isinstance(state, Shard)
    pre = state.pre
    for p, n in others:
        pre //= n if p < state.pre else 1
    return pre


def minor(layout: Layout, axis: str, dim: int) -> Shard:
    """The state in which `axis` takes the most minor digit of a dim."""
    others = [(a, s) for a, s in layout.shards(dim) if a != axis]
    ends = (max(s.uneven, s.pre * layout.mesh[a]) for a, s in others)
    return Shard(dim, max(ends, default=1))


def within_dim(at: Layout, after: Layout, axes: Sequence[str]) -> tuple[Position, Position] | None:
    """Where one axis that changes its digit of an even dim finds the new digit (holding the old one), then the old one
    (holding the new one); None when the two digits are not independent."""
    (axis, *more), dim = axes, dim_of(at, axes[0])
    old, new, n = at[axis], after[axis], at.mesh[axis]
    if more or not (isinstance(old, Shard) and isinstance(new, Shard)) or nest(at, dim) or nest(after, dim):
        return None
    others = [(s.pre, at.mesh[a]) for a, s in at.shards(dim) if a != axis]
    end = 1
    for pre, size in sorted([*others, (old.pre, n), (new.pre, n)]):
        if pre % end:
            return None
        end = pre * size
    if at.shape[dim] % end:
        return None
    split = _local_pre(after, axis, [*others, (old.pre, n)])
    return Position(split), Position(_local_pre(at, axis, [*others, (new.pre, n)]))


def refill(layout: Layout, members: Sequence[str], order: Sequence[str]) -> Layout | None:
    """`layout` with the even digits that `members` (major to minor) hold of one dim dealt to them in another order;
    None where the sizes do not fit.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> both = Layout.of(MeshShape(("x", "y"), (2, 3)), (12,), {"x": Shard(0, 1), "y": Shard(0, 2)})
    >>> print(refill(both, ("x", "y"), ("y", "x")))
    [12] {x: shard 0 pre 3, y: shard 0}
    """
    dim, states = dim_of(layout, members[0]), {}
    runs = iter(_runs(layout, [(dim, s.pre, a) for a in members if isinstance(s := layout[a], Shard)]))
    pre = stop = 0
    for axis in order:
        if pre == stop:
            _, pre, stop = next(runs)
        states[axis] = Shard(dim, pre)
        pre *= layout.mesh[axis]
        if stop % pre:
            return None
    return layout.with_states(states)


Slot = tuple[object, ...]
Run = tuple[int, int, int]  # dim, pre of the first digit, end of the last


def slots(layout: Layout, axes: Iterable[str]) -> dict[Slot, tuple[str, ...]]:
    """What `axes` hold, by the part of the layout that it is: a run of digits, the axes that pend, the whole axes.
    Two layouts with equal slots differ only in which rank has which block."""
    found: dict[State, list[str]] = {}
    cuts: list[tuple[int, int, str]] = []
    for axis in axes:
        state = layout[axis]
        if isinstance(state, Shard) and not state.uneven:
            cuts.append((state.dim, state.pre, axis))
        else:
            found.setdefault(state, []).append(axis)
    alike: list[tuple[Slot, tuple[str, ...]]] = [((s, layout.mesh.extent(m)), tuple(m)) for s, m in found.items()]
    return dict([*alike, *_runs(layout, sorted(cuts)).items()])


def _runs(layout: Layout, cuts: Sequence[tuple[int, int, str]]) -> dict[Run, tuple[str, ...]]:
    """Even digits (dim, pre, axis) in order, joined where one begins at the end of another."""
    runs: dict[Run, tuple[str, ...]] = {}
    last: Run = (-1, 0, 0)
    for dim, pre, axis in cuts:
        joined = (last[0], last[2]) == (dim, pre)
        members = (*runs.pop(last), axis) if joined else (axis,)
        last = (dim, last[1] if joined else pre, pre * layout.mesh[axis])
        runs[last] = members
    return runs
