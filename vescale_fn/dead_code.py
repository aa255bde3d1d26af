"""Dead code of global graphs, sub-programs included: results, carries and operands that nobody needs go away, but for
what has an effect, and what that needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var, has_effect, vars_in


def drop_dead(graph: Graph) -> Graph:
    """Equations that no output and no effect needs are dropped, and so are the parts of sub-programs."""
    alive = set(vars_in(graph.outputs))
    kept = []
    for e in reversed(graph.eqns):
        if alive.isdisjoint(e.outs) and not has_effect(e):
            continue
        if isinstance(e.op, (Scan, Call)):
            e = _pruned(e, alive)
        alive.update(e.reads)
        kept.append(e)
    return Graph(graph.inputs, tuple(reversed(kept)), graph.outputs)


def _pruned(e: Eqn, alive: set[Var]) -> Eqn:
    """A sub-program that computes only the results in `alive`."""
    results = [i for i, v in enumerate(e.outs) if v in alive]
    if isinstance(e.op, Call):
        body, operands = _restricted(e.op.body, results)
        op: Scan | Call = replace(e.op, body=body)
    else:
        results = needed_results(e.op, results)
        body, operands = _restricted(e.op.body, results, keep=[e.op.num_consts + i for i in _carries(e.op, results)])
        op = replace(
            e.op,
            body=body,
            num_consts=sum(i < e.op.num_consts for i in operands),
            num_carry=len(_carries(e.op, results)),
        )
    return replace(e, op=op, args=tuple(e.args[i] for i in operands), outs=tuple(e.outs[i] for i in results))


def without_effects(graph: Graph) -> Graph:
    """The graph without what it does beside making its outputs: for running it a second time."""
    eqns = []
    for e in graph.eqns:
        if isinstance(e.op, (Scan, Call)) and has_effect(e):
            e = replace(e, op=replace(e.op, body=without_effects(e.op.body)))
        if e.outs:
            eqns.append(e)
    return replace(graph, eqns=tuple(eqns))


def _restricted(body: Graph, results: Sequence[int], keep: Iterable[int] = ()) -> tuple[Graph, list[int]]:
    """The body with these results only, and the indices of the inputs that are left (`keep` among them)."""
    body = drop_dead(Graph(body.inputs, body.eqns, tuple(body.outputs[i] for i in results)))
    read = {v for e in body.eqns for v in e.reads} | set(vars_in(body.outputs))
    kept, always = [], set(keep)
    for i, v in enumerate(body.inputs):
        if v in read or i in always:
            kept.append(i)
    return Graph(tuple(body.inputs[i] for i in kept), body.eqns, body.outputs), kept


def _carries(scan: Scan, results: Sequence[int]) -> list[int]:
    return [i for i in results if i < scan.num_carry]


def needed_results(scan: Scan, results: Sequence[int]) -> list[int]:
    """Indices of what is needed when `results` are: they, and carries that the body reads for something needed."""
    needed = set(results)
    carry_in = {v: i for i, v in enumerate(scan.body.inputs[scan.num_consts :][: scan.num_carry])}
    while True:
        body = drop_dead(Graph(scan.body.inputs, scan.body.eqns, tuple(scan.body.outputs[i] for i in sorted(needed))))
        read: set[Any] = {v for e in body.eqns for v in e.reads} | set(vars_in(body.outputs))
        more = {i for v, i in carry_in.items() if v in read} - needed
        if not more:
            return sorted(needed)
        needed |= more
