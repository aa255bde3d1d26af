"""Which equations the user's layouts lead to, only to meet a dim that their rule wants whole.

The same walk as in `intent`, but through letters that must be whole too, to find the equations that would have to
gather. Groups of seeds come in order, and an equation that one group passes through is closed to later ones: a weight
that is sharded only to be gathered (fully sharded data parallel) breaks up no layer that the batch runs through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from vescale_fn.sharding.candidates import strategy_for
from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.intent import Seeds, seeds
from vescale_fn.sharding.layout import CUTS
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.problem import Node, Problem


def blocked(problem: Problem, mesh: MeshShape, roles: Mapping[Var, str], ops: AbstractSet[Any]) -> set[Eqn]:
    """Equations of `ops` that the user's layouts reach, on some axis, only through a letter that must be whole.

    roles: "data" or "state" for each input, as for `solve`.
    """
    found: set[Eqn] = set()
    for axis, n in zip(mesh.names, mesh.sizes):
        if n == 1:
            continue
        owner: dict[Node, int] = {}
        for group, given in enumerate(seeds(problem, axis, roles)):
            met = set(_walk(problem, axis, n, given, group, owner))
            found |= {node.eqn for node in met if node not in owner and node.eqn and node.eqn.op in ops}
    return found


def _walk(problem: Problem, axis: str, n: int, given: Seeds, group: int, owner: dict[Node, int]) -> Iterator[Node]:
    """Push the seeds through the rules as far as they get. Yields the nodes where they meet a letter that must be
    whole; `owner` notes the nodes that they pass."""
    queue, seen = list(given), set(given)
    for v, state in queue:
        for node, slot in problem.touching(v):
            if node.rule is None or node.given(axis) or owner.get(node, group) != group:
                continue
            free = replace(node.rule, whole=frozenset()) if node.rule.whole else node.rule
            strategy = strategy_for(free, slot, state, n)
            if strategy is None:
                continue
            if strategy.letter in node.rule.whole:
                yield node
                continue
            owner[node] = group
            reached = [(w, s) for w, s in zip(node.values, strategy.states) if isinstance(s, CUTS)]
            queue += [r for r in dict.fromkeys(reached) if r not in seen]
            seen.update(reached)
