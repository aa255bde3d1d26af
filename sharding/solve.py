"""Layouts for every value of a graph, from those of its inputs and outputs.

Axis by axis: which strategies are tied to what the user sharded (`intent`), what each costs given the axes before,
and the cheapest choice among them (`exact`, or `fallback` where HiGHS gives none).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from vescale_fn.sharding.candidates import Strategy
from vescale_fn.sharding.choice import AxisProblem, Choice
from vescale_fn.sharding.classes import classes_of, each_alone
from vescale_fn.sharding.digits import exists
from vescale_fn.sharding.exact import NoSolution, solve_exact
from vescale_fn.sharding.fallback import solve_locally
from vescale_fn.sharding.graph import Call, Eqn, Graph, Var, equations, is_view
from vescale_fn.sharding.intent import seeds, strategies_within
from vescale_fn.sharding.layout import CUTS, Layout, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.problem import Node, Problem, Regions, RuleFor, build
from vescale_fn.sharding.report import messages
from vescale_fn.sharding.work import heavy_seconds, is_heavy, light_seconds

ALONE = 400  # so many nodes with a choice are decided one by one; more of them, by class


def solve(
    graph: Graph,
    mesh: MeshShape,
    *,
    inputs: Mapping[Var, Layout],
    outputs: Sequence[Layout | None],
    roles: Mapping[Var, str],
    constraints: Mapping[Eqn, Layout],
    rule_for: RuleFor,
    continues: Mapping[int, Var],
    regions: Regions = Regions(),  # noqa: B008 - frozen
) -> Plan:
    """The cheapest plan within the user's intent. Deterministic.

    inputs: fixed layouts of inputs; the solver chooses for the others, whole unless something ties them.
    outputs: fixed layouts of outputs, None where the solver chooses.
    roles: "data" or "state" for each input: data has precedence.
    constraints: equations that only fix a layout, and it.
    rule_for: the rule of an equation; None: whole on every rank.
    continues: outputs that must have the layout of an input, where neither is fixed.
    regions: parts of the graph whose axes are not the solver's.
    """
    problem = build(graph, inputs, outputs, constraints, rule_for, continues, regions)
    solver = _Solver(problem, mesh, graph, roles, {v: float(v.nbytes) for v in problem.makers})
    for axis, n in zip(mesh.names, mesh.sizes):
        if n > 1:
            solver.solve_axis(axis, n)
    return solver.plan()


@dataclass(eq=False)
class _Solver:
    problem: Problem
    mesh: MeshShape
    graph: Graph
    roles: Mapping[Var, str]
    nbytes: dict[Var, float]  # of each value, as far as the axes solved leave it to a rank
    share: dict[Node, float] = field(default_factory=dict)  # of its work that the axes solved leave to a rank
    solved: dict[str, tuple[AxisProblem, Choice]] = field(default_factory=dict)

    def solve_axis(self, axis: str, n: int) -> None:
        strategies = strategies_within(self.problem, axis, n, seeds(self.problem, axis, self.roles), self.fits(axis))
        work = {node: self.work(node, strategies[node], n) for node in self.problem.nodes}
        problem = AxisProblem(self.problem, axis, n, strategies, work, dict(self.nbytes))
        choice = choose(problem)
        self.solved[axis] = problem, choice
        for node in self.problem.nodes:
            strategy = problem.chosen(choice, node)
            if strategy.letter:
                self.share[node] = self.share.get(node, 1.0) / n
            for v, s in zip(node.results, strategy.results):
                if isinstance(s, CUTS):
                    self.nbytes[v] /= n

    def fits(self, axis: str) -> Callable[[Node, Strategy], bool]:
        """Whether a strategy on the axis at hand goes with those chosen on the axes before: no digit is cut twice."""
        axes = (*self.solved, axis)

        @cache
        def possible(shape: tuple[int, ...], states: tuple[State, ...]) -> bool:
            return exists(Layout.of(self.mesh, shape, dict(zip(axes, states))))

        def check(node: Node, strategy: Strategy) -> bool:
            chosen = [problem.chosen(choice, node).states for problem, choice in self.solved.values()]
            by_slot = zip(*chosen, strategy.states)
            return all(possible(v.shape, states) for v, states in zip(node.values, by_slot))

        return check

    def work(self, node: Node, strategies: Sequence[Strategy], n: int) -> list[float]:
        """Seconds of each strategy of a node, all its runs together. Inputs, outputs and what a loop reads and stacks
        count as if they were copied: where nothing else decides, a rank holds less rather than more."""
        eqn, rule = node.eqn, node.rule
        if eqn is not None and (is_view(eqn) or isinstance(eqn.op, Call) or node.layout is not None):
            return [0.0] * len(strategies)
        if eqn is not None and rule is not None and is_heavy(eqn):
            share, nbytes = self.share.get(node, 1.0), sum(self.nbytes[v] for v in node.values)
            return [node.times * heavy_seconds(rule, nbytes, share, s, n) for s in strategies]
        return [node.times * light_seconds(node.values, self.nbytes, s, n) for s in strategies]

    # --- the answer -------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        operands: dict[Eqn, dict[int, Layout]] = {}
        values: dict[Var, Layout] = {}
        letters: dict[Eqn, dict[str, str]] = {}
        for node in self.problem.nodes:
            layouts = self.layouts(node)
            values.update(zip(node.results, layouts[len(node.operands) :]))
            if node.eqn is not None:
                operands.setdefault(node.eqn, {}).update(
                    (i, x) for i, x in zip(node.slots, layouts[: len(node.operands)]) if i >= 0
                )
                letters.setdefault(node.eqn, {}).update(self.letters(node))
        return Plan(
            self.mesh,
            self.graph,
            values,
            {e: self.delivered(e, operands.get(e, {}), values) for e in equations(self.graph)},
            tuple(None if node is None else self.layouts(node)[0] for node in self.problem.outputs),
            letters,
            messages(self.problem, self.solved),
            dict(self.roles),
            tuple(self.solved.values()),
        )

    @staticmethod
    def delivered(e: Eqn, slots: Mapping[int, Layout], values: Mapping[Var, Layout]) -> tuple[Layout, ...]:
        """The layout of each operand of an equation; one that is there for its effect takes them as they are."""
        return tuple(slots[i] if slots or e.outs else values[v] for i, v in enumerate(e.operands))

    def layouts(self, node: Node) -> list[Layout]:
        """By slot."""
        if node.layout is not None:
            return [node.layout] * len(node.values)
        chosen = {axis: problem.chosen(choice, node).states for axis, (problem, choice) in self.solved.items()}
        return [
            Layout.of(self.mesh, v.shape, {axis: states[i] for axis, states in chosen.items()})
            for i, v in enumerate(node.values)
        ]

    def letters(self, node: Node) -> dict[str, str]:
        if not node.is_operation:
            return {}
        found = ((axis, problem.chosen(choice, node).letter) for axis, (problem, choice) in self.solved.items())
        return {axis: letter for axis, letter in found if letter}


def choose(problem: AxisProblem) -> dict[Node, int]:
    """The strategy of each node on one axis."""
    many = sum(1 for _ in problem.free_nodes()) > ALONE
    try:
        return solve_exact(problem, classes_of(problem) if many else each_alone(problem))
    except NoSolution:
        return solve_locally(problem)
