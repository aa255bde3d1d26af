"""Where the user's layouts lead: which equations would have to shard a dim that their rule wants whole.

From each value that the user sharded, states are pushed through the rules of the equations that touch it, in both
directions, one mesh axis at a time. Groups of seeds come in order, and an equation reached by one group is closed to
later ones, as in the solver: a weight that is sharded only to be gathered does not break up the layers that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from vescale_fn.sharding.candidates import strategy_for
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var
from vescale_fn.sharding.layout import Layout, Shard
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.rules.rule import Rule


@dataclass(frozen=True, eq=False)
class Seed:
    """A value whose layout the user gave, and the rank of its group: lower groups come first."""

    var: Var
    layout: Layout
    group: int


@dataclass(frozen=True, eq=False)
class _Site:
    """An equation with its rule and its values by slot, operands first."""

    eqn: Eqn
    rule: Rule
    free: Rule  # the same with no letter whole
    values: tuple[Var, ...]


@dataclass(eq=False)
class _Links:
    """How values are tied: by equations, and across the boundaries of sub-programs (the same value, dims shifted)."""

    sites: dict[Var, list[tuple[_Site, int]]] = field(default_factory=dict)
    same: dict[Var, list[tuple[Var, int]]] = field(default_factory=dict)

    def tie(self, a: Any, b: Any, shift: int = 0) -> None:
        """Dim d of a is dim d + shift of b."""
        if isinstance(a, Var) and isinstance(b, Var) and a.is_tensor:
            self.same.setdefault(a, []).append((b, shift))
            self.same.setdefault(b, []).append((a, -shift))


def blocked(
    graph: Graph,
    mesh: MeshShape,
    seeds: Sequence[Seed],
    rule_for: Callable[[Eqn], Rule | None],
    ops: AbstractSet[Any],
) -> set[Eqn]:
    """Equations of `ops` that a seed reaches only through a letter that their rule wants whole."""
    links = _links(graph, rule_for)
    found: set[Eqn] = set()
    for axis, n in zip(mesh.names, mesh.sizes):
        if n > 1:
            found |= _blocked_on(axis, n, links, seeds, ops)
    return found


def _blocked_on(axis: str, n: int, links: _Links, seeds: Sequence[Seed], ops: AbstractSet[Any]) -> set[Eqn]:
    owner: dict[Eqn, int] = {}
    found: set[Eqn] = set()
    for group in sorted({s.group for s in seeds}):
        todo = [(s.var, s.layout[axis]) for s in seeds if s.group == group]
        pending = [(v, s) for v, s in todo if isinstance(s, Shard)]
        seen = set(pending)
        wanted: set[Eqn] = set()
        while pending:
            for reached in _step(*pending.pop(), n, group, links, owner, wanted):
                if reached not in seen:
                    seen.add(reached)
                    pending.append(reached)
        found |= {e for e in wanted if e.op in ops and e not in owner}
    return found


def _step(
    v: Var, state: Shard, n: int, group: int, links: _Links, owner: dict[Eqn, int], wanted: set[Eqn]
) -> Iterator[tuple[Var, Shard]]:
    """What `state` of v leads to, one link on; equations where it meets a letter that must be whole are `wanted`."""
    for other, shift in links.same.get(v, ()):
        if state.dim + shift >= 0:
            yield other, replace(state, dim=state.dim + shift)
    for site, slot in links.sites.get(v, ()):
        if owner.get(site.eqn, group) != group:
            continue
        strategy = strategy_for(site.free, slot, state, n)
        if strategy is None:
            continue
        if strategy.letter in site.rule.whole:
            wanted.add(site.eqn)
            continue
        owner[site.eqn] = group
        for value, s in zip(site.values, strategy.states):
            if isinstance(s, Shard):
                yield value, s


def _links(graph: Graph, rule_for: Callable[[Eqn], Rule | None]) -> _Links:
    links = _Links()
    for e in _equations(graph):
        if isinstance(e.op, Scan):
            _tie_scan(links, e, e.op)
        elif isinstance(e.op, Call):
            for a, b in (*zip(e.args, e.op.body.inputs), *zip(e.outs, e.op.body.outputs)):
                links.tie(a, b)
        elif (rule := rule_for(e)) is not None:
            site = _Site(e, rule, replace(rule, whole=frozenset()), (*e.operands, *e.outs))
            for slot, v in enumerate(site.values):
                links.sites.setdefault(v, []).append((site, slot))
    return links


def _tie_scan(links: _Links, e: Eqn, scan: Scan) -> None:
    """Constants and carries are the same inside; slices and per-iteration outputs have one dim less. Carries go in as
    they come out."""
    fixed = scan.num_consts + scan.num_carry
    for i, (outer, inner) in enumerate(zip(e.args, scan.body.inputs)):
        links.tie(outer, inner, 0 if i < fixed else -1)
    for i, (outer, inner) in enumerate(zip(e.outs, scan.body.outputs)):
        links.tie(outer, inner, 0 if i < scan.num_carry else -1)
    for before, after in zip(scan.body.inputs[scan.num_consts :], scan.body.outputs[: scan.num_carry]):
        links.tie(before, after)


def _equations(graph: Graph) -> Iterable[Eqn]:
    for e in graph.eqns:
        yield e
        if isinstance(e.op, (Scan, Call)):
            yield from _equations(e.op.body)
