"""The forms in which a spec may be written besides a string: by position (`P`), and with sizes (`S`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from vescale_fn.sharding.grammar import parse
from vescale_fn.sharding.mesh import axes_text
from vescale_fn.sharding.spec import Spec

Sizes = Mapping[str, int | Sequence[int]]
Entry = str | tuple[str, ...] | None


def letter(i: int) -> str:
    """The name of dim i where the user gave none: a, b, ..., z, a1, b1, ..."""
    return ascii_lowercase[i % 26] + (str(i // 26) if i >= 26 else "")


class P:
    """A spec by position: for each dim the axis that shards it, a tuple of axes (major to minor), or None.

    Dims left out at the end are whole, so P("dp") == P("dp", None); and P(("tp",)) == P("tp").

    >>> P("dp", None, ("tp", "sp")), str(P("dp", None, ("tp", "sp")).spec)
    (P('dp', None, ('tp', 'sp')), 'a/dp b c/(tp sp) ...')
    """

    __slots__ = ("entries",)

    def __init__(self, *entries: Entry) -> None:
        kept = [_plain(e) for e in entries]
        while kept and kept[-1] is None:
            kept.pop()
        self.entries: tuple[Entry, ...] = tuple(kept)

    @property
    def spec(self) -> Spec:
        """The same as a parsed spec."""
        return parse(" ".join([*(_dim(i, e) for i, e in enumerate(self.entries)), "..."]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash((P, self.entries))

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.entries))})"


def _plain(entry: Entry) -> Entry:
    """One axis by its name, none as None."""
    if entry is not None and not isinstance(entry, str):
        entry = tuple(entry)
        if not all(isinstance(a, str) for a in entry):
            raise TypeError(f"P takes axis names, tuples of axis names and None, not {entry!r}.")
        return entry if len(entry) > 1 else entry[0] if entry else None
    return entry


def _dim(i: int, entry: Entry) -> str:
    if entry is None:
        return letter(i)
    return f"{letter(i)}/{axes_text((entry,) if isinstance(entry, str) else entry)}"


@dataclass(frozen=True, init=False)
class S:
    """A spec string with the sizes of its factors.

    >>> S("d (qkv h/tp k)", qkv=3, h=16)
    S('d (qkv h/tp k)', h=16, qkv=3)
    """

    text: str
    items: tuple[tuple[str, int | tuple[int, ...]], ...]

    def __init__(self, text: str, /, **sizes: int | Sequence[int]) -> None:
        object.__setattr__(self, "text", text)
        items = sorted((k, v if isinstance(v, int) else tuple(v)) for k, v in sizes.items())
        object.__setattr__(self, "items", tuple(items))
        self.spec  # noqa: B018  a malformed spec is an error where it is written

    @property
    def spec(self) -> Spec:
        """The parsed spec."""
        return parse(self.text)

    @property
    def sizes(self) -> dict[str, int | Sequence[int]]:
        return dict(self.items)

    def __repr__(self) -> str:
        return f"S({', '.join([repr(self.text), *(f'{k}={v}' for k, v in self.items)])})"


SpecLike = str | Spec | P | S


def as_spec(spec: SpecLike) -> tuple[Spec, Sizes]:
    """The parsed spec, and the sizes that it brings along. Raises TypeError for anything that is no spec."""
    match spec:
        case str():
            return parse(spec), {}
        case Spec():
            return spec, {}
        case P():
            return spec.spec, {}
        case S():
            return spec.spec, spec.sizes
    raise TypeError(f"A spec is a string such as 'b/dp d', a vf.P or a vf.S, not {type(spec).__name__} ({spec!r}).")
