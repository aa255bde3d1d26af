"""A good choice on one axis without HiGHS: greedy in order of the graph, then moves until none helps."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from math import inf

from vescale_fn.sharding.choice import AxisProblem, Choice
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import State
from vescale_fn.sharding.problem import Node

SWEEPS = 4
REACH = 40  # nodes that one move may change
LEAST = 1e-13  # seconds that a move must save


def solve_locally(axis: AxisProblem) -> dict[Node, int]:
    """The strategy of each node: the better of the local optima near the greedy choice and near everything whole."""
    starts = (_greedy(axis), dict.fromkeys(axis.problem.nodes, 0))
    return min((_improved(axis, start) for start in starts if axis.cost(start) < inf), key=axis.cost)


def _improved(axis: AxisProblem, choice: dict[Node, int]) -> dict[Node, int]:
    """The local optimum under moves that change one node, the users of one value, or a chain of nodes that follow
    each other's states (views stick together: changing only one of them never helps)."""
    for _ in range(SWEEPS):
        if not sum(_improve(axis, choice, node) for node in axis.free_nodes()):
            break
    return choice


def _greedy(axis: AxisProblem) -> dict[Node, int]:
    """Each node in turn by the strategy that is cheapest given how its operands were made."""
    choice: dict[Node, int] = {}
    made: dict[Var, State] = {}
    for node in axis.problem.nodes:

        def cost(k: int, node: Node = node) -> float:
            pairs = [(v, made.get(v), s) for v, s in zip(node.operands, axis.strategies[node][k].operands)]
            known = [(v, src, dst) for v, src, dst in pairs if src is not None and src != dst]
            if not all(axis.can_convert(v, src, dst) for v, src, dst in known):
                return inf
            return axis.work[node][k] + sum(axis.seconds(v, src, dst) for v, src, dst in known)

        choice[node] = min(range(len(axis.strategies[node])), key=cost)
        made.update(zip(node.results, axis.chosen(choice, node).results))
    return choice


def _improve(axis: AxisProblem, choice: dict[Node, int], node: Node) -> bool:
    """Make every move around `node` that helps; whether any did."""
    helped = False
    for k in range(len(axis.strategies[node])):
        starts = [{node: k}, *(_users(axis, choice, v, s) for v, s in _results(axis, node, k))]
        for move in [{node: k}, *(_chain(axis, choice, start) for start in starts)]:
            if _gain(axis, choice, move) > LEAST:
                choice.update(move)
                helped = True
    return helped


def _results(axis: AxisProblem, node: Node, k: int) -> Iterable[tuple[Var, State]]:
    return zip(node.results, axis.strategies[node][k].results)


def _users(axis: AxisProblem, choice: Choice, v: Var, state: State) -> dict[Node, int]:
    """The move of all users of a value to a state, while its maker stays: it is then converted once."""
    users = {u: _agreeing(axis, u, i, state) for u, i in axis.problem.users.get(v, ())}
    maker = axis.problem.makers[v][0]
    return {maker: choice[maker], **{u: k for u, k in users.items() if k is not None}}


def _chain(axis: AxisProblem, choice: Choice, start: Mapping[Node, int]) -> dict[Node, int]:
    """A move, and that of its neighbours to the first strategy that agrees with it, and so on."""
    move = dict(start)
    queue = list(start)
    for node in queue:
        for v, state in zip(node.values, axis.strategies[node][move[node]].states):
            for other, slot in axis.problem.touching(v):
                agreeing = None if other in move else _agreeing(axis, other, slot, state)
                if agreeing is not None and agreeing != choice[other] and len(move) < REACH:
                    move[other] = agreeing
                    queue.append(other)
    return move


def _agreeing(axis: AxisProblem, node: Node, slot: int, state: State) -> int | None:
    return next((k for k, s in enumerate(axis.strategies[node]) if s.states[slot] == state), None)


def _gain(axis: AxisProblem, choice: dict[Node, int], move: dict[Node, int]) -> float:
    """Seconds that a move saves."""
    if all(choice[node] == k for node, k in move.items()):
        return 0.0
    values = dict.fromkeys(v for node in move for v in node.values)
    return _cost(axis, choice, move, values) - _cost(axis, ChainMap(move, choice), move, values)


def _cost(axis: AxisProblem, choice: Choice, nodes: Iterable[Node], values: Iterable[Var]) -> float:
    work = sum(axis.work[node][choice[node]] for node in nodes)
    return work + sum(axis.value_cost(choice, v) for v in values)
