"""The dims of a spec matched with those of a tensor, and the sizes of all factors. No mesh is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vescale_fn.sharding.forms import Sizes
from vescale_fn.sharding.spec import Cut, Dim, Factor, Group, Spec, SpecError


@dataclass(frozen=True)
class Piece:
    """The dims dim..last of a tensor and the part of the spec that stands for them. `sizes` are those of `factors`,
    None where unknown. Several dims only in a group that is cut flat."""

    dim: int
    last: int
    factors: tuple[Factor, ...]
    sizes: tuple[int | None, ...]
    cut: Cut | None = None  # of a group as a whole
    axes: tuple[str, ...] = ()


def size_names(spec: Spec) -> frozenset[str]:
    """The names to which sizes can be given: factors, and named units."""
    cuts = [f.cut for f in spec.factors] + [d.cut for d in spec.dims if isinstance(d, Group)]
    return frozenset(spec.names) | {c.name for c in cuts if c and c.name}


def resolve(spec: Spec, shape: tuple[int, ...], sizes: Sizes) -> list[Piece]:
    """The pieces of a tensor of global `shape`; dims under '...' have none.

    Raises SpecError when the rank differs, or sizes contradict the shape.

    >>> from vescale_fn.sharding.grammar import parse
    >>> [(p.dim, p.sizes) for p in resolve(parse("... (h k)"), (4, 5, 6), {"h": 2})]
    [(2, (2, 3))]
    """
    widths = [_width(d) for d in spec.dims]
    rest = len(shape) - sum(widths)
    check_rank(spec, shape)
    pieces, d = [], 0
    for dim, width in zip(spec.dims, widths):
        if isinstance(dim, Factor):
            _check_size(spec, dim, d, shape[d], sizes)
            pieces.append(Piece(d, d, (dim,), (shape[d],)))
        elif isinstance(dim, Group):
            pieces.append(_flat(spec, dim, d, shape, sizes) if dim.cut else _grouped(spec, dim, d, shape[d], sizes))
        else:
            width = rest
        d += width
    return pieces


def _width(dim: Dim) -> int:
    """How many tensor dims a dim of a spec stands for, '...' aside."""
    if isinstance(dim, Group):
        return len(dim.factors) if dim.cut else 1
    return int(isinstance(dim, Factor))


def check_rank(spec: Spec, shape: tuple[int, ...]) -> None:
    """Raise SpecError when a tensor of this shape has another number of dims than the spec says."""
    width = sum(map(_width, spec.dims))
    open_rank = "..." in spec.dims
    if len(shape) == width or (open_rank and len(shape) > width):
        return
    least = "at least " if open_rank else ""
    raise SpecError(
        f"The spec has {least}{_dims(width)}, but the tensor of shape {list(shape)} has {_dims(len(shape))}.",
        spec.text,
        0,
    )


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
    """A group that is cut flat: each of its factors is a dim."""
    last = d + len(group.factors) - 1
    for i, factor in enumerate(group.factors):
        if factor.axes:
            raise SpecError("The dims of a group that is cut flat are not cut themselves.", spec.text, factor.at)
        _check_size(spec, factor, d + i, shape[d + i], sizes)
    return Piece(d, last, group.factors, shape[d : last + 1], group.cut, group.axes)


def _grouped(spec: Spec, group: Group, dim: int, size: int, sizes: Sizes) -> Piece:
    """A group that is one dim: the size of one factor may be left to follow from the others."""
    known = [_given(spec, f, sizes) for f in group.factors]
    product = math.prod(k for k in known if k is not None)
    missing = [i for i, k in enumerate(known) if k is None]
    fits = product == size if not missing else size % product == 0 if product else size == 0
    if not fits:
        parts = [f"{f.name}={k}" if f.name else str(k) for f, k in zip(group.factors, known) if k is not None]
        wrong = f"{'a multiple of ' if missing else ''}{'*'.join(parts)}{f' = {product}' if len(parts) > 1 else ''}"
        raise SpecError(f"Dim {dim} has size {size}, which is not {wrong}.", spec.text, group.at)
    if len(missing) == 1:
        known[missing[0]] = size // product if product else 0
    return Piece(dim, dim, group.factors, tuple(known), None, group.axes)
