"""What the solver decides over: a graph, with its sub-programs and boundary, as nodes that share values.

A node is an equation, or a place where states must agree: an input, an output, a constraint, the entry and exit of a
sub-program, a loop's carry. Each node runs on a mesh axis by one of its strategies; each value is made by one node and
used by others, and is converted wherever a user wants it in another state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from vescale_fn.sharding.candidates import Strategy
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var
from vescale_fn.sharding.layout import MANUAL, WHOLE, Layout, State
from vescale_fn.sharding.rules.rule import Dims, Rule

RuleFor = Callable[[Eqn], Rule | None]


@dataclass(frozen=True, eq=False)
class Regions:
    """Where every rank computes what it wants (the bodies of `shard_map`). The solver leaves the axes of a region alone
    and decides for the others.

    manual: axes along which a value belongs to each rank. boundary: what an equation at the edge of a region asks for
    on its axes. outside: the states in which an input of a loop's body enters, and leaves, what is manual inside.
    """

    manual: Mapping[Var, frozenset[str]] = field(default_factory=dict)
    boundary: Mapping[Eqn, Mapping[str, Strategy]] = field(default_factory=dict)
    outside: Mapping[Var, Mapping[str, State]] = field(default_factory=dict)

    def fixed(self, node: Node) -> dict[str, Strategy]:
        """By axis, the only way in which a node may run."""
        boundary = self.boundary.get(node.eqn, {}) if node.eqn else {}
        inside = {a for v in node.values for a in self.manual.get(v, ())}
        return {**{a: self._inside(node, a) for a in sorted(inside)}, **boundary}

    def _inside(self, node: Node, axis: str) -> Strategy:
        enters = next((self.outside[v] for v in node.results if v in self.outside), {})
        other = enters.get(axis, WHOLE)
        states = [MANUAL if axis in self.manual.get(v, ()) else other for v in node.values]
        return Strategy(tuple(states[: len(node.operands)]), tuple(states[len(node.operands) :]))


@dataclass(frozen=True, eq=False)
class Node:
    """operands, results: the tensors whose states a strategy fixes, in the order of its slots.

    rule: where strategies come from; None: everything whole.
    layout: the one layout that operands and results have, if the user fixed it.
    eqn, slots: the equation this is (part of), and the place of each operand among its operands (-1: none).
    times: how often it runs.
    fixed: on some axes, the only strategy.
    """

    operands: tuple[Var, ...]
    results: tuple[Var, ...]
    rule: Rule | None = None
    layout: Layout | None = None
    eqn: Eqn | None = None
    slots: tuple[int, ...] = ()
    times: int = 1
    fixed: Mapping[str, Strategy] = field(default_factory=dict)

    @property
    def values(self) -> tuple[Var, ...]:
        """By slot: operands, then results."""
        return (*self.operands, *self.results)

    @property
    def is_carry(self) -> bool:
        """Whether it ties the start, body and end of what a loop carries: (start, body out) -> (body in, end)."""
        return self.eqn is not None and isinstance(self.eqn.op, Scan) and len(self.operands) == 2

    def given(self, axis: str) -> Strategy | None:
        """The only way in which it may run on an axis, if there is but one."""
        if self.layout is None:
            return self.fixed.get(axis)
        state = self.layout[axis]
        return Strategy((state,) * len(self.operands), (state,) * len(self.results))

    @property
    def is_operation(self) -> bool:
        """Whether it computes anything (and is not merely a place where states agree)."""
        return self.eqn is not None and self.layout is None and not isinstance(self.eqn.op, (Scan, Call))


@dataclass(eq=False)
class Problem:
    """makers, users: node and slot that make and use each value. times: how often the value is made.
    outputs: the node of each output of the graph (None for what is no tensor)."""

    nodes: list[Node] = field(default_factory=list)
    makers: dict[Var, tuple[Node, int]] = field(default_factory=dict)
    users: dict[Var, list[tuple[Node, int]]] = field(default_factory=dict)
    times: dict[Var, int] = field(default_factory=dict)
    outputs: list[Node | None] = field(default_factory=list)
    regions: Regions = field(default_factory=Regions)

    def add(self, node: Node) -> Node:
        fixed = self.regions.fixed(node)
        node = replace(node, fixed=fixed) if fixed else node
        self.nodes.append(node)
        for i, v in enumerate(node.operands):
            self.users.setdefault(v, []).append((node, i))
        for i, v in enumerate(node.results, len(node.operands)):
            self.makers[v] = (node, i)
            self.times.setdefault(v, node.times)
        return node

    def touching(self, v: Var) -> Iterator[tuple[Node, int]]:
        """Maker, then users of a value."""
        if v in self.makers:
            yield self.makers[v]
        yield from self.users.get(v, ())


def build(
    graph: Graph,
    inputs: Mapping[Var, Layout],
    outputs: Sequence[Layout | None],
    constraints: Mapping[Eqn, Layout],
    rule_for: RuleFor,
    continues: Mapping[int, Var],
    regions: Regions = Regions(),
) -> Problem:
    """The problem of a graph; arguments as for `solve`."""
    problem = Problem(regions=regions)
    free = [o for o in sorted(continues, reverse=True) if outputs[o] is None and continues[o] not in inputs]
    tied = {continues[o]: o for o in free}  # inputs whose layout is that of an output, the first one
    for v in graph.inputs:
        if v.is_tensor and v not in tied:
            problem.add(Node((), (v,), _creation(v), layout=inputs.get(v)))
    _add_equations(problem, graph, constraints, rule_for, 1)
    for o, (v, layout) in enumerate(zip(graph.outputs, outputs, strict=True)):
        if not _is_tensor(v):
            problem.outputs.append(None)
            continue
        start = continues.get(o)
        results = (start,) if start is not None and tied.get(start) == o else ()
        if layout is None and start is not None:
            layout = inputs.get(start)
        problem.outputs.append(problem.add(Node((v,), results, _output_rule(v, len(results)), layout)))
    return problem


def _add_equations(
    problem: Problem, graph: Graph, constraints: Mapping[Eqn, Layout], rule_for: RuleFor, times: int
) -> None:
    for e in graph.eqns:
        outs = tuple(v for v in e.outs if v.is_tensor)
        if isinstance(e.op, (Scan, Call)):
            _add_sub_program(problem, e, constraints, rule_for, times)
        elif e in constraints:
            problem.add(Node(e.operands, outs, None, constraints[e], e, (0,), times))
        elif e.outs and (e.operands or outs):  # what is there for its effect takes values where they are
            for node in _parts(e, outs, _rule_of_tensors(e, rule_for), times):
                problem.add(node)


def _rule_of_tensors(e: Eqn, rule_for: RuleFor) -> Rule | None:
    """The rule of an equation, without the results that are no tensors (gradients that nobody asked for)."""
    rule = rule_for(e) if any(v.is_tensor for v in e.outs) else None
    if rule is None or all(v.is_tensor for v in e.outs):
        return rule
    return replace(rule, results=tuple(r for r, v in zip(rule.results, e.outs) if v.is_tensor))


def _parts(e: Eqn, outs: tuple[Var, ...], rule: Rule | None, times: int) -> Iterator[Node]:
    """The nodes of an equation: one, or one for each part of it that shares no letter with the others (a list
    operation updates each parameter by itself)."""
    everything = tuple(range(len(e.operands)))
    groups = [] if rule is None or rule.linear or rule.through else _connected(rule)
    if rule is None or len(groups) < 2 or any(_only_read(rule, g) for g in groups):
        yield Node(e.operands, outs, rule, None, e, everything, times)
        return
    for slots in groups:
        ins = tuple(s for s in slots if s < len(everything))
        results = tuple(s - len(everything) for s in slots if s >= len(everything))
        yield Node(
            tuple(e.operands[i] for i in ins),
            tuple(outs[i] for i in results),
            _sub_rule(rule, ins, results),
            None,
            e,
            ins,
            times,
        )


def _connected(rule: Rule) -> list[list[int]]:
    """Slots grouped by shared letters, in order of their first; slots without letters stay with the first group, or
    are a group where the rule keeps results apart."""
    loose: list[int] = []
    groups: list[tuple[set[str], list[int]]] = []
    for slot, dims in enumerate((*rule.operands, *rule.results)):
        letters = {x for d in dims for x in d}
        if not letters:
            loose.append(slot)
            continue
        met = [g for g in groups if g[0] & letters]
        groups = [g for g in groups if not g[0] & letters]
        groups.append((letters.union(*(g[0] for g in met)), [*(s for g in met for s in g[1]), slot]))
    slots = sorted(sorted(g[1]) for g in groups) or [[]]
    if rule.apart and groups and loose:
        return [loose, *slots]
    return [sorted([*loose, *slots[0]]), *slots[1:]]


def _only_read(rule: Rule, slots: Sequence[int]) -> bool:
    """Whether these are operands that may be cut and share no letter with a result: all results are then pending."""
    letters = {x for s in slots if s < len(rule.operands) for d in rule.operands[s] for x in d}
    return max(slots, default=0) < len(rule.operands) and not letters <= rule.whole


def _sub_rule(rule: Rule, operands: Sequence[int], results: Sequence[int]) -> Rule:
    return Rule(
        tuple(rule.operands[i] for i in operands),
        tuple(rule.results[i] for i in results),
        rule.sizes,
        rule.whole,
        reduces=rule.reduces,
        masked=rule.masked,
        merges=rule.merges,
    )


# --- sub-programs -------------------------------------------------------------------------------------------------


def _add_sub_program(
    problem: Problem, e: Eqn, constraints: Mapping[Eqn, Layout], rule_for: RuleFor, times: int
) -> None:
    """Operands enter the body, its equations run, its outputs leave. In a loop, what is iterated over loses dim 0 on
    the way in and gains it on the way out, and a carry has one state: at the start, in the body, and after it."""
    op, body = e.op, e.op.body
    loop = isinstance(op, Scan)
    consts, carries = (op.num_consts, op.num_carry) if isinstance(op, Scan) else (0, 0)
    inner = times * op.length if isinstance(op, Scan) else times
    slots = count()
    entries = [(a, v, next(slots)) if _is_tensor(a) else None for a, v in zip(e.args, body.inputs, strict=True)]
    for i, entry in enumerate(entries):
        if entry is not None:
            a, v, slot = entry
            problem.times[v] = inner
            if not consts <= i < consts + carries:
                iterated = loop and i >= consts + carries
                problem.add(Node((a,), (v,), _copy(v, drop=iterated), None, e, (slot,), times))
    _add_equations(problem, body, constraints, rule_for, inner)
    for j, (inside, outside) in enumerate(zip(body.outputs, e.outs, strict=True)):
        start = entries[consts + j] if j < carries else None
        if start is not None:
            a, v, slot = start
            problem.add(Node((a, inside), (v, outside), _carry(v), None, e, (slot, -1), times))
        elif _is_tensor(inside):
            problem.add(Node((inside,), (outside,), _copy(inside, add=loop), None, e, (-1,), times))


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Var) and x.is_tensor


# --- rules of the places where states agree ---------------------------------------------------------------------------


def _dims(v: Var) -> tuple[Dims, dict[str, int]]:
    """A letter for each dim that is not of size one."""
    dims = tuple(() if n == 1 else (f"d{i}",) for i, n in enumerate(v.shape))
    return dims, {d[0]: n for d, n in zip(dims, v.shape) if d}


def _creation(v: Var) -> Rule:
    dims, sizes = _dims(v)
    return Rule((), (dims,), sizes, merges="alike")


def _output_rule(v: Var, results: int) -> Rule:
    """Not linear: what is pending is reduced before it leaves."""
    dims, sizes = _dims(v)
    return Rule((dims,), (dims,) * results, sizes, merges="alike")


def _copy(v: Var, drop: bool = False, add: bool = False) -> Rule:
    """The same value inside and outside a sub-program; `drop`, `add`: dim 0 of the operand, the result is iterated
    over, and whole."""
    dims, sizes = _dims(v)
    sides = [((), *dims) if more else dims for more in (drop, add)]
    return Rule((sides[0],), (sides[1],), sizes, through=frozenset({0}), merges="alike")


def _carry(v: Var) -> Rule:
    dims, sizes = _dims(v)
    return Rule((dims, dims), (dims, dims), sizes, linear=(frozenset({0, 1}),), merges="alike")
