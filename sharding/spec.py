"""Specs: the notation in which a user says where the parts of a tensor live, parsed into a small frozen tree.

expr    = layout { "," layout } [ "->" layout { "," layout } ] ;
layout  = { dim } [ state ] ;                                      (* "" is a scalar *)
dim     = "..." | factor | "(" factor { factor } ")" [ cut ] [ "/" axes ] ;
factor  = ( name [ "=" int ] | "_" | int ) [ cut ] [ "/" axes ] ;  (* "_": any size, whole *)
cut     = "~" [ name | "@" int | "[" int { int } "]" ] ;           (* torch.chunk order | named units | owner | units *)
axes    = axis | "(" axis { axis } ")" | "?" ;                     (* major to minor; "?": the solver chooses *)
state   = "{" entry { "," entry } "}" ;
entry   = kind ":" axes | "at" ":" axis "@" int ;                  (* pending reduction | whole on one coordinate *)
kind    = "sum" | "max" | "min" | "ct" ;

`/` reads as division: the local size is the size divided by the product of the axes' sizes. `str` of a tree is its
canonical text, and parsing that gives the tree back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vescale_fn.sharding.mesh import MeshShape, axes_text

ELLIPSIS: Literal["..."] = "..."
ANY = "_"
OPEN = "?"


class SpecError(ValueError):
    """A spec that cannot be read, or does not fit its tensor or mesh. The message ends with the spec and a caret."""

    def __init__(self, message: str, text: str = "", at: int = -1) -> None:
        self.message, self.text, self.at = message, text, at
        caret = f"\n  {text}\n  {' ' * at}^" if at >= 0 else ""
        super().__init__(message + caret)

    def within(self, where: str) -> SpecError:
        """The same error, saying first where it happened."""
        return SpecError(f"{where}: {self.message}", self.text, self.at)


class Indivisible(SpecError):
    """A size that the equal shards of a spec do not divide. fact: what is wrong; fitting: the next size that fits."""

    def __init__(self, fact: str, advice: str, fitting: int, text: str, at: int) -> None:
        super().__init__(f"{fact} {advice}", text, at)
        self.fact, self.fitting = fact, fitting


class Word(str):
    """A name in a spec, which knows where it stands in the text."""

    at: int = -1

    @staticmethod
    def of(text: str, at: int) -> Word:
        word = Word(text)
        word.at = at
        return word


def _divided(axes: Sequence[str]) -> str:
    return f"/{axes_text(axes)}" if axes else ""


@dataclass(frozen=True)
class Cut:
    """How a dim is cut where the division need not be even: like torch.chunk (nothing set), in given units, in units
    named by a size, or whole on the one rank `owner`."""

    units: tuple[int, ...] = ()
    name: str = ""
    owner: int | None = None

    def __str__(self) -> str:
        if self.owner is not None:
            return f"~@{self.owner}"
        return f"~[{' '.join(map(str, self.units))}]" if self.units else f"~{self.name}"


@dataclass(frozen=True)
class Factor:
    """A named, sized piece of a dim. `name` is "" for a literal size and "_" for any size; `axes` major to minor."""

    name: str
    size: int | None = None
    cut: Cut | None = None
    axes: tuple[str, ...] = ()
    at: int = field(default=-1, compare=False, repr=False)

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return self.name or str(self.size)

    def __str__(self) -> str:
        named = f"{self.name}={self.size}" if self.name and self.size is not None else self.label
        return f"{named}{self.cut or ''}{_divided(self.axes)}"


@dataclass(frozen=True)
class Group:
    """Several factors in parentheses: one dim of the tensor; with a `cut`, several dims that are one flat dim."""

    factors: tuple[Factor, ...]
    cut: Cut | None = None
    axes: tuple[str, ...] = ()
    at: int = field(default=-1, compare=False, repr=False)

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.factors))}){self.cut or ''}{_divided(self.axes)}"


@dataclass(frozen=True)
class Entry:
    """A state of axes that no dim carries: a pending reduction, or "at" with the coordinate that holds the tensor."""

    kind: str
    axes: tuple[str, ...]
    coordinate: int | None = None

    def __str__(self) -> str:
        if self.coordinate is not None:
            return f"at: {self.axes[0]}@{self.coordinate}"
        return f"{self.kind}: {axes_text(self.axes)}"


Dim = Factor | Group | Literal["..."]


@dataclass(frozen=True)
class Spec:
    """One parsed layout. `text` is what the user wrote, for messages.

    >>> from vescale_fn.sharding.grammar import parse
    >>> str(parse("d  (qkv h=16/(tp) k)"))
    'd (qkv h=16/tp k)'
    """

    dims: tuple[Dim, ...]
    state: tuple[Entry, ...] = ()
    text: str = field(default="", compare=False, repr=False)

    @property
    def factors(self) -> Iterator[Factor]:
        """Every factor, in order, those inside groups included."""
        for dim in self.dims:
            if isinstance(dim, Group):
                yield from dim.factors
            elif isinstance(dim, Factor):
                yield dim

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the factors, in order."""
        return tuple(f.name for f in self.factors if f.name not in ("", ANY))

    @property
    def axes(self) -> Iterator[str]:
        """Every mesh axis, as often as it is written."""
        for dim in self.dims:
            if isinstance(dim, Group):
                yield from dim.axes
                for f in dim.factors:
                    yield from f.axes
            elif isinstance(dim, Factor):
                yield from dim.axes
        for entry in self.state:
            yield from entry.axes

    def with_sizes(self, sizes: Mapping[str, int | Sequence[int]]) -> Spec:
        """The same spec with the sizes of factors inside groups, and named units, written inline.

        >>> from vescale_fn.sharding.grammar import parse
        >>> str(parse("d (qkv h/tp k)").with_sizes({"qkv": 3, "h": 16}))
        'd (qkv=3 h=16/tp k)'
        """

        def cut(c: Cut | None) -> Cut | None:
            units = sizes.get(c.name) if c and c.name else None
            return Cut(units=tuple(units)) if isinstance(units, Sequence) else c

        def factor(f: Factor) -> Factor:
            size = sizes.get(f.name, f.size)
            return replace(f, size=size if isinstance(size, int) else f.size)

        def dim(d: Dim) -> Dim:
            if isinstance(d, Group):
                return replace(d, factors=tuple(replace(factor(f), cut=cut(f.cut)) for f in d.factors), cut=cut(d.cut))
            return replace(d, cut=cut(d.cut)) if isinstance(d, Factor) else d

        return replace(self, dims=tuple(map(dim, self.dims)))

    def __str__(self) -> str:
        state = [f"{{{', '.join(map(str, self.state))}}}"] if self.state else []
        return " ".join([*map(str, self.dims), *state])


