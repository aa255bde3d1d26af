"""A good choice on one axis without HiGHS: greedy in order of the graph, then moves until none helps."""

from __future__ import annotations

from vescale_fn.sharding.choice import AxisProblem
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import State
from vescale_fn.sharding.problem import Node

SWEEPS = 8
REACH = 40  # nodes that one move may change


def solve_locally(axis: AxisProblem) -> dict[Node, int]:
    """The strategy of each node: a local optimum under moves that change one node, or a chain of nodes that follow
    each other's states (views stick together: changing only one of them never helps)."""
    choice = dict.fromkeys(axis.problem.nodes, 0)
    for _ in range(SWEEPS):
        improved = False
        for node in axis.free_nodes():
            for k in range(len(axis.strategies[node])):
                for move in ({node: k}, _chain(axis, choice, node, k)):
                    if _gain(axis, choice, move) > 1e-15:
                        choice.update(move)
                        improved = True
        if not improved:
            break
    return choice


def _chain(axis: AxisProblem, choice: dict[Node, int], start: Node, k: int) -> dict[Node, int]:
    """The move of `start` to strategy k, and of its neighbours to the first strategy that agrees with it, and so on."""
    move = {start: k}
    queue = [start]
    for node in queue:
        for v, state in zip(node.values, axis.strategies[node][move[node]].states):
            for other, slot in axis.problem.touching(v):
                if other in move or len(move) >= REACH:
                    continue
                agreeing = _agreeing(axis, other, slot, state)
                if agreeing is not None and agreeing != choice[other]:
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
    after = {**choice, **move}
    return _cost(axis, choice, move, values) - _cost(axis, after, move, values)


def _cost(axis: AxisProblem, choice: dict[Node, int], nodes: dict[Node, int], values: dict[Var, None]) -> float:
    return sum(axis.work[node][choice[node]] for node in nodes) + sum(axis.value_cost(choice, v) for v in values)
