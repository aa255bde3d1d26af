"""Binding: a spec meets the shape of a tensor and a mesh, and becomes a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vescale_fn.sharding.forms import Sizes, SpecLike, as_spec
from vescale_fn.sharding.layout import CUTS, Layout, Partial, Ragged, Shard, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.ragged import chunked, owned_by, state_of_units
from vescale_fn.sharding.sizes import Piece, resolve, size_names
from vescale_fn.sharding.spec import (
    ANY,
    OPEN,
    Cut,
    Entry,
    Factor,
    Indivisible,
    Spec,
    SpecError,
    Word,
    check_axes,
    existing_axes,
)
from vescale_fn.sharding.unbind import spec_of

__all__ = ["bind", "bind_sized", "check_shape", "size_names", "spec_of"]


def bind(spec: SpecLike, shape: Sequence[int], mesh: MeshShape, /, **sizes: int | Sequence[int]) -> Layout:
    """The layout that `spec` gives to a tensor of global `shape` on `mesh`.

    sizes: sizes of factors that the spec names (`h=16`), and units (`u=[3, 7]`).
    Raises SpecError when an axis does not exist, the rank differs, a size is unknown or does not divide.

    >>> m = MeshShape(("dp", "tp"), (2, 4))
    >>> bind("b/dp (qkv h/tp k)", (8, 48), m, qkv=3, h=4).states
    (Shard(dim=0, pre=1, uneven=0), Shard(dim=1, pre=3, uneven=0))
    """
    parsed, given = _with_sizes(spec, sizes)
    return bind_sized(parsed, tuple(shape), mesh, given)


def check_shape(spec: SpecLike, shape: Sequence[int], /, **sizes: int | Sequence[int]) -> None:
    """Raise SpecError when a tensor of this shape has another rank, or other sizes, than the spec says. No mesh."""
    parsed, given = _with_sizes(spec, sizes)
    resolve(parsed, tuple(shape), given)


def bind_sized(spec: Spec, shape: tuple[int, ...], mesh: MeshShape, sizes: Sizes) -> Layout:
    """Like `bind`; `sizes` may also name factors of other specs."""
    check_axes(spec, mesh)
    return _Binder(spec, shape, mesh, sizes).layout()


def _with_sizes(spec: SpecLike, sizes: Sizes) -> tuple[Spec, Sizes]:
    """The parsed spec and all sizes given for it. Raises SpecError for a size that names nothing."""
    parsed, own = as_spec(spec)
    given = {**own, **sizes}
    for name in given:
        if name not in size_names(parsed):
            raise SpecError(f"The size {name}={given[name]} names no factor of the spec.", parsed.text, 0)
    return parsed, given


@dataclass(frozen=True)
class _Binder:
    """One spec on its way to becoming a layout."""

    spec: Spec
    shape: tuple[int, ...]
    mesh: MeshShape
    sizes: Sizes

    def layout(self) -> Layout:
        states: dict[str, State] = {}
        for piece in resolve(self.spec, self.shape, self.sizes):
            states.update(self._piece(piece))
        for entry in self.spec.state:
            states.update(self._owned(entry, states) if entry.kind == "at" else self._pending(entry))
        return Layout.of(self.mesh, self.shape, states)

    def _error(self, message: str, where: str | int) -> SpecError:
        """An error at a place of the text, or at a word of it."""
        at = where.at if isinstance(where, Word) else where if isinstance(where, int) else 0
        return SpecError(message, self.spec.text, at)

    # ---- dims

    def _piece(self, piece: Piece) -> Iterator[tuple[str, State]]:
        """The states of the axes that cut the dims of one piece."""
        if piece.cut:
            yield from self._flat(piece, piece.cut)
            return
        if piece.axes:
            size = self.shape[piece.dim]
            yield from self._even(f"Dim {piece.dim}", size, Shard(piece.dim), piece.axes)
        pre: int | None = 1
        for i, (factor, n) in enumerate(zip(piece.factors, piece.sizes)):
            if factor.cut:
                yield from self._lead(piece, i)
            elif factor.axes and pre is None:
                raise self._unknown_size(piece, i)
            elif factor.axes:
                yield from self._factor(piece, i, max(pre or 1, 1))  # an empty dim has digits of any kind
            pre = None if n is None or pre is None else pre * n

    def _factor(self, piece: Piece, i: int, pre: int) -> Iterator[tuple[str, State]]:
        """Equal shards of factor i, below `pre` rows of more major factors."""
        factor, n = piece.factors[i], piece.sizes[i]
        what = f"Factor '{factor.label}' of dim {piece.dim}" if len(piece.factors) > 1 else f"Dim {piece.dim}"
        size = n if n is not None else self.shape[piece.dim] // pre
        yield from self._even(what, size, Shard(piece.dim, pre), factor.axes, None if i else factor)

    def _even(
        self, what: str, size: int, shard: Shard, axes: Sequence[str], lead: Factor | None = None
    ) -> Iterator[tuple[str, State]]:
        """States of axes that cut `size` rows into equal parts; `shard` is that of the first axis."""
        self._refuse_open(axes)
        n = self.mesh.extent(axes)
        if size % n:
            by = "*".join(f"{a}={self.mesh[a]}" for a in axes)
            hint = f", or write {lead.label}~{str(lead)[len(lead.label) :]} for unequal shards" if lead else ""
            fact = f"{what} has size {size}, which is not divisible by {by}."
            at = axes[0].at if isinstance(axes[0], Word) else 0
            raise Indivisible(fact, f"Make it a multiple of {n}{hint}.", -(-size // n) * n, self.spec.text, at)
        pre = shard.pre
        for axis in axes:
            yield axis, Shard(shard.dim, pre)
            pre *= self.mesh[axis]

    def _lead(self, piece: Piece, i: int) -> Iterator[tuple[str, State]]:
        """Unequal shards of factor i, which must lead its dim."""
        factor, rows = piece.factors[i], piece.sizes[i]
        if i:
            raise self._error("Only the leading factor of a dim can be cut unevenly.", factor.at)
        self._refuse_open(factor.axes)
        if rows is None:
            raise self._error(
                f"Where '~' cuts '{factor.label}' depends on its size: write {factor.label}=SIZE.", factor.at
            )
        if factor.cut == Cut():
            yield from self._chunks(piece.dim, rows, factor.axes)
            return
        assert factor.cut is not None
        if any(f.axes for f in piece.factors[1:]):
            raise self._error("A dim that is cut in units is not cut again by another factor.", factor.at)
        yield from self._in_units(f"'{factor.label}'", rows, factor.cut, factor.axes[0], Ragged(piece.dim, ()))

    def _chunks(self, dim: int, rows: int, axes: Sequence[str]) -> Iterator[tuple[str, State]]:
        """States of axes that cut a leading factor of `rows` rows in the order of torch.chunk, nested."""
        uneven = rows if rows % self.mesh.extent(axes) else 0
        pre = 1
        for axis in axes:
            yield axis, Shard(dim, pre, uneven)
            pre *= self.mesh[axis]

    def _flat(self, piece: Piece, cut: Cut) -> Iterator[tuple[str, State]]:
        """The state of the axis that cuts several dims as one flat dim."""
        self._refuse_open(piece.axes)
        if len(piece.axes) > 1:
            raise self._error("A group is cut flat by a single axis.", piece.axes[0])
        size = math.prod(self.shape[piece.dim : piece.last + 1])
        yield from self._in_units("The group", size, cut, piece.axes[0], Ragged(piece.dim, (), piece.last))

    def _in_units(self, what: str, rows: int, cut: Cut, axis: str, ragged: Ragged) -> Iterator[tuple[str, State]]:
        """The state of the axis that cuts `rows` leading rows in units; `ragged` says of which dims."""
        if self.mesh[axis] == 1:  # everything is on the one rank, whatever the units
            return
        units = self._units(rows, cut, axis)
        if rows % sum(units):
            raise self._error(
                f"{what} has {rows} rows, which is not a multiple of the {sum(units)} units of {cut}. "
                "Choose units whose sum divides it.",
                axis,
            )
        last = max(ragged.dim, ragged.last)
        size = math.prod(self.shape[ragged.dim : last + 1])
        yield axis, state_of_units(ragged.dim, units, size, ragged.last)

    def _units(self, rows: int, cut: Cut, axis: str) -> Sequence[int]:
        """How many units each rank along `axis` holds."""
        n = self.mesh[axis]
        if cut.owner is not None:
            self._check_coordinate(axis, cut.owner)
            return owned_by(cut.owner, n)
        if cut == Cut():
            return chunked(max(rows, 1), n)  # units of an empty dim may be any
        units = self.sizes.get(cut.name) if cut.name else cut.units
        if not isinstance(units, Sequence) or min(units, default=0) < 0 or not sum(units):
            raise self._error(f"The units '{cut.name}' need one int for each rank: {cut.name}=[...].", axis)
        if len(units) != n:
            raise self._error(f"{cut} has {len(units)} units, but {axis}={n} needs one for each rank.", axis)
        return units

    # ---- states that no dim carries

    def _pending(self, entry: Entry) -> Iterator[tuple[str, State]]:
        for axis in entry.axes:
            match entry.kind:
                case "sum" | "max" | "min" as kind:
                    yield axis, Partial(kind)
                case _:
                    raise self._error(
                        "'ct' says that the gradient of a value inside a vf.shard_map region arrives as partial sums, "
                        "not where a tensor lives. Leave it out.",
                        axis,
                    )

    def _owned(self, entry: Entry, states: dict[str, State]) -> Iterator[tuple[str, State]]:
        """An owner is a cut of any dim, so it takes the first that no other axis cuts."""
        (axis,) = entry.axes
        assert entry.coordinate is not None
        self._check_coordinate(axis, entry.coordinate)
        cut = {s.dim for s in states.values() if isinstance(s, CUTS)}
        free = [d for d in range(len(self.shape)) if d not in cut]
        if not free:
            raise self._error("An owner needs a dim that no other axis cuts, and this tensor has none.", axis)
        yield axis, Ragged(free[0], owned_by(entry.coordinate, self.mesh[axis]))

    # ---- errors

    def _check_coordinate(self, axis: str, coordinate: int) -> None:
        if coordinate >= self.mesh[axis] > 1:
            most = self.mesh[axis] - 1
            raise self._error(f"There is no coordinate {coordinate} on axis '{axis}': use 0 to {most}.", axis)

    def _refuse_open(self, axes: Sequence[str]) -> None:
        if OPEN in axes:
            raise self._error(
                f"'?' leaves a choice to the solver, and here there is none to make. Name the axes: "
                f"{existing_axes(self.mesh)}.",
                axes[0],
            )

    def _unknown_size(self, piece: Piece, i: int) -> SpecError:
        """The layout depends on a size that nobody gave: show that it does, by two of the layouts it could be."""
        factor, size = piece.factors[i], self.shape[piece.dim]
        name = next(f.label for f, n in zip(piece.factors, piece.sizes) if n is None)
        if name == ANY:
            return self._error(
                f"Where '{factor.label}' is cut depends on the size of '_': name that factor.", factor.at
            )
        n = self.mesh.extent(factor.axes)
        options = []
        for pre in [p for p in range(1, size + 1) if size % (p * n) == 0][:2]:
            step = size // (pre * n)
            rows = ", ".join(f"{k * n * step}:{k * n * step + step}" for k in range(pre))
            options.append(f"{name}={pre} puts rows {rows} on the first rank")
        return self._error(
            f"Where '{factor.label}' is cut depends on the size of '{name}', which is unknown"
            f"{': ' if options else ''}{', '.join(options)}. Write {name}=SIZE in the spec, or pass it as a keyword.",
            factor.at,
        )
