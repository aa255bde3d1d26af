"""The parser of specs: one token of lookahead, and an error with a caret wherever the text stops making sense."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.spec import (
    ANY,
    ELLIPSIS,
    OPEN,
    Cut,
    Dim,
    Entry,
    Expr,
    Factor,
    Group,
    Spec,
    SpecError,
    Word,
    check_axes,
)

T = TypeVar("T")
KINDS = ("sum", "max", "min", "ct")
_TOKEN = re.compile(
    r"\s*(?:(\.\.\.|->|[()\[\]{}/~@,:=?])|([A-Za-z][A-Za-z0-9_]*)|(_)(?![A-Za-z0-9_])|(\d+)(?![A-Za-z_]))"
)
_SYMBOL, _NAME, _ANY, _INT, _END = "symbol", "name", "_", "int", "end"
_KINDS_OF_GROUPS = ("", _SYMBOL, _NAME, _ANY, _INT)


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    at: int


def parse(text: str, mesh: MeshShape | None = None) -> Spec:
    """The tree of one layout; with `mesh`, its axes must exist there. Raises SpecError.

    >>> parse("b/x/y")
    Traceback (most recent call last):
    ...
    vescale_fn.sharding.spec.SpecError: Several axes on one dim stand in parentheses, major to minor: b/(x y).
      b/x/y
         ^
    """
    spec = _parse_layout(text)
    if mesh is not None:
        check_axes(spec, mesh)
    return spec


def parse_expr(text: str, mesh: MeshShape | None = None) -> Expr:
    """The tree of layouts separated by commas, with or without an arrow. Raises SpecError.

    >>> parse_expr("b s f/tp, f/tp d -> b s d").contracted
    ('f',)
    """
    expr = _parse_expr(text)
    if mesh is not None:
        for spec in (*expr.left, *(expr.right or ())):
            check_axes(spec, mesh)
    return expr


@lru_cache(maxsize=4096)
def _parse_layout(text: str) -> Spec:
    parser = _Parser(text)
    spec = parser.layout()
    parser.end()
    return spec


@lru_cache(maxsize=4096)
def _parse_expr(text: str) -> Expr:
    parser = _Parser(text)
    left = parser.layouts()
    right = parser.layouts() if parser.accept("->") else None
    parser.end()
    return Expr(left, right)


def _tokens(text: str) -> Iterator[Token]:
    at, stop = 0, len(text.rstrip())
    while at < stop:
        match = _TOKEN.match(text, at)
        if match is None or match.lastindex is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise SpecError(f"Unexpected {text[at]!r}: a spec is made of names, sizes and ( ) / ~ {{ }}.", text, at)
        yield Token(_KINDS_OF_GROUPS[match.lastindex], match[match.lastindex], match.start(match.lastindex))
        at = match.end()
    yield Token(_END, "", stop)


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens = list(_tokens(text))
        self._next = 0

    # ---- tokens

    @property
    def token(self) -> Token:
        return self._tokens[self._next]

    def take(self) -> Token:
        token = self.token
        self._next += token.kind != _END
        return token

    def accept(self, symbol: str) -> bool:
        found = self.token.kind == _SYMBOL and self.token.text == symbol
        self._next += found
        return found

    def expect(self, symbol: str, why: str) -> None:
        if not self.accept(symbol):
            raise self.error(f"Expected '{symbol}' {why}")

    def word(self, what: str) -> Word:
        if self.token.kind != _NAME:
            raise self.error(f"Expected {what}")
        token = self.take()
        return Word.of(token.text, token.at)

    def integer(self, what: str) -> int:
        if self.token.kind != _INT:
            raise self.error(f"Expected {what}")
        return int(self.take().text)

    def error(self, message: str, at: int | None = None) -> SpecError:
        """An error at a place; by default at the next token, which the message then names."""
        if at is None:
            found = "the end of the spec" if self.token.kind == _END else f"'{self.token.text}'"
            return SpecError(f"{message}, found {found}.", self.text, self.token.at)
        return SpecError(message, self.text, at)

    def end(self) -> None:
        if self.token.kind != _END:
            raise self.error("Expected a dim or the end of the spec")

    # ---- grammar

    def layouts(self) -> tuple[Spec, ...]:
        found = [self.layout()]
        while self.accept(","):
            found.append(self.layout())
        return tuple(found)

    def layout(self) -> Spec:
        dims: list[Dim] = []
        while self._starts_dim():
            dims.append(self.dim(dims))
        spec = Spec(tuple(dims), self.state(), self.text)
        self._check_once(spec.names, "The name '{}' stands for two dims: names are used once in a layout.")
        axes = tuple(a for a in spec.axes if a != OPEN)
        self._check_once(axes, "The axis '{}' is used twice: a mesh axis can cut a tensor only once.")
        return spec

    def _starts_dim(self) -> bool:
        return self.token.kind in (_NAME, _ANY, _INT) or self.token.text in (ELLIPSIS, "(")

    def _check_once(self, words: tuple[str, ...], message: str) -> None:
        seen: set[str] = set()
        for word in words:
            if word in seen:
                raise self.error(message.format(word), word.at if isinstance(word, Word) else 0)
            seen.add(word)

    def dim(self, before: list[Dim]) -> Dim:
        at = self.token.at
        if self.accept(ELLIPSIS):
            if ELLIPSIS in before:
                raise self.error("A layout has at most one '...'.", at)
            if self.token.text in ("/", "~"):
                raise self.error("'...' stands for dims that are whole; name the dim to shard it.", self.token.at)
            return ELLIPSIS
        return self.group() if self.token.text == "(" else self.factor()

    def group(self) -> Dim:
        at = self.take().at
        factors: list[Factor] = []
        while not self.accept(")"):
            if self.token.text == "(":
                raise self.error("Groups do not nest: list all factors in one pair of parentheses.", self.token.at)
            if self.token.text == ELLIPSIS:
                raise self.error("'...' stands for whole dims and cannot be part of one.", self.token.at)
            if self.token.kind not in (_NAME, _ANY, _INT):
                raise self.error("Expected a factor or ')'")
            factors.append(self.factor())
        if not factors:
            raise self.error("A group has at least one factor; a dim of size 1 is written 1.", at)
        cut, axes = self.cut_and_axes()
        if axes and any(f.axes for f in factors):
            raise self.error("Either a group is sharded or its factors are, not both.", _at(axes))
        if len(factors) > 1:
            return Group(tuple(factors), cut, axes, at)
        if not axes:
            return factors[0]
        return self._checked(replace(factors[0], cut=cut, axes=axes))

    def factor(self) -> Factor:
        token = self.take()
        name: str = Word.of(token.text, token.at) if token.kind == _NAME else token.text
        size = int(token.text) if token.kind == _INT else None
        if token.kind == _INT:
            name = ""
        elif self.token.text == "=":
            if token.kind == _ANY:
                raise self.error("'_' stands for any size; use a name to give it one.", self.token.at)
            self.take()
            size = self.integer(f"a size after '{name}='")
        cut, axes = self.cut_and_axes()
        return self._checked(Factor(name, size, cut, axes, token.at))

    def _checked(self, factor: Factor) -> Factor:
        if factor.axes and factor.name == ANY:
            raise self.error("'_' stands for a whole dim; name the dim to shard it.", _at(factor.axes))
        if factor.axes and factor.size == 1:
            raise self.error("A dim of size 1 cannot be sharded.", _at(factor.axes))
        return factor

    def cut_and_axes(self) -> tuple[Cut | None, tuple[str, ...]]:
        at = self.token.at
        cut = self.cut() if self.accept("~") else None
        axes = self.axes() if self.accept("/") else ()
        if cut and not axes:
            raise self.error(f"'{cut}' says how axes cut a dim, so '/axis' must follow it.", at)
        if cut and cut != Cut() and (len(axes) > 1 or axes == (OPEN,)):
            raise self.error(f"'{cut}' names one part for each rank of a single axis.", _at(axes))
        return cut, axes

    def cut(self) -> Cut:
        if self.token.kind == _NAME:
            return Cut(name=self.word("the name of units"))
        if self.accept("@"):
            return Cut(owner=self.integer("the coordinate of the owner after '~@'"))
        if not self.accept("["):
            return Cut()
        at = self.token.at
        units = self._until("]", lambda: self.integer("a number of units or ']'"))
        if not sum(units):
            raise self.error("Units must not all be 0.", at)
        return Cut(units=units)

    def axes(self) -> tuple[str, ...]:
        at = self.token.at
        if self.token.text == OPEN:
            token = self.take()
            axes: tuple[str, ...] = (Word.of(OPEN, token.at),)
        elif self.accept("("):
            axes = self._until(")", lambda: self.word("a mesh axis or ')'"))
            if not axes:
                raise self.error("'/' needs at least one mesh axis.", at)
        else:
            axes = (self.word("a mesh axis after '/'"),)
        if self.token.text == "/":
            self._refuse_second_slash(axes)
        return axes

    def _refuse_second_slash(self, axes: tuple[str, ...]) -> None:
        at = self.token.at
        before = self.text[: _at(axes)].rstrip("( ")  # up to and with the first slash
        dim = before[max(before.rfind(" "), before.rfind("(")) + 1 :]
        more = list(axes)
        while self.accept("/"):
            more += self._until(")", lambda: self.word("a mesh axis")) if self.accept("(") else (self.word("an axis"),)
        raise self.error(f"Several axes on one dim stand in parentheses, major to minor: {dim}({' '.join(more)}).", at)

    def _until(self, symbol: str, item: Callable[[], T]) -> tuple[T, ...]:
        found: list[T] = []
        while not self.accept(symbol):
            found.append(item())
        return tuple(found)

    def state(self) -> tuple[Entry, ...]:
        if not self.accept("{"):
            return ()
        entries = [self.entry()]
        while self.accept(","):
            entries.append(self.entry())
        self.expect("}", "after the states of axes")
        return tuple(_merged(entries))

    def entry(self) -> Entry:
        kind = self.word("'sum', 'max', 'min', 'ct' or 'at'")
        self.expect(":", f"after '{kind}'")
        if kind == "at":
            axis = self.word("a mesh axis")
            self.expect("@", "between the axis and its coordinate")
            return Entry("at", (axis,), self.integer("a coordinate"))
        if kind not in KINDS:
            raise self.error(f"'{kind}' is no state; use 'sum', 'max', 'min', 'ct' or 'at'.", kind.at)
        if self.token.text == OPEN:
            raise self.error("'?' leaves open how a dim is sharded, and no state: name the axes.", self.token.at)
        return Entry(str(kind), self.axes())


def _merged(entries: list[Entry]) -> Iterator[Entry]:
    """Entries of one kind as one entry, in order of first use."""
    by_kind: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        if entry.coordinate is None:
            by_kind[entry.kind] = (*by_kind.get(entry.kind, ()), *entry.axes)
    yield from (Entry(kind, axes) for kind, axes in by_kind.items())
    yield from (e for e in entries if e.coordinate is not None)


def _at(axes: tuple[str, ...]) -> int:
    return axes[0].at if isinstance(axes[0], Word) else 0
