"""Runs of letters that an axis cuts in units: what `Ragged` states say in the words of a rule.

A tensor that is cut in units has whole rows of it on each rank, or, where dims are merged, a piece of their elements.
What is cut is a run of letters: of a dim the leading ones, as few as the units divide, of merged dims all.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from vescale_fn.sharding.layout import CUTS, WHOLE, Ragged, Shard, State
from vescale_fn.sharding.ragged import state_of_units
from vescale_fn.sharding.rules.rule import Dims, Rule

Run = tuple[str, ...]


def run_of(rule: Rule, dims: Dims, state: Ragged) -> Run | None:
    """The letters that `state` cuts of a tensor of these dims, all of them where it merges dims; none if those have
    size one (which an owner may hold), None if its units do not divide them.

    >>> from vescale_fn.sharding.rules.registry import parse_rule
    >>> rule = parse_rule("(b t) d -> b t d", ([(12, 5)], [(3, 4, 5)]))
    >>> [run_of(rule, rule.operands[0], Ragged(0, units)) for units in ((1, 2), (1, 5), (1, 6))]
    [('b',), ('b', 't'), None]
    """
    letters = [x for d in dims[state.dim : max(state.dim, state.last) + 1] for x in d]
    total, least = sum(state.units), len(letters) if state.last > state.dim else min(len(letters), 1)
    for n in range(least, len(letters) + 1):
        if prod(rule.sizes[x] for x in letters[:n]) % total == 0:
            return tuple(letters[:n])
    return None


def state_of_run(rule: Rule, dims: Dims, run: Run, units: tuple[int, ...]) -> State | None:
    """The state of a tensor of these dims when `run` is cut in units: WHOLE if it has none of the letters, None where
    the cut cannot be said (the letters lie apart, or behind others).

    >>> from vescale_fn.sharding.rules.registry import parse_rule
    >>> rule = parse_rule("(b t) d -> b t d", ([(12, 5)], [(3, 4, 5)]))
    >>> state_of_run(rule, rule.results[0], ("b", "t"), (1, 5))
    Ragged(dim=0, units=(1, 5), last=1)
    """
    if not any(x in run for d in dims for x in d):
        return WHOLE
    places = [(dim, at, x) for dim, d in enumerate(dims) for at, x in enumerate(d)]
    names = [x for _, _, x in places]
    start = names.index(run[0]) if run[0] in names else 0
    (first, at, _), stop = places[start], start + len(run)
    if at or tuple(names[start:stop]) != run or any(x in run for x in (*names[:start], *names[stop:])):
        return None
    last = places[stop - 1][0]
    size = prod(rule.sizes[x] for d in dims[first : last + 1] for x in d)
    return state_of_units(first, units, size, last if last > first else -1)


def may_merge(rule: Rule, states: Sequence[State | None]) -> bool:
    """Whether the operation may run on local tensors of which these states, by slot, merge dims. Each operand then has
    the merged dims, in one dim, or only dims that come after them."""
    if not any(_merges(s) for s in states) or rule.merges == "freely":
        return True
    cut = [(d, s) for d, s in zip((*rule.operands, *rule.results), states) if isinstance(s, CUTS)]
    alike = len({(_merges(s), d[s.dim : _last(s) + 1]) for d, s in cut}) == 1
    after = {len(d) - 1 - _last(s) for d, s in zip(rule.operands, states) if isinstance(s, CUTS)}
    others = [len(d) for d, s in zip(rule.operands, states) if s == WHOLE and not rule.apart]
    return rule.merges == "alike" and alike and len(after) < 2 and max(others, default=0) <= min(after, default=0)


def _merges(state: State | None) -> bool:
    return isinstance(state, Ragged) and state.last > state.dim


def _last(state: Shard | Ragged) -> int:
    return max(state.dim, state.last) if isinstance(state, Ragged) else state.dim
