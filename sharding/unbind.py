"""The way back from binding: a layout written as a spec."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_fn.sharding.forms import letter
from vescale_fn.sharding.grammar import parse
from vescale_fn.sharding.layout import Layout, Ragged
from vescale_fn.sharding.ragged import owner
from vescale_fn.sharding.spec import Cut, Entry, Factor, Group, Spec


def spec_of(layout: Layout, names: Sequence[str] | None = None) -> Spec:
    """The canonical spec of a layout, such that `bind(spec_of(l), l.shape, l.mesh) == l`.

    names: names of the dims; a, b, c, ... by default. Factors inside a dim are written by their sizes.
    Raises ValueError for states that are no cut of factors (digits of two axes that overlap).

    >>> from vescale_fn.sharding.layout import Partial, Shard
    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> m = MeshShape(("dp", "tp"), (2, 4))
    >>> print(spec_of(Layout.of(m, (8, 48), {"dp": Partial(), "tp": Shard(1, 3)}), ["d", "h"]))
    d (3 h/tp) {sum: dp}
    """
    names = names or [letter(i) for i in range(layout.ndim)]
    dims: list[Factor | Group] = []
    d = 0
    while d < layout.ndim:
        dim, width = _ragged(layout, d, names) or (_even(layout, d, names[d]), 1)
        dims.append(dim)
        d += width
    pending: dict[str, tuple[str, ...]] = {}
    for axis, kind in layout.partial:
        pending[kind] = (*pending.get(kind, ()), axis)
    return parse(str(Spec(tuple(dims), tuple(Entry(k, a) for k, a in pending.items()))))


def _ragged(layout: Layout, dim: int, names: Sequence[str]) -> tuple[Factor | Group, int] | None:
    """A dim, or a group of dims, that is cut in units, and how many dims it is."""
    for axis, state in zip(layout.mesh.names, layout.states):
        if isinstance(state, Ragged) and state.dim == dim:
            only = owner(state)
            cut = Cut(units=state.units) if only is None else Cut(owner=only)
            if state.last <= dim:
                return Factor(names[dim], cut=cut, axes=(axis,)), 1
            group = tuple(Factor(n) for n in names[dim : state.last + 1])
            return Group(group, cut, (axis,)), len(group)
    return None


def _even(layout: Layout, dim: int, name: str) -> Factor | Group:
    """A dim whose factors are cut: sizes as literals, and the name for the last factor."""
    factors: list[Factor] = []
    done = 1  # product of the sizes of the factors so far
    shards = list(layout.shards(dim))
    lead = max((s.uneven for _, s in shards), default=0)
    if lead:
        axes = [a for a, s in shards if s.uneven or s.pre < lead]
        factors.append(Factor("", lead, Cut(), tuple(axes)))
        shards, done = shards[len(axes) :], lead
    while shards:
        pre = shards[0][1].pre
        if pre % done:
            raise ValueError(f"No spec can say {layout}: the axes that cut dim {dim} overlap.")
        if pre > done:
            factors.append(Factor("", pre // done))
        axes, done = [], pre
        while shards and shards[0][1].pre == done:
            axes.append(shards.pop(0)[0])
            done *= layout.mesh[axes[-1]]
        if shards and shards[0][1].pre % done == 0:
            done = shards[0][1].pre
        factors.append(Factor("", done // pre, axes=tuple(axes)))
    if not factors or (lead and len(factors) == 1 and lead != layout.shape[dim]):
        factors.append(Factor(name))
    else:  # the last factor is what is left of the dim, so it needs no size
        factors[-1] = Factor(name, cut=factors[-1].cut, axes=factors[-1].axes)
    return factors[0] if len(factors) == 1 else Group(tuple(factors))
