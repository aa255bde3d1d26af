"""The flow of a step, stage by stage: trace -> solve -> partition -> optimize. Engines take it from there."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

from vescale_fn.cast import WIDEN
from vescale_fn.decompose import decompose_eqn, splice
from vescale_fn.decompositions import ON_INTENT
from vescale_fn.fused import RULES as UPDATE_RULES
from vescale_fn.host import RULES as HOST_RULES
from vescale_fn.lowered import Lowered, Request
from vescale_fn.orthogonal import RULES as MATRIX_RULES
from vescale_fn.partition import partition
from vescale_fn.passes import optimize, watch_values
from vescale_fn.plan_cache import PlanCache
from vescale_fn.primitives import RESHARD, constraints
from vescale_fn.random.bits import RULES as RANDOM_RULES
from vescale_fn.random.reuse import check_keys
from vescale_fn.regions.check import check
from vescale_fn.regions.lower import RULES as REGION_RULES
from vescale_fn.regions.lower import regions_of
from vescale_fn.register import registered_rules
from vescale_fn.remat import NAMED
from vescale_fn.sharding.blocked import blocked
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var, equations, op_name
from vescale_fn.sharding.layout import MANUAL, Layout
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.problem import Regions, RuleFor, build
from vescale_fn.sharding.report import no_rule
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.rules.pointwise import elementwise
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.tracing import Traced


def _marks(eqn: Eqn) -> Rule:
    """What only marks its operand."""
    return elementwise(eqn, linear=[{0}])


def lower(name: str, traced: Traced, request: Request, cache_dir: Path | None = None) -> Lowered:
    """Solve, partition and optimize a traced step. `cache_dir`: a folder in which plans are kept."""
    check_keys(name, traced.graph)
    user_rules = {**registered_rules(), **request.rules}
    own = {**UPDATE_RULES, **MATRIX_RULES, **HOST_RULES, **REGION_RULES, **RANDOM_RULES}
    extra = {**own, **dict.fromkeys((NAMED, WIDEN), _marks), **user_rules}

    @cache
    def rule(e: Eqn) -> Rule | None:
        return rule_for(e, extra)

    check(traced.graph)
    graph = split_on_intent(traced.graph, request, rule)
    if cache_dir is None:
        plan = _solved(graph, request, rule)
    else:
        kept = PlanCache(cache_dir, name, request, user_rules)
        plan = kept.plan(graph, lambda: _solved(graph, request, rule))
    _warn_of_missing_rules(plan, rule)
    program = replace(partition(plan), donated=request.donated)
    budget = {"all": None, "none": 0}[request.keep] if isinstance(request.keep, str) else request.keep
    program = optimize(program, keep=budget, in_place=request.debug is None)
    if request.debug is not None:
        program = watch_values(program, name, request.paths, request.debug.infs)
    return Lowered(name, traced, request, plan, program)


def _warn_of_missing_rules(plan: Plan, rule: RuleFor) -> None:
    """One warning for each operation that has no rule and is given something sharded."""
    missing: dict[str, Eqn] = {}
    for e in equations(plan.graph):
        # Where layouts agree, or do not matter, no rule says so.
        places = isinstance(e.op, (Scan, Call)) or e.op is RESHARD or not e.outs
        if not places and rule(e) is None and not all(plan.values[v].is_local for v in e.operands):
            missing.setdefault(op_name(e.op), e)
    for e in missing.values():
        warnings.warn(no_rule(e), stacklevel=2)


def _solved(graph: Graph, request: Request, rule: RuleFor) -> Plan:
    from vescale_fn.sharding.solve import solve  # with scipy, which takes half a second to import

    inputs, roles = _given(graph, request)
    regions = regions_of(graph)
    return solve(
        graph,
        request.mesh.shape,
        inputs=inputs,
        outputs=request.outputs,
        roles=roles,
        constraints=_constraints(graph, request, regions),
        rule_for=rule,
        continues={o: graph.inputs[i] for o, i in request.continues.items()},
        regions=regions,
    )


def _constraints(graph: Graph, request: Request, regions: Regions) -> dict[Eqn, Layout]:
    """The layouts that `reshard` asks for; along the axes of a region it has no say."""
    found = constraints(graph, request.mesh.shape)
    return {e: x.with_states(dict.fromkeys(regions.manual.get(e.operands[0], ()), MANUAL)) for e, x in found.items()}


def split_on_intent(graph: Graph, request: Request, rule: RuleFor) -> Graph:
    """`graph` with the equations decomposed whose rule wants a dim whole that the user's layouts shard."""
    mesh, device = request.mesh.shape, request.mesh.device_of(0)
    inputs, roles = _given(graph, request)
    while True:
        regions = regions_of(graph)
        problem = build(graph, inputs, request.outputs, _constraints(graph, request, regions), rule, {}, regions)
        found = blocked(problem, mesh, roles, ON_INTENT.keys())
        graphs = {e: decompose_eqn(e, ON_INTENT[e.op], device) for e in found}
        replacements = {e: g for e, g in graphs.items() if g is not None}
        if not replacements:
            return graph
        graph = splice(graph, replacements)


def _given(graph: Graph, request: Request) -> tuple[dict[Var, Layout], dict[Var, str]]:
    """Fixed layouts, and roles, of the inputs."""
    inputs = {v: x for v, x in zip(graph.inputs, request.inputs) if x is not None}
    return inputs, dict(zip(graph.inputs, request.roles))
