"""Patterns of operands, as in `x="... k", i="i<v: a b"`: matched with shapes, and filled with sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
Shape = tuple[int, ...]

_SIZES = st.sampled_from([1, 2, 2, 3, 3, 4, 4, 6, 6, 12, 0])


@dataclass(frozen=True)
class Pattern:
    """An operand's kind, the letter whose size its integers stay below ("" for any), and its dims."""

    kind: str
    below: str
    dims: tuple[str, ...]

    @staticmethod
    def of(text: str) -> Pattern:
        kind, below, dims = re.fullmatch(r"(?:(\w)(?:<(\w))?:\s*)?(.*)", text).groups()  # type: ignore[union-attr]
        return Pattern(kind or "f", below or "", tuple(dims.split()))


@dataclass
class Sizes:
    """What a statement's letters, and its `...`, stand for."""

    letters: dict[str, int] = field(default_factory=dict)
    rest: Shape | None = None

    def match(self, dims: Sequence[str], shape: Shape) -> Sizes | None:
        """These sizes and those that follow from a tensor of this shape, or None when it does not fit. What stands
        for a second `...` broadcasts with the first."""
        letters, rest = dict(self.letters), self.rest
        if dims[:1] == ("...",) or "..." in dims:
            at, n = dims.index("..."), len(shape) - len(dims) + 1
            if n < 0:
                return None
            found = shape[at : at + n]
            if rest is not None and not _broadcast(found, rest):
                return None
            rest = found if rest is None else rest
            dims, shape = [*dims[:at], *dims[at + 1 :]], shape[:at] + shape[at + n :]
        if len(dims) != len(shape):
            return None
        for name, size in zip(dims, shape):
            if (int(name) if name.isdigit() else letters.setdefault(name, size)) != size:
                return None
            if name.isupper() and not size:
                return None
        return Sizes(letters, rest)

    def fill(self, dims: Sequence[str], draw: Draw) -> Shape:
        """A shape that matches, the unknown sizes drawn."""
        shape: list[int] = []
        for name in dims:
            if name == "..." and self.rest is None:
                shape += draw(st.lists(_SIZES, max_size=2))
            elif name == "...":
                part = self.rest[draw(st.integers(0, len(self.rest))) :]
                shape += [n if draw(st.integers(0, 3)) else 1 for n in part]
            else:
                known = int(name) if name.isdigit() else self.letters.get(name)
                shape.append((draw(_SIZES) or int(name.isupper())) if known is None else known)
                if not name.isdigit():
                    self.letters[name] = shape[-1]
        return tuple(shape)


def _broadcast(a: Shape, b: Shape) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b)))


def fits(value: torch.Tensor, pattern: Pattern, sizes: Sizes, dtype: torch.dtype) -> bool:
    """Whether a value may stand where the pattern does."""
    if kind_of(value, dtype) != pattern.kind or sizes.match(pattern.dims, tuple(value.shape)) is None:
        return False
    if pattern.below and value.numel():
        return int(value.min()) >= 0 and int(value.max()) < sizes.letters[pattern.below]
    return True


def kind_of(value: torch.Tensor, dtype: torch.dtype) -> str | None:
    """f, i, b or c; None for other dtypes."""
    return {dtype: "f", torch.int64: "i", torch.bool: "b", torch.complex128: "c"}.get(value.dtype)
