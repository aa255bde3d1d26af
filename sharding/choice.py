"""Choosing one strategy for each node on one axis, and what a choice costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from vescale_fn.sharding.candidates import Strategy
from vescale_fn.sharding.cost import conversion_cost
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import CUTS, WHOLE, Partial, State
from vescale_fn.sharding.problem import Node, Problem
from vescale_fn.sharding.work import LATENCY, NETWORK

Choice = Mapping[Node, int]  # index into the node's strategies


@dataclass(eq=False)
class AxisProblem:
    """strategies: of each node. work: seconds that each takes, all its runs together. nbytes: of each value, as far
    as axes solved before leave it to a rank."""

    problem: Problem
    axis: str
    n: int
    strategies: Mapping[Node, list[Strategy]]
    work: Mapping[Node, list[float]]
    nbytes: Mapping[Var, float]

    def seconds(self, v: Var, src: State, dst: State) -> float:
        """Of one conversion of a value, all its runs together. The latency counts once: it keeps the program short."""
        to = WHOLE if isinstance(dst, Partial) and not isinstance(src, Partial) else dst  # then one rank keeps it
        if src == dst or (src == WHOLE and not isinstance(dst, Partial)):
            return 0.0
        return conversion_cost(src, to, self.nbytes[v], self.n) / NETWORK * self.problem.times[v] + LATENCY

    def can_convert(self, v: Var, src: State, dst: State) -> bool:
        """Whether a value may be brought from one state into another."""
        if isinstance(dst, Partial) and src != dst:
            users = ((u.given(self.axis), i) for u, i in self.problem.users.get(v, ()))
            asked = any(given is not None and given.operands[i] == dst for given, i in users)
            return asked and not isinstance(src, Partial)
        return True

    def chosen(self, choice: Choice, node: Node) -> Strategy:
        return self.strategies[node][choice[node]]

    def made(self, choice: Choice, v: Var) -> State:
        """The state in which a value is made."""
        node, slot = self.problem.makers[v]
        return self.chosen(choice, node).states[slot]

    def wanted(self, choice: Choice, v: Var) -> set[State]:
        """The states in which a value is used."""
        return {self.chosen(choice, u).operands[i] for u, i in self.problem.users.get(v, ())}

    def conversions(self, choice: Choice, v: Var) -> list[tuple[State, State]]:
        """The cheapest conversions that bring a value into every state in which it is used. What is whole is cut to
        any shard for free."""
        src, wanted = self.made(choice, v), self.wanted(choice, v)
        direct = [(src, t) for t in sorted(wanted, key=repr) if t != src and not self._is_cut(src, t, wanted)]
        through: list[tuple[State, State]] = [
            (src, WHOLE),
            *((src, t) for _, t in direct if not isinstance(t, CUTS) and t != WHOLE),
        ]
        if src == WHOLE or WHOLE in wanted:
            return direct
        return min(direct, through, key=lambda pairs: self._sum(v, pairs))

    def _is_cut(self, src: State, t: State, wanted: set[State]) -> bool:
        return isinstance(t, CUTS) and (src == WHOLE or WHOLE in wanted)

    def _sum(self, v: Var, pairs: Iterable[tuple[State, State]]) -> float:
        return sum(self.seconds(v, s, t) if self.can_convert(v, s, t) else inf for s, t in pairs)

    def value_cost(self, choice: Choice, v: Var) -> float:
        """Seconds spent on converting one value."""
        return self._sum(v, self.conversions(choice, v))

    def cost(self, choice: Choice) -> float:
        """Seconds of a choice: work and conversions. Infinite if a value cannot be had as it is wanted."""
        work = sum(self.work[node][k] for node, k in choice.items())
        return work + sum(self.value_cost(choice, v) for v in self.problem.makers)

    def free_nodes(self) -> Iterator[Node]:
        """Nodes with more than one strategy."""
        return (node for node in self.problem.nodes if len(self.strategies[node]) > 1)