@dataclass(frozen=True)
class Expr:
    """Layouts before and after an arrow; `right` is None when there is no arrow."""

    left: tuple[Spec, ...]
    right: tuple[Spec, ...] | None = None

    @property
    def contracted(self) -> tuple[str, ...]:
        """Names on the left that are missing on the right: a contraction, which only einsum may ask for."""
        kept = {n for s in self.right or () for n in s.names}
        names = dict.fromkeys(n for s in self.left for n in s.names)
        return tuple(n for n in names if n not in kept) if self.right is not None else ()

    def __str__(self) -> str:
        left = ", ".join(map(str, self.left))
        return left if self.right is None else f"{left} -> {', '.join(map(str, self.right))}".strip()


def existing_axes(mesh: MeshShape) -> str:
    """The axes that exist, for messages."""
    if not mesh.names:
        return "this mesh has no axes"
    return "this mesh has " + ", ".join(f"{a}={n}" for a, n in zip(mesh.names, mesh.sizes))


def check_axes(spec: Spec, mesh: MeshShape) -> None:
    """Raise SpecError when the spec names an axis that the mesh does not have."""
    for axis in spec.axes:
        if axis != OPEN and axis not in mesh:
            at = axis.at if isinstance(axis, Word) else -1
            raise SpecError(f"There is no mesh axis '{axis}': {existing_axes(mesh)}.", spec.text, at)
