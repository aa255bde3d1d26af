"""Binding: a spec meets the shape of a tensor and a mesh, and becomes a layout; and a layout written as a spec."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vescale_fn.sharding.forms import Sizes, SpecLike, as_spec, letter
from vescale_fn.sharding.grammar import parse
from vescale_fn.sharding.layout import Layout, Partial, Ragged, Shard, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.ragged import chunked, owned_by, owner, state_of_units
from vescale_fn.sharding.spec import ANY, OPEN, Cut, Entry, Factor, Group, Spec, SpecError, Word, check_axes


@dataclass(frozen=True)
class Piece:
    """The dims dim..last of a tensor and the part of the spec that stands for them. `sizes` are those of `factors`,
    None where unknown. Only a group that is cut flat covers several dims."""

    dim: int
    last: int
    factors: tuple[Factor, ...]
    sizes: tuple[int | None, ...]
    cut: Cut | None = None
    axes: tuple[str, ...] = ()
    at: int = -1


def bind(spec: SpecLike, shape: Sequence[int], mesh: MeshShape, /, **sizes: int | Sequence[int]) -> Layout:
    """The layout that `spec` gives to a tensor of global `shape` on `mesh`.

    sizes: sizes of factors that the spec names (`h=16`), and units (`u=[3, 7]`).
    Raises SpecError when an axis does not exist, the rank differs, a size is unknown or does not divide.

    >>> m = MeshShape(("dp", "tp"), (2, 4))
    >>> bind("b/dp (qkv h/tp k)", (8, 48), m, qkv=3, h=4).states
    (Shard(dim=0, pre=1, uneven=0), Shard(dim=1, pre=3, uneven=0))
    """
    parsed, own = as_spec(spec)
    given = {**own, **sizes}
    for name in given:
        if name not in size_names(parsed):
            raise SpecError(f"The size {name}={given[name]} names no factor of the spec.", parsed.text, 0)
    return bind_sized(parsed, tuple(shape), mesh, given)


def bind_sized(spec: Spec, shape: tuple[int, ...], mesh: MeshShape, sizes: Sizes) -> Layout:
    """Like `bind`; sizes may name factors of other specs."""
    check_axes(spec, mesh)
    states: dict[str, State] = {}
    for piece in resolve(spec, shape, sizes):
        states.update(_states(spec, piece, shape, mesh, sizes))
    for entry in spec.state:
        states.update(_entry_states(spec, entry, shape, mesh))
    return Layout.of(mesh, shape, states)


def size_names(spec: Spec) -> frozenset[str]:
    """The names to which sizes can be given: factors, and named units."""
    groups = [d for d in spec.dims if isinstance(d, Group)]
    return frozenset(spec.names) | {c.cut.name for c in (*spec.factors, *groups) if c.cut and c.cut.name}


# ---- ranks and sizes


def resolve(spec: Spec, shape: tuple[int, ...], sizes: Sizes) -> list[Piece]:
    """The spec's dims matched with those of the tensor, and the sizes of all factors. Needs no mesh.

    Raises SpecError when the rank differs, or sizes contradict the shape.
    """
    width = [_width(d) for d in spec.dims]
    rest = len(shape) - sum(width)
    open_rank = "..." in spec.dims
    if rest < 0 or (rest and not open_rank):
        least = "at least " if open_rank else ""
        raise SpecError(
            f"The spec has {least}{_dims(sum(width))}, but the tensor of shape {list(shape)} has {_dims(len(shape))}.",
            spec.text,
            0,
        )
    pieces, d = [], 0
    for dim, w in zip(spec.dims, width):
        if dim == "...":
            d += rest
        elif isinstance(dim, Group):
            pieces.append(_flat(spec, dim, d, shape, sizes) if dim.cut else _grouped(spec, dim, d, shape[d], sizes))
        elif isinstance(dim, Factor):
            _check_size(spec, dim, d, shape[d], sizes)
            pieces.append(Piece(d, d, (dim,), (shape[d],)))
        d += w
    return pieces


def _width(dim: object) -> int:
    """How many tensor dims a dim of a spec stands for."""
    if isinstance(dim, Group):
        return len(dim.factors) if dim.cut else 1
    return int(isinstance(dim, Factor))


def _dims(n: int) -> str:
    return f"{n} dim" if n == 1 else f"{n} dims"


def _given(spec: Spec, factor: Factor, sizes: Sizes) -> int | None:
    """The size of a factor, inline or by keyword."""
    keyword = sizes.get(factor.name) if factor.name else None
    if keyword is None:
        return factor.size
    if not isinstance(keyword, int) or keyword < 0:
        raise SpecError(f"The size of '{factor.name}' must be an int, not {keyword!r}.", spec.text, factor.at)
    if factor.size not in (None, keyword):
        raise SpecError(
            f"'{factor.name}' is {factor.size} in the spec but {keyword} in the keyword sizes.", spec.text, factor.at
        )
    return keyword


def _check_size(spec: Spec, factor: Factor, dim: int, size: int, sizes: Sizes) -> None:
    given = _given(spec, factor, sizes)
    if given not in (None, size):
        named = f"'{factor.name}' is {given}" if factor.name else f"the spec says {given}"
        raise SpecError(f"Dim {dim} has size {size}, but {named}.", spec.text, factor.at)


def _flat(spec: Spec, group: Group, d: int, shape: tuple[int, ...], sizes: Sizes) -> Piece:
    last = d + len(group.factors) - 1
    for i, factor in enumerate(group.factors):
        if factor.axes:
            raise SpecError("The dims of a group that is cut flat are not cut themselves.", spec.text, factor.at)
        _check_size(spec, factor, d + i, shape[d + i], sizes)
    return Piece(d, last, group.factors, shape[d : last + 1], group.cut, group.axes, group.at)


def _grouped(spec: Spec, group: Group, dim: int, size: int, sizes: Sizes) -> Piece:
    known = [_given(spec, f, sizes) for f in group.factors]
    product = math.prod(k for k in known if k is not None)
    missing = [i for i, k in enumerate(known) if k is None]
    fits = product == size if not missing else size % product == 0 if product else size == 0
    if not fits:
        parts = " ".join(f"{f.label}={k}" if f.name else str(k) for f, k in zip(group.factors, known) if k is not None)
        must = "is not their product" if not missing else "is not a multiple of their product"
        raise SpecError(f"Dim {dim} has size {size}, which {must} {product}: factors {parts}.", spec.text, group.at)
    if len(missing) == 1:
        known[missing[0]] = size // product if product else 0
    return Piece(dim, dim, group.factors, tuple(known), None, group.axes, group.at)


# ---- states of axes


def _states(
    spec: Spec, piece: Piece, shape: tuple[int, ...], mesh: MeshShape, sizes: Sizes
) -> Iterator[tuple[str, State]]:
    """The states of the axes that cut the dims of a piece."""
    size = math.prod(shape[piece.dim : piece.last + 1])
    if piece.last > piece.dim or piece.cut:
        yield from _cut(spec, piece, "the group", size, size, piece.cut or Cut(), piece.axes, mesh, sizes)
    elif piece.axes:
        yield from _even(spec, f"Dim {piece.dim}", size, 1, piece.dim, piece.axes, mesh, "")
    pre: int | None = 1
    for i, (factor, n) in enumerate(zip(piece.factors, piece.sizes)):
        if factor.axes and pre is None:
            raise _unknown_size(spec, piece, i, size, mesh)
        if factor.cut and i:
            message = "Only the leading factor of a dim can be cut unevenly."
            raise SpecError(message, spec.text, factor.at)
        if factor.cut:
            yield from _cut(spec, piece, factor.label, n, size, factor.cut, factor.axes, mesh, sizes)
        elif factor.axes:
            what = f"Factor '{factor.label}' of dim {piece.dim}" if len(piece.factors) > 1 else f"Dim {piece.dim}"
            extent = n if n is not None else size // max(pre or 1, 1)
            hint = f", write {factor.label}~/{_plain_axes(factor.axes)} for shards of unequal size" if i == 0 else ""
            yield from _even(spec, what, extent, max(pre or 1, 1), piece.dim, factor.axes, mesh, hint)
        pre = None if n is None or pre is None else pre * n


def _plain_axes(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else f"({' '.join(axes)})"


def _even(
    spec: Spec, what: str, size: int, pre: int, dim: int, axes: Sequence[str], mesh: MeshShape, hint: str
) -> Iterator[tuple[str, State]]:
    """States of axes that cut `size` rows, below `pre` rows of more major factors, into equal parts."""
    _refuse_open(spec, axes)
    n = mesh.extent(axes)
    if size % n:
        by = "*".join(f"{a}={mesh[a]}" for a in axes)
        raise SpecError(
            f"{what} has size {size}, which is not divisible by {by}. Make it a multiple of {n}{hint}.",
            spec.text,
            axes[0].at if isinstance(axes[0], Word) else 0,
        )
    for axis in axes:
        yield axis, Shard(dim, pre)
        pre *= mesh[axis]


def _cut(
    spec: Spec,
    piece: Piece,
    what: str,
    rows: int | None,
    size: int,
    cut: Cut,
    axes: Sequence[str],
    mesh: MeshShape,
    sizes: Sizes,
) -> Iterator[tuple[str, State]]:
    """States of axes that cut `rows` leading rows (of a dim, or flat group, of `size`) as `cut` says."""
    _refuse_open(spec, axes)
    at = axes[0].at if isinstance(axes[0], Word) else 0
    n = mesh.extent(axes)
    if rows is None:
        raise SpecError(f"The size of '{what}' must be known where '~' cuts it; write {what}=SIZE.", spec.text, at)
    flat = piece.last > piece.dim
    if cut == Cut() and not flat:
        yield from _chunks(piece.dim, rows, axes, mesh)
        return
    if n == 1:  # the whole tensor is on the one rank, whatever the units
        return
    if len(axes) > 1:
        raise SpecError("A group is cut flat by a single axis.", spec.text, at)
    units = _units(spec, cut, rows, axes[0], mesh, sizes, at)
    if rows % sum(units):
        raise SpecError(
            f"{what[0].upper()}{what[1:]} has size {rows}, which is not a multiple of the {sum(units)} units of "
            f"{cut}. Choose units whose sum divides it.",
            spec.text,
            at,
        )
    yield axes[0], state_of_units(piece.dim, units, size, piece.last if flat else -1)


def _chunks(dim: int, rows: int, axes: Sequence[str], mesh: MeshShape) -> Iterator[tuple[str, State]]:
    """States of axes that cut a leading factor of `rows` rows in the order of torch.chunk, nested."""
    uneven = rows if rows % mesh.extent(axes) else 0
    pre = 1
    for axis in axes:
        yield axis, Shard(dim, pre, uneven)
        pre *= mesh[axis]


def _units(spec: Spec, cut: Cut, rows: int, axis: str, mesh: MeshShape, sizes: Sizes, at: int) -> Sequence[int]:
    """How many units each rank along `axis` holds."""
    n = mesh[axis]
    if cut.owner is not None:
        _check_coordinate(spec, axis, cut.owner, mesh, at)
        return owned_by(cut.owner, n)
    if cut == Cut():
        return chunked(rows, n)
    units = sizes.get(cut.name) if cut.name else cut.units
    if not isinstance(units, Sequence) or min(units, default=0) < 0 or not sum(units):
        raise SpecError(
            f"The units '{cut.name}' need a list of ints, one for each rank: {cut.name}=[...].", spec.text, at
        )
    if len(units) != n:
        raise SpecError(f"{cut} has {len(units)} units, but {axis}={n} needs one for each rank.", spec.text, at)
    return units


def _check_coordinate(spec: Spec, axis: str, coordinate: int, mesh: MeshShape, at: int) -> None:
    if coordinate >= mesh[axis] > 1:
        raise SpecError(
            f"There is no coordinate {coordinate} on {axis}={mesh[axis]}: use 0 to {mesh[axis] - 1}.", spec.text, at
        )


def _entry_states(spec: Spec, entry: Entry, shape: tuple[int, ...], mesh: MeshShape) -> Iterator[tuple[str, State]]:
    at = entry.axes[0].at if isinstance(entry.axes[0], Word) else 0
    if entry.kind == "ct":
        raise SpecError(
            "'ct' marks a value inside a vf.shard_map region whose gradient arrives as partial sums; it says nothing "
            "about where a tensor lives. Leave it out.",
            spec.text,
            at,
        )
    for axis in entry.axes:
        if entry.kind == "at":
            assert entry.coordinate is not None
            _check_coordinate(spec, axis, entry.coordinate, mesh, at)
            if not shape:
                raise SpecError("A tensor without dims is whole on every rank; leave 'at' out.", spec.text, at)
            yield axis, Ragged(0, owned_by(entry.coordinate, mesh[axis]))
        elif entry.kind == "max":
            yield axis, Partial("max")
        else:
            yield axis, Partial("min" if entry.kind == "min" else "sum")


def _refuse_open(spec: Spec, axes: Sequence[str]) -> None:
    if OPEN in axes:
        message = "'?' leaves a choice to the solver, and here there is none to make: name the axes."
        raise SpecError(message, spec.text, axes[0].at if isinstance(axes[0], Word) else 0)


def _unknown_size(spec: Spec, piece: Piece, i: int, size: int, mesh: MeshShape) -> SpecError:
    """The layout depends on a size that nobody gave: show that it does, by two of the layouts it could be."""
    factor = piece.factors[i]
    missing = [f.label for f, n in zip(piece.factors[:i], piece.sizes) if n is None]
    n = mesh.extent(a for a in factor.axes if a in mesh)
    shown = []
    for pre in [p for p in range(1, size + 1) if size % (p * n) == 0][:2]:
        step = size // (pre * n)
        runs = ", ".join(f"{k * n * step}:{k * n * step + step}" for k in range(pre))
        shown.append(f"with {missing[0]}={pre} the first rank holds rows {runs}")
    options = f": {', '.join(shown)}" if shown else ""
    message = (
        f"Where '{factor.label}' is cut depends on the size of '{missing[0]}', which is unknown{options}. "
        f"Write {missing[0]}=SIZE in the spec, or give it as a keyword."
    )
    if missing[0] == ANY:
        message = f"Where '{factor.label}' is cut depends on the size of '_': give that factor a name and a size."
    return SpecError(message, spec.text, factor.at)


# ---- a layout as a spec


def spec_of(layout: Layout, names: Sequence[str] | None = None) -> Spec:
    """The canonical spec of a layout, such that `bind(spec_of(l), l.shape, l.mesh) == l`.

    names: names of the dims; a, b, c, ... by default.
    Raises ValueError for states that are no cut of factors (digits of two axes that overlap).

    >>> m = MeshShape(("dp", "tp"), (2, 4))
    >>> print(spec_of(Layout.of(m, (8, 48), {"dp": Partial(), "tp": Shard(1, 3)}), ["d", "h"]))
    d (3 h/tp) {sum: dp}
    """
    names = names or [letter(i) for i in range(layout.ndim)]
    parts, d = [], 0
    while d < layout.ndim:
        text, last = _dim_text(layout, d, names)
        parts.append(text)
        d = last + 1
    if layout.partial:
        by_kind: dict[str, list[str]] = {}
        for axis, kind in layout.partial:
            by_kind.setdefault(kind, []).append(axis)
        parts.append(f"{{{', '.join(f'{k}: {_plain_axes(a)}' for k, a in by_kind.items())}}}")
    return parse(" ".join(parts))


def _dim_text(layout: Layout, dim: int, names: Sequence[str]) -> tuple[str, int]:
    """The text of the dims from `dim`, and the last of them."""
    for axis, state in zip(layout.mesh.names, layout.states):
        if isinstance(state, Ragged) and state.dim == dim:
            only = owner(state)
            cut = Cut(units=state.units) if only is None else Cut(owner=only)
            last = max(state.last, dim)
            named = names[dim] if last == dim else f"({' '.join(names[dim : last + 1])})"
            return f"{named}{cut}/{axis}", last
    factors = [f"{size}{axes}" for size, axes in _factors(layout, dim)]
    if not factors:
        return names[dim], dim
    *major, minor = _factors(layout, dim)
    factors = [*(f"{size}{axes}" for size, axes in major), f"{names[dim]}{minor[1]}"]
    return (factors[0] if len(factors) == 1 else f"({' '.join(factors)})"), dim


def _factors(layout: Layout, dim: int) -> list[tuple[int, str]]:
    """Sizes of the factors of a dim, major to minor, and the cut and axes of each as text; none when nothing cuts."""
    shards = layout.shards(dim)
    if not shards:
        return []
    lead = max(s.uneven for _, s in shards)
    done = 1  # product of the sizes of the factors so far
    found: list[tuple[int, str]] = []
    if lead:
        axes = [a for a, s in shards if s.uneven or s.pre < lead]
        shards = shards[len(axes) :]
        found.append((lead, f"~/{_plain_axes(axes)}"))
        done = lead
    while shards:
        pre = shards[0][1].pre
        if pre % done:
            raise ValueError(f"No spec can say {layout}: the axes that cut dim {dim} overlap.")
        if pre > done:
            found.append((pre // done, ""))
        run, done = [], pre
        while shards and shards[0][1].pre == done:
            run.append(shards[0][0])
            done *= layout.mesh[run[-1]]
            shards = shards[1:]
        if shards and shards[0][1].pre > done and shards[0][1].pre % done == 0:
            found.append((shards[0][1].pre // pre, f"/{_plain_axes(run)}"))
            done = shards[0][1].pre
        else:
            found.append((done // pre, f"/{_plain_axes(run)}"))
    if found[-1][1].startswith("~") and done < layout.shape[dim]:
        found.append((layout.shape[dim] // done, ""))
    return found
