"""Nodes that look alike: same operation, shapes and strategies, same surroundings. Identical layers fall together, and
what is chosen for one of them is chosen for all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from vescale_fn.sharding.choice import AxisProblem
from vescale_fn.sharding.graph import op_name
from vescale_fn.sharding.problem import Node

ROUNDS = 3  # how far surroundings reach


def classes_of(axis: AxisProblem) -> dict[Node, int]:
    """A number for each node, equal for nodes that look alike; numbered in order of appearance.

    Arguments that are not tensors (which draw, which index) do not count: only what they do to the strategies.
    """
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    problem = axis.problem
    color = {node: number(_looks(axis, node)) for node in problem.nodes}
    for _ in range(ROUNDS):
        numbers = {}
        color = {node: number(_surroundings(axis, color, node)) for node in problem.nodes}
    return color


def each_alone(axis: AxisProblem) -> dict[Node, int]:
    """Every node a class of its own."""
    return {node: i for i, node in enumerate(axis.problem.nodes)}


def _looks(axis: AxisProblem, node: Node) -> Hashable:
    shapes = tuple((v.shape, str(v.dtype), axis.nbytes[v]) for v in node.values)
    what: Any = op_name(node.eqn.op) if node.eqn else ""
    return what, node.slots, node.layout is None, shapes, tuple(axis.strategies[node]), node.times


def _surroundings(axis: AxisProblem, color: Mapping[Node, int], node: Node) -> Hashable:
    makers = tuple((color[m], i) for m, i in (axis.problem.makers[v] for v in node.operands))
    users = tuple(tuple(sorted((color[u], i) for u, i in axis.problem.users.get(v, ()))) for v in node.results)
    return color[node], makers, users
