"""Wrong rules made from right ones: what the machine must tell apart.

Each mutation makes a rule admit more, or say something else of the results. Mutations that only forbid (a new `!`,
a linear group forgotten) leave a rule right and are no mutants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.rule import Dims, Rule


@dataclass(frozen=True)
class Mutant:
    what: str
    rule: Rule


def mutants(eqn: Eqn, rule: Rule) -> Iterator[Mutant]:
    """Every single mutation of `rule`."""
    yield from _unmarked(rule)
    yield from _dropped(rule)
    yield from _unlinked(rule)
    yield from _swapped(rule)
    yield from _linear(eqn, rule)
    yield from _through(eqn, rule)
    yield from _kinds(rule)


def _unmarked(rule: Rule) -> Iterator[Mutant]:
    for x in sorted(rule.whole):
        yield Mutant(f"forget the ! of {x}", replace(rule, whole=rule.whole - {x}))


def _dropped(rule: Rule) -> Iterator[Mutant]:
    """A factor missing from one tensor: an operand that is whole while the others are cut, or a result that claims
    to be pending."""
    for side, i, dims in _tensors(rule):
        for x in sorted(_letters(dims) - rule.whole):
            cut = tuple(tuple(y for y in d if y != x) for d in dims)
            yield Mutant(f"drop {x} from {side} {i}", _replaced(rule, side, i, cut))


def _unlinked(rule: Rule) -> Iterator[Mutant]:
    """A letter misspelt in one tensor of several that have it."""
    uses = Counter(x for _, _, dims in _tensors(rule) for x in _letters(dims))
    for side, i, dims in _tensors(rule):
        for x in sorted(_letters(dims) - rule.whole):
            if uses[x] == 1:
                continue
            other = replace(rule, sizes={**rule.sizes, "other": rule.sizes[x]})
            yield Mutant(f"misspell {x} in {side} {i}", _replaced(other, side, i, _renamed(dims, {x: "other"})))


def _swapped(rule: Rule) -> Iterator[Mutant]:
    """Two letters of one tensor change places, where the shapes would not give it away."""
    for side, i, dims in _tensors(rule):
        for x, y in combinations(sorted(_letters(dims)), 2):
            hidden = rule.sizes[x] == rule.sizes[y] or any({x, y} <= set(d) for d in dims)
            if hidden and not {x, y} <= rule.whole:
                yield Mutant(f"swap {x} and {y} in {side} {i}", _replaced(rule, side, i, _renamed(dims, {x: y, y: x})))


def _tensors(rule: Rule) -> Iterator[tuple[str, int, Dims]]:
    yield from (("operands", i, dims) for i, dims in enumerate(rule.operands))
    yield from (("results", i, dims) for i, dims in enumerate(rule.results))


def _letters(dims: Dims) -> set[str]:
    return {x for d in dims for x in d}


def _renamed(dims: Dims, names: dict[str, str]) -> Dims:
    return tuple(tuple(names.get(x, x) for x in d) for d in dims)


def _replaced(rule: Rule, side: str, i: int, dims: Dims) -> Rule:
    tensors = list(getattr(rule, side))
    tensors[i] = dims
    return replace(rule, **{side: tuple(tensors)})


def _linear(eqn: Eqn, rule: Rule) -> Iterator[Mutant]:
    slots = [i for i, v in enumerate(eqn.operands) if v.dtype is not torch.bool]
    groups = [frozenset(g) for n in (1, 2) for g in combinations(slots, n)]
    for g in groups:
        if g not in rule.linear and not (len(g) == 1 and g <= rule.through):
            yield Mutant(f"linear in {sorted(g)}", replace(rule, linear=(*rule.linear, g)))
    if frozenset() not in rule.linear:
        yield Mutant("results are partial for nothing", replace(rule, linear=(*rule.linear, frozenset())))


def _through(eqn: Eqn, rule: Rule) -> Iterator[Mutant]:
    for i, v in enumerate(eqn.operands):
        same = v.dtype.is_complex and {i} in rule.linear  # a complex number has sums only
        if i not in rule.through and not same:
            yield Mutant(f"{i} passes through", replace(rule, through=rule.through | {i}))


def _kinds(rule: Rule) -> Iterator[Mutant]:
    """A reduction that is pending as something else."""
    gone = set().union(*map(_letters, rule.operands)) - set().union(*map(_letters, rule.results))
    for x in sorted(gone - rule.whole):
        for kind in ("sum", "max", "min"):
            if kind != rule.reduces.get(x, "sum"):
                yield Mutant(f"{x} is pending as {kind}", replace(rule, reduces={**rule.reduces, x: kind}))
