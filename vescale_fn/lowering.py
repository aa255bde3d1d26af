"""The flow of a step, stage by stage: trace -> solve -> partition -> optimize. Engines take it from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from vescale_fn import decompose
from vescale_fn.fused import RULES as UPDATE_RULES
from vescale_fn.lowered import Lowered
from vescale_fn.normalize import drop_dead, drop_metadata_reads
from vescale_fn.partition import partition
from vescale_fn.passes import optimize
from vescale_fn.plan_cache import PlanCache
from vescale_fn.primitives import RESHARD, constraint_layout
from vescale_fn.register import registered_rules
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh, MeshShape
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.problem import RuleFor
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.trace import Traced


@dataclass(frozen=True, eq=False)
class Request:
    """What a traced step is lowered for.

    inputs: layout of each graph input, None where the solver chooses (captured values included).
    outputs: layout that each output must have, None where the solver chooses.
    roles: "data" or "state" for each graph input.
    continues: output index -> input index whose layout it takes.
    donated: indices of inputs whose storage may be reused.
    """

    mesh: Mesh
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    roles: tuple[str, ...]
    continues: Mapping[int, int]
    donated: frozenset[int]
    rules: Mapping[Any, Any]


def lower(name: str, traced: Traced, request: Request, cache_dir: Path | None = None) -> Lowered:
    """Solve, partition and optimize a traced step. `cache_dir`: a folder in which plans are kept."""
    user_rules = {**registered_rules(), **request.rules}
    extra = {**UPDATE_RULES, **user_rules}

    @cache
    def rule(e: Eqn) -> Rule | None:
        return rule_for(e, extra)

    graph = prepare(traced.graph, request, rule)
    if cache_dir is None:
        plan = _solved(graph, request, rule)
    else:
        kept = PlanCache(cache_dir, name, request, user_rules)
        plan = kept.plan(graph, lambda: _solved(graph, request, rule))
    program = replace(partition(plan, rule), donated=request.donated)
    return Lowered(name, traced, request, plan, optimize(program))


def _solved(graph: Graph, request: Request, rule: RuleFor) -> Plan:
    from vescale_fn.sharding.solve import solve  # with scipy, which takes half a second to import

    return solve(
        graph,
        request.mesh.shape,
        inputs={v: x for v, x in zip(graph.inputs, request.inputs) if x is not None},
        outputs=request.outputs,
        roles=dict(zip(graph.inputs, request.roles)),
        constraints=constraints(graph, request.mesh.shape),
        rule_for=rule,
        continues={o: graph.inputs[i] for o, i in request.continues.items()},
    )


def prepare(graph: Graph, request: Request, rule: RuleFor) -> Graph:
    """The graph that the solver sees: no metadata reads, no dead code, operations split where a layout asks for it."""
    graph = drop_dead(drop_metadata_reads(graph))
    return decompose.on_intent(graph, request, rule)


def constraints(graph: Graph, mesh: MeshShape) -> dict[Eqn, Layout]:
    """The layout that each vf.reshard in the graph, sub-programs included, asks for."""
    out: dict[Eqn, Layout] = {}
    for e in graph.eqns:
        if isinstance(e.op, (Scan, Call)):
            out |= constraints(e.op.body, mesh)
        elif e.op is RESHARD:
            out[e] = constraint_layout(e, mesh)
    return out
