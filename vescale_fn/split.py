"""Splitting a joint graph: the forward part with the values that backward needs, and the backward part.

An equation is forward when it does not depend on a cotangent. Views, numbers, and what depends on loop constants only
are computed again in backward rather than kept for each iteration; what has an effect has it in forward only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from vescale_fn.dead_code import drop_dead, without_effects
from vescale_fn.remat import Policy, as_policy
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var, has_effect, is_view, map_vars, vars_in


def split(
    joint: Graph,
    num_results: int,
    cotangents: Collection[Var],
    constants: Collection[Var],
    remat: bool | Policy = False,
) -> tuple[Graph, Graph]:
    """Forward graph and backward graph.

    joint: maps primals and cotangents to the results (the first num_results outputs) and the gradients.
    cotangents: inputs on which forward does not depend. constants: inputs that are the same in every iteration.
    remat: backward computes everything again, or what the policy does not keep. The forward graph returns results,
    then residuals; the backward graph takes all inputs of the joint graph, then residuals.
    """
    late = _dependents(joint, cotangents)
    forward = [e for e in joint.eqns if e not in late]
    gradients = joint.outputs[num_results:]
    policy = as_policy(remat)
    again = recomputed(forward, constants) if policy is None else _not_kept(forward, policy)
    needed = _needed_before(joint, gradients, late, again)
    residuals = list(dict.fromkeys(v for e in forward if e not in again for v in e.outs if v in needed))
    results = (*joint.outputs[:num_results], *residuals)
    primals = tuple(v for v in joint.inputs if v not in cotangents)
    silent = silenced(e for e in joint.eqns if e in again)
    backward = tuple(silent.get(e, e) for e in joint.eqns if e in late or e in silent)
    return (
        drop_dead(Graph(primals, tuple(forward), results)),
        as_backward(drop_dead(Graph((*joint.inputs, *residuals), backward, gradients))),
    )


def silenced(eqns: Iterable[Eqn]) -> dict[Eqn, Eqn]:
    """Equations to run again, as they run then: without the effects that they have had."""
    given = tuple(e for e in eqns if e.outs)
    return dict(zip(given, without_effects(Graph((), given, ())).eqns, strict=True))


def as_backward(graph: Graph) -> Graph:
    """The same graph with every equation in the backward phase."""
    return replace(graph, eqns=tuple(replace(e, phase="backward") for e in graph.eqns))


def fresh(graph: Graph) -> Graph:
    """A copy that shares no Var and no equation, sub-programs included: a layout belongs to a Var."""
    new: dict[Var, Var] = {v: replace(v) for v in (*graph.inputs, *(v for e in graph.eqns for v in e.outs))}
    eqns = []
    for e in graph.eqns:
        e = e.with_args(new.__getitem__, tuple(new[v] for v in e.outs))
        eqns.append(replace(e, op=replace(e.op, body=fresh(e.op.body))) if isinstance(e.op, (Scan, Call)) else e)
    return Graph(tuple(new[v] for v in graph.inputs), tuple(eqns), map_vars(graph.outputs, new.__getitem__))


def _dependents(graph: Graph, inputs: Collection[Var]) -> set[Eqn]:
    """Equations that depend on any of `inputs`."""
    reached, found = set(inputs), set()
    for e in graph.eqns:
        if not reached.isdisjoint(e.reads):
            reached.update(e.outs)
            found.add(e)
    return found


def recomputed(forward: Sequence[Eqn], constants: Collection[Var]) -> set[Eqn]:
    """Forward equations that backward runs again if it needs their results."""
    constant, again = set(constants), set()
    for e in forward:
        if constant.issuperset(e.reads):
            constant.update(e.outs)
            again.add(e)
        elif is_view(e) or not e.operands:
            again.add(e)
    return again


def _not_kept(forward: Sequence[Eqn], policy: Policy) -> set[Eqn]:
    """Forward equations that backward runs again under a policy."""
    kept = set(policy.kept(forward))
    return {e for e in forward if kept.isdisjoint(e.outs)}


def _needed_before(joint: Graph, gradients: Sequence[object], late: set[Eqn], again: set[Eqn]) -> set[Var]:
    """Values that late equations, and those that are run again, read on the way to the gradients and to effects."""
    needed = set(vars_in(tuple(gradients)))
    for e in reversed(joint.eqns):
        if ((e in late or e in again) and not needed.isdisjoint(e.outs)) or (e in late and has_effect(e)):
            needed.update(e.reads)
    return needed
