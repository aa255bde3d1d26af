"""The ways to run one equation on one mesh axis, found by pushing a state through the equation's rule.

A strategy is a state for every operand and result. There are three sorts: everything whole; one letter of the rule
sharded, or a run of letters cut in units (the states of all that have the letter, or the run, follow from one of them);
and a partial value passed on by an operation that is linear in it. Slots count operands first, then results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod

from vescale_fn.sharding.layout import WHOLE, Kind, Partial, Ragged, Shard, State
from vescale_fn.sharding.ragged import chunked, reduced
from vescale_fn.sharding.rules.rule import Dims, Rule
from vescale_fn.sharding.runs import may_merge, run_of, state_of_run


@dataclass(frozen=True)
class Strategy:
    """States of all operands and results on one axis. `letter`: the letter of the rule that the axis shards, the first
    one of a run that it cuts in units, "" if none."""

    operands: tuple[State, ...]
    results: tuple[State, ...]
    letter: str = ""

    @property
    def states(self) -> tuple[State, ...]:
        """By slot."""
        return (*self.operands, *self.results)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"


def whole_strategy(operands: int, results: int) -> Strategy:
    """Every rank does all of the work."""
    return Strategy((WHOLE,) * operands, (WHOLE,) * results)


def strategy_for(rule: Rule, slot: int, state: State, n: int) -> Strategy | None:
    """The strategy on an axis of size `n` in which the tensor at `slot` has `state`; None if the rule admits none.

    >>> from vescale_fn.sharding.rules.registry import parse_rule
    >>> mm = parse_rule("m k, k n -> m n", ([(8, 6), (6, 4)], [(8, 4)]))
    >>> print(strategy_for(mm, 0, Shard(0), 2))
    shard 0, whole -> shard 0
    >>> print(strategy_for(mm, 1, Shard(0), 2))
    shard 1, shard 0 -> partial sum
    >>> view = parse_rule("(b t) d -> b t d", ([(12, 5)], [(3, 4, 5)]))
    >>> print(strategy_for(view, 1, Shard(1), 2))
    shard 0 pre 3 -> shard 1
    >>> pairs = parse_rule("(b !t) d -> b d", ([(10, 5)], [(5, 5)]))
    >>> print(strategy_for(pairs, 0, Shard(0, uneven=10), 4))  # 3, 3, 3 and 1 of 10 rows
    None
    >>> print(strategy_for(pairs, 0, Shard(0, uneven=10), 3))  # 4, 4 and 2
    shard 0~ -> shard 0~
    """
    if isinstance(state, Ragged):
        return _in_units(rule, slot, state, state.units)
    if not isinstance(state, Shard):
        return None
    dims = (*rule.operands, *rule.results)[slot]
    letter, inner = _cut_letter(rule, dims, state, n)
    if (
        not letter and state.uneven and state.pre == 1 and dims[state.dim]
    ):  # perhaps it cuts between digits all the same
        return _in_units(rule, slot, state, reduced(chunked(state.uneven, n)))
    if not letter or letter in rule.whole:
        return None
    operands = [_placed(rule, dims, letter, inner, state.uneven) for dims in rule.operands]
    results = [_placed(rule, dims, letter, inner, state.uneven) for dims in rule.results]
    return _with_pending(operands, results, letter, rule.reduces.get(letter, "sum"))


def _with_pending(
    operands: Sequence[State | None], results: Sequence[State | None], letter: str, kind: Kind
) -> Strategy | None:
    """The strategy with these states (None: the cut cannot be said), where a result that has nothing of what is cut is
    pending."""
    if None in operands or None in results:
        return None
    reduced = any(s != WHOLE for s in operands)  # a letter that no operand has is made by the operation, not reduced
    if not reduced and WHOLE in results:
        return None
    return Strategy(
        tuple(s for s in operands if s is not None),
        tuple(Partial(kind) if s == WHOLE else s for s in results if s is not None),
        letter,
    )


def _in_units(rule: Rule, slot: int, state: Shard | Ragged, units: tuple[int, ...]) -> Strategy | None:
    """The strategy in which the tensor at `slot` is cut in units, which is what `state` does: everything that has the
    same letters in one run is.

    >>> from vescale_fn.sharding.rules.registry import parse_rule
    >>> mm = parse_rule("m k, k n -> m n", ([(8, 6), (6, 4)], [(8, 4)]))
    >>> print(strategy_for(mm, 0, Ragged(0, (1, 3)), 2))
    ragged 0 [1, 3], whole -> ragged 0 [1, 3]
    """
    tensors = (*rule.operands, *rule.results)
    run = run_of(rule, tensors[slot], state if isinstance(state, Ragged) else Ragged(state.dim, units))
    if run is None or not rule.whole.isdisjoint(run):
        return None
    states = [state if dims == tensors[slot] else state_of_run(rule, dims, run, units) for dims in tensors]
    kinds, n = {rule.reduces.get(letter, "sum") for letter in run} or {"sum"}, len(rule.operands)
    if not may_merge(rule, states) or len(kinds) > 1 or (not run and WHOLE in states[n:]):
        return None
    return _with_pending(states[:n], states[n:], run[0] if run else "", kinds.pop())


def _cut_letter(rule: Rule, dims: Dims, state: Shard, n: int) -> tuple[str, int]:
    """The letter that `state` cuts, and how many digits of it are major to the cut; ("", 0) if it cuts none."""
    letters = dims[state.dim] if state.dim < len(dims) else ()
    if state.uneven:
        leads = bool(letters) and rule.sizes[letters[0]] % state.uneven == 0
        return (letters[0], state.pre) if leads else ("", 0)
    major = 1
    for letter in letters:
        size = rule.sizes[letter]
        inner, off = divmod(state.pre, major)
        if off == 0 and inner < size and size % (inner * n) == 0:
            return letter, inner
        major *= size
    return "", 0


def _placed(rule: Rule, dims: Dims, letter: str, inner: int, uneven: int) -> State | None:
    """The state of a tensor whose `letter` is cut; None where the cut cannot be said."""
    found = [(d, letters.index(letter)) for d, letters in enumerate(dims) if letter in letters]
    if not found:
        return WHOLE
    if len(found) > 1 or (uneven and found[0][1] > 0):
        return None
    dim, at = found[0]
    return Shard(dim, prod(rule.sizes[x] for x in dims[dim][:at]) * inner, uneven)


def partial_strategies(rule: Rule, pending: Sequence[AbstractSet[Kind]]) -> Iterator[Strategy]:
    """The strategies in which partial operands make partial results. pending: kinds in which each operand may be
    partial.

    >>> from vescale_fn.sharding.rules.registry import parse_rule
    >>> add = parse_rule("a, a -> a", ([(8,), (8,)], [(8,)]), linear=[{0, 1}])
    >>> [str(s) for s in partial_strategies(add, [{"sum"}, {"sum"}])]
    ['partial sum, partial sum -> partial sum']
    >>> list(partial_strategies(add, [{"sum"}, set()]))
    []
    """
    for group in rule.linear:
        if all("sum" in pending[i] for i in group):
            yield _partial(rule, group, "sum")
    for slot in sorted(rule.through):
        for kind in sorted(pending[slot]):
            if kind != "sum" or frozenset({slot}) not in rule.linear:
                yield _partial(rule, {slot}, kind)


def _partial(rule: Rule, group: AbstractSet[int], kind: Kind) -> Strategy:
    state = Partial(kind)
    operands = tuple(state if i in group else WHOLE for i in range(len(rule.operands)))
    return Strategy(operands, (state,) * len(rule.results))
