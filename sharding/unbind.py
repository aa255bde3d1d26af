"""The way back from binding: a layout written as a spec."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_fn.sharding.digits import factors
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
    """A dim whose factors are cut: sizes as literals, but for the last factor, which has the name."""
    try:
        parts = factors(layout, dim)
    except ValueError as e:
        raise ValueError(f"No spec can say {layout}: the axes that cut dim {dim} overlap.") from e
    cut = [Factor("", size, Cut() if uneven else None, axes) for size, axes, uneven in parts]
    cut[-1] = Factor(name, cut=cut[-1].cut, axes=cut[-1].axes)  # what is left of the dim needs no size
    return cut[0] if len(cut) == 1 else Group(tuple(cut))
