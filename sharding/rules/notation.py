"""The text of a factor rule, parsed: see `rule.py` for what it means.

rule    = operands "->" layouts ;
operands, layouts = "-" | layout { "," layout } ;       (* "-": no tensors *)
layout  = [ argument ":" ] { dim } ;                    (* argument names on the left only *)
dim     = "..." | "1" | [ "!" ] letter | "(" { [ "!" ] letter } ")" ;
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from string import ascii_lowercase
from typing import Any

ELLIPSIS = "..."
_TOKEN = re.compile(r"\s*(\.\.\.|[()]|!?[A-Za-z_]\w*|1)")


class RuleError(ValueError):
    """A rule is malformed, or does not fit the equation it is applied to."""


@dataclass(frozen=True)
class Pattern:
    """A parsed rule: per operand its name ("" if none) and dims, where a dim is a tuple of letters or "..."."""

    operands: tuple[tuple[str, tuple[Any, ...]], ...]
    results: tuple[tuple[Any, ...], ...]
    whole: frozenset[str]


@cache
def parse_pattern(text: str) -> Pattern:
    """The pattern that `text` spells."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"The rule {text!r} has no '->'; write operands '->' results, as in 'm k, k n -> m n'.")
    whole: set[str] = set()
    operands = tuple(_named(part, text, whole) for part in _parts(left))
    results = tuple(_dims(part, text, whole) for part in _parts(right))
    return Pattern(operands, results, frozenset(whole))


def _parts(side: str) -> list[str]:
    """Comma-separated layouts. A blank is a scalar; `-` alone says that there are no tensors."""
    return [] if side.strip() == "-" else side.split(",")


def _named(part: str, text: str, whole: set[str]) -> tuple[str, tuple[Any, ...]]:
    name, colon, dims = part.rpartition(":")
    return (name.strip() if colon else ""), _dims(dims, text, whole)


def _dims(part: str, text: str, whole: set[str]) -> tuple[Any, ...]:
    dims: list[Any] = []
    group: list[str] | None = None
    for token in _tokens(part, text):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            dims.append(tuple(group))
            group = None
        elif token in "()" or (token == ELLIPSIS and group is not None):
            raise RuleError(f"The rule {text!r} has an unexpected {token!r} in {part.strip()!r}.")
        elif token == ELLIPSIS:
            dims.append(ELLIPSIS)
        else:
            letter = token.removeprefix("!")
            if letter != token:
                whole.add(letter)
            letters = () if letter == "1" else (letter,)
            if group is None:
                dims.append(letters)
            else:
                group.extend(letters)
    if group is not None:
        raise RuleError(f"The rule {text!r} has a '(' without ')' in {part.strip()!r}.")
    if dims.count(ELLIPSIS) > 1:
        raise RuleError(f"The rule {text!r} has more than one '...' in {part.strip()!r}.")
    return tuple(dims)


def _tokens(part: str, text: str) -> Iterator[str]:
    part = part.strip()
    at = 0
    while at < len(part):
        match = _TOKEN.match(part, at)
        if match is None:
            raise RuleError(f"The rule {text!r} has an unexpected {part[at:].strip()[0]!r} in {part!r}.")
        yield match[1]
        at = match.end()


def fresh_letters(taken: Iterable[str] = ()) -> Iterator[str]:
    """Letters that are not `taken`: a, b, ..., z, a1, b1, ...

    >>> letters = fresh_letters({"a"})
    >>> next(letters), next(letters)
    ('b', 'c')
    """
    used = set(taken)
    names = (x + (str(i) if i else "") for i in count() for x in ascii_lowercase)
    return (x for x in names if x not in used)


def spell(dims: tuple[Any, ...]) -> str:
    """The notation of `dims`."""
    return " ".join(
        d if isinstance(d, str) else "1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims
    )
