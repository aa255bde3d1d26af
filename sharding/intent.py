"""Which strategies are worth choosing from: those tied to what the user sharded.

Left free, an exact solver shards whatever is cheapest in its model, and astonishes. So a sharded strategy exists only
if links of shared letters, followed in both directions, lead from a value that the user sharded to it. Where intents
meet (the batch and the parameters on one axis), the earlier group keeps the equations that it reached first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from vescale_fn.sharding.candidates import Strategy, partial_strategies, strategy_for, whole_strategy
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import CUTS, Kind, Partial, State
from vescale_fn.sharding.problem import Node, Problem

Seeds = Sequence[tuple[Var, State]]
Fits = Callable[[Node, Strategy], bool]
Strategies = dict[Node, list[Strategy]]


def seeds(problem: Problem, axis: str, roles: Mapping[Var, str]) -> tuple[Seeds, ...]:
    """What the user sharded on an axis, in order of precedence: data; state and outputs; constraints.

    roles: "data" or "state" for each input.
    """
    groups: tuple[list[tuple[Var, State]], ...] = ([], [], [])
    for node in problem.nodes:
        given = node.given(axis)
        found = [(v, s) for v, s in zip(node.values, given.states) if isinstance(s, CUTS)] if given else []
        if found:
            is_data = not node.operands and roles.get(node.results[0]) == "data"
            groups[2 if node.eqn else 0 if is_data else 1].extend(found)
    return groups


def strategies_within(
    problem: Problem, axis: str, n: int, groups: Iterable[Seeds], fits: Fits
) -> dict[Node, list[Strategy]]:
    """The strategies of each node on one axis of size `n`, the whole one first.

    groups: what the user sharded (`seeds`), in order of precedence.
    fits: whether a strategy agrees with what was chosen for the same node on other axes.
    """
    found = {node: _given(node, axis) for node in problem.nodes}
    owner: dict[Node, int] = {}
    seen: set[tuple[Var, State]] = set()
    for group, given in enumerate(groups):
        queue = list(given)
        for v, state in queue:
            if (v, state) in seen:
                continue
            seen.add((v, state))
            for node, slot in problem.touching(v):
                if node.rule is None or node.given(axis) or owner.get(node, group) != group:
                    continue
                strategy = strategy_for(node.rule, slot, state, n)
                if strategy is None or strategy in found[node] or not fits(node, strategy):
                    continue
                owner[node] = group
                found[node].append(strategy)
                queue += [(w, s) for w, s in zip(node.values, strategy.states) if isinstance(s, CUTS)]
    _add_partial(problem, axis, found, fits)
    return found


def _given(node: Node, axis: str) -> list[Strategy]:
    return [node.given(axis) or whole_strategy(len(node.operands), len(node.results))]


# --- partial values -----------------------------------------------------------------------------------------------


def _add_partial(problem: Problem, axis: str, found: Strategies, fits: Fits) -> None:
    """Add the strategies that pass partial values on, as far as partial values can get."""
    linear = [x for x in problem.nodes if x.rule and not x.given(axis) and (x.rule.linear or x.rule.through)]
    pending = _made_partial(found)
    if not pending:
        return
    zeros = _spread(linear, pending)
    wanted = _wanted(problem, linear, pending, zeros)
    for v in wanted:
        pending.setdefault(v, set()).add("sum")
    for node in linear:
        assert node.rule is not None
        for strategy in partial_strategies(node.rule, [pending.get(v, set()) for v in node.operands]):
            useful = _has_partial(strategy.operands) or not wanted.isdisjoint(node.results)
            if useful and fits(node, strategy):
                found[node].append(strategy)


def _has_partial(states: Iterable[State]) -> bool:
    return any(isinstance(s, Partial) for s in states)


def _made_partial(found: Strategies) -> dict[Var, set[Kind]]:
    """The kinds in which sharded work, or the user, leaves values partial."""
    out: dict[Var, set[Kind]] = {}
    for node, strategies in found.items():
        for strategy in strategies:
            for v, s in zip(node.results, strategy.results):
                if isinstance(s, Partial):
                    out.setdefault(v, set()).add(s.kind)
    return out


def _spread(linear: Sequence[Node], pending: dict[Var, set[Kind]]) -> set[Var]:
    """Extend `pending` to all values that can be partial. Returns those that can be so for free, being zeros; what a
    loop that starts with zeros carries counts as zeros until something partial is added to it."""
    zeros: set[Var] = set()
    size = -1
    while size != (size := len(zeros) + sum(map(len, pending.values()))):
        for node in linear:
            assert node.rule is not None
            groups = [*node.rule.linear, *({i} for i in node.rule.through)]
            kinds = {k for i in node.rule.through for k in pending.get(node.operands[i], ())}
            for group in groups:
                summed = ["sum" in pending.get(node.operands[i], ()) for i in group]
                free = [node.operands[i] in zeros or (node.is_carry and i == 1) for i in group]
                if all(a or b for a, b in zip(summed, free)):
                    kinds |= {"sum"} if any(summed) else set()
                    zeros.update(node.results if not any(summed) else ())
            if kinds:
                for v in node.results:
                    pending.setdefault(v, set()).update(kinds)
    return zeros


def _wanted(
    problem: Problem, linear: Iterable[Node], pending: Mapping[Var, set[Kind]], zeros: AbstractSet[Var]
) -> set[Var]:
    """The zeros that something partial is added to, and all that they are made from."""

    def just_zero(v: Var) -> bool:
        return v in zeros and "sum" not in pending.get(v, ())

    def summands(node: Node) -> Iterator[list[Var]]:
        assert node.rule is not None
        for group in (*node.rule.linear, *({i} for i in node.rule.through)):
            yield [node.operands[i] for i in sorted(group)]

    queue = [
        v
        for node in linear
        for group in summands(node)
        if any("sum" in pending.get(v, ()) for v in group)
        and all("sum" in pending.get(v, ()) or v in zeros for v in group)
        for v in group
        if just_zero(v)
    ]
    out: set[Var] = set()
    for v in queue:
        if v not in out:
            out.add(v)
            maker = problem.makers[v][0]
            queue += [w for group in summands(maker) if all(map(just_zero, group)) for w in group] if maker.rule else []
    return out
