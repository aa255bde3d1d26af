"""The letters of a rule bound to shapes: `...` spelt out, the size of each letter, dims of size one without letters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vescale_fn.sharding.rules.notation import ELLIPSIS, RuleError, fresh_letters, parse_pattern, spell
from vescale_fn.sharding.rules.rule import Dims

Bound = tuple[tuple[Dims, ...], tuple[Dims, ...], tuple[tuple[str, int], ...]]  # operands, results, sizes


@dataclass(frozen=True)
class CallShapes:
    """What a rule is bound to: name of the operation, shapes of operands and results, slots of each argument."""

    name: str
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.operands + self.results


@lru_cache(maxsize=4096)  # equal layers ask again and again
def bind_pattern(text: str, call: CallShapes, sizes: tuple[tuple[str, int], ...] = ()) -> Bound:
    """The letters of each dim of operands and results, and their sizes. Raises RuleError where they do not fit."""
    operands, results = _operand_dims(text, call), parse_pattern(text).results
    if len(results) != len(call.results):
        raise _misfit(text, call, f"it states {len(results)} results where there are {len(call.results)}")
    sides = _expand(text, call, [*operands, *results])
    known = _sizes(text, call, sides, dict(sizes))
    trimmed = tuple(_trim(d, s) for d, s in zip(sides, call.shapes))
    return trimmed[: len(operands)], trimmed[len(operands) :], tuple(known.items())


def _misfit(text: str, call: CallShapes, why: str) -> RuleError:
    of = f"{call.name} of " if call.name else ""
    operands = ", ".join(str(list(s)) for s in call.operands) or "no tensors"
    results = ", ".join(str(list(s)) for s in call.results)
    return RuleError(f"The rule {text!r} does not fit {of}{operands} -> {results}: {why}.")


def _operand_dims(text: str, call: CallShapes) -> list[tuple[Any, ...]]:
    """The pattern of each operand slot; named operands that are absent are left out."""
    pattern, slots, n = parse_pattern(text), dict(call.slots), len(call.operands)
    if not any(name for name, _ in pattern.operands):
        if len(pattern.operands) != n:
            raise _misfit(text, call, f"it covers {len(pattern.operands)} tensor operands where there are {n}")
        return [dims for _, dims in pattern.operands]
    found = {slot: dims for name, dims in pattern.operands for slot in slots.get(name, ())}
    uncovered = sorted(name for name, where in slots.items() if any(s not in found for s in where))
    if uncovered:
        raise _misfit(text, call, f"the tensor operand {uncovered[0]!r} has no letters")
    return [found[slot] for slot in range(n)]


def _expand(text: str, call: CallShapes, sides: Sequence[tuple[Any, ...]]) -> list[Dims]:
    """`...` replaced by letters, shared by all and aligned to the right."""
    lengths = []
    for dims, shape in zip(sides, call.shapes):
        extra = len(shape) - len(dims) + dims.count(ELLIPSIS)
        if extra < 0 or (extra and ELLIPSIS not in dims):
            raise _misfit(text, call, f"{spell(dims)!r} does not have the {len(shape)} dims of {list(shape)}")
        lengths.append(extra)
    taken = {x for dims in sides for d in dims if d != ELLIPSIS for x in d}
    letters = fresh_letters(taken)
    lead = [(next(letters),) for _ in range(max(lengths, default=0))]
    out: list[Dims] = []
    for dims, n in zip(sides, lengths):
        at = dims.index(ELLIPSIS) if ELLIPSIS in dims else len(dims)
        out.append((*dims[:at], *lead[len(lead) - n :], *dims[at + 1 :]))
    return out


def _sizes(text: str, call: CallShapes, sides: Sequence[Dims], given: Mapping[str, int]) -> dict[str, int]:
    """The size of each letter. Dims of one letter first, then groups of which one size is unknown."""
    sizes = dict(given)
    dims = [(d, n) for side, shape in zip(sides, call.shapes) for d, n in zip(side, shape)]
    broadcasting = sum(map(len, call.operands))  # how many of these dims are of operands
    for d, n in dims:
        if len(d) == 1:
            sizes[d[0]] = n if sizes.get(d[0], 1) == 1 else sizes[d[0]]
    groups = [(d, n) for d, n in dims if len(d) > 1]
    for _ in groups:
        for d, n in groups:
            unknown = [x for x in d if x not in sizes]
            known = math.prod(sizes[x] for x in d if x in sizes)
            if len(unknown) == 1 and known and n % known == 0:
                sizes[unknown[0]] = n // known
    for i, (d, n) in enumerate(dims):
        missing = [x for x in d if x not in sizes]
        if missing:
            raise _misfit(text, call, f"the sizes of {' and '.join(missing)} in {spell((d,))!r} are not known")
        if n != math.prod(sizes[x] for x in d) and not (n == 1 and len(d) == 1 and i < broadcasting):
            raise _misfit(text, call, f"{spell((d,))!r} has size {math.prod(sizes[x] for x in d)} and {n}")
    return sizes


def _trim(dims: Dims, shape: Sequence[int]) -> Dims:
    """`dims` with `()` where the tensor has size one, be it broadcast or not."""
    return tuple(() if n == 1 else d for d, n in zip(dims, shape))
