"""The best choice on one axis, as a 0/1 program for HiGHS.

x[c, k]: the nodes of class c run by strategy k, exactly one k each. p[g, s]: values of group g are made in state s, a
sum of x. e[g, s, t]: they are converted from s to t, at most p[g, s]. A user that wants state t needs p[g, t], or a
conversion to t, or, if t is a shard, the whole value, which it cuts for free. So a conversion is paid once, however
many use it. Minimise work and conversions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from vescale_fn.sharding.choice import AxisProblem
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import CUTS, WHOLE, State
from vescale_fn.sharding.problem import Node
from vescale_fn.sharding.work import LATENCY

NODE_LIMIT = 500  # of the search tree, then the best choice so far is taken; a clock would decide differently each time
TIE = 1e-3  # in units of LATENCY: between equals take the latest conversion, the first strategy

Terms = dict[int, float]  # variable -> coefficient


class NoSolution(RuntimeError):
    """HiGHS found no choice within its limit."""


def solve_exact(axis: AxisProblem, classes: Mapping[Node, int]) -> dict[Node, int]:
    """The strategy of each node, in the cheapest choice that treats nodes of one class alike (the best one found, in
    the rare problem whose search tree is larger than NODE_LIMIT). Raises NoSolution."""
    model = _Model(axis, classes)
    x = model.solve()
    return {node: model.strategy(x, classes[node]) for node in axis.problem.nodes}


def _serves(have: State | None, want: State) -> bool:
    """Whether a value at hand in one state can be used in another for free."""
    return have is not None and (have == want or (have == WHOLE and isinstance(want, CUTS)))


@dataclass(frozen=True)
class _When:
    """A condition: one of these variables is 1; or it always holds."""

    terms: tuple[int, ...] = ()
    always: bool = False


@dataclass(eq=False)
class _Model:
    axis: AxisProblem
    classes: Mapping[Node, int]
    costs: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    rows: list[tuple[Terms, float, float]] = field(default_factory=list)  # terms, lower, upper
    members: dict[int, list[Node]] = field(default_factory=dict)
    x: dict[int, list[int]] = field(default_factory=dict)  # class -> variable of each strategy; none if only one

    def __post_init__(self) -> None:
        for node in self.axis.problem.nodes:
            self.members.setdefault(self.classes[node], []).append(node)
        for c, nodes in self.members.items():
            self._add_class(c, nodes)
        groups: dict[tuple[int, int, frozenset[tuple[int, int]]], list[Var]] = {}
        for v, (maker, slot) in self.axis.problem.makers.items():
            users = frozenset((self.classes[u], i) for u, i in self.axis.problem.users.get(v, ()))
            groups.setdefault((self.classes[maker], slot, users), []).append(v)
        for i, ((c, slot, users), values) in enumerate(groups.items()):
            self._add_group(values, self._states(c, slot), users, TIE * (1 - i / len(groups)))

    def variable(self, cost: float, integral: bool) -> int:
        self.costs.append(cost)
        self.integral.append(integral)
        return len(self.costs) - 1

    def _add_class(self, c: int, nodes: list[Node]) -> None:
        work = self.axis.work[nodes[0]]
        if len(work) == 1:
            return
        least = min(work)
        units = [(w - least) * len(nodes) / LATENCY + TIE * k / len(work) for k, w in enumerate(work)]
        self.x[c] = [self.variable(u, True) for u in units]
        self.rows.append((dict.fromkeys(self.x[c], 1.0), 1.0, 1.0))

    def _states(self, c: int, slot: int) -> dict[State, _When]:
        """When a slot of the nodes of class c is in which state."""
        strategies = self.axis.strategies[self.members[c][0]]
        if c not in self.x:
            return {strategies[0].states[slot]: _When(always=True)}
        out: dict[State, tuple[int, ...]] = {}
        for x, strategy in zip(self.x[c], strategies):
            out[strategy.states[slot]] = (*out.get(strategy.states[slot], ()), x)
        return {s: _When(xs) if len(out) > 1 else _When(always=True) for s, xs in out.items()}

    def _add_group(
        self, values: list[Var], made: Mapping[State, _When], users: frozenset[tuple[int, int]], tie: float
    ) -> None:
        """Conversions of values that are made and used alike."""
        needs = [(t, need) for c, slot in sorted(users) for t, need in self._states(c, slot).items()]
        always = next((s for s, when in made.items() if when.always), None)
        open_needs = [(t, need) for t, need in needs if not _serves(always, t)]
        if not open_needs:
            return
        wanted = dict.fromkeys(t for t, _ in open_needs)
        if any(isinstance(t, CUTS) for t in wanted):
            wanted.setdefault(WHOLE)
        conversions: dict[tuple[State, State], int] = {}
        obtained = {t: self._obtained(values, made, t, tie, conversions) for t in wanted}
        for t, need in open_needs:
            have = obtained[t] if not isinstance(t, CUTS) else {*obtained[t], *obtained[WHOLE]}
            terms = dict.fromkeys(have, -1.0)
            for x in need.terms:  # a loop's carry is both maker and user
                terms[x] = terms.get(x, 0.0) + 1.0
            self.rows.append((terms, -np.inf, -float(need.always)))
        for c, slot in users:
            self._add_departures(made, self._states(c, slot), conversions)

    def _add_departures(
        self, made: Mapping[State, _When], needs: Mapping[State, _When], conversions: Mapping[tuple[State, State], int]
    ) -> None:
        """A value made in a state other than that in which a user takes it is converted to something. No choice of
        whole numbers breaks this; choices in halves do, and bounds without it are far too low."""
        for s, when in made.items():
            if s == WHOLE and any(isinstance(t, CUTS) for t in needs):
                continue
            need = needs.get(s, _When())
            if need.always:
                continue
            terms = dict.fromkeys(when.terms, 1.0)
            for x in need.terms:
                terms[x] = terms.get(x, 0.0) - 1.0
            terms |= {e: -1.0 for (a, _), e in conversions.items() if a == s}
            self.rows.append((terms, -np.inf, -float(when.always)))

    def _obtained(
        self,
        values: list[Var],
        made: Mapping[State, _When],
        t: State,
        tie: float,
        conversions: dict[tuple[State, State], int],
    ) -> list[int]:
        """Variables whose sum says that the values are at hand in state t: made so, or converted."""
        out = list(made[t].terms) if t in made else []
        v = values[0]
        for s, when in made.items():
            if s == t or (s == WHOLE and isinstance(t, CUTS)) or not self.axis.can_convert(v, s, t):
                continue
            e = self.variable(self.axis.seconds(v, s, t) * len(values) / LATENCY + tie, False)
            conversions[s, t] = e
            if when.terms:
                self.rows.append(({e: 1.0, **dict.fromkeys(when.terms, -1.0)}, -np.inf, 0.0))
            out.append(e)
        return out

    def solve(self) -> np.ndarray:
        """Values of the variables."""
        n = len(self.costs)
        if not n:
            return np.zeros(0)
        entries = [(i, j, a) for i, (terms, _, _) in enumerate(self.rows) for j, a in terms.items()]
        i, j, a = zip(*entries)
        matrix = coo_array((a, (i, j)), shape=(len(self.rows), n)).tocsr()
        result = milp(
            np.array(self.costs),
            integrality=np.array(self.integral, dtype=int),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, [r[1] for r in self.rows], [r[2] for r in self.rows]),
            options={"mip_rel_gap": 0.0, "node_limit": NODE_LIMIT},
        )
        if result.x is None:
            raise NoSolution(result.message)
        return np.asarray(result.x)

    def strategy(self, x: np.ndarray, c: int) -> int:
        """The strategy that a solution gives to class c."""
        return int(np.argmax(x[self.x[c]])) if c in self.x else 0
