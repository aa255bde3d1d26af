"""The reference interpreter: evaluates a Graph on whole tensors. Slow and simple, the oracle for everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var, map_vars

Evaluate = Callable[[Eqn, Sequence[Any], Mapping[str, Any]], list[Any]]


def run_graph(graph: Graph, inputs: Sequence[Any], evaluate: Evaluate | None = None) -> list[Any]:
    """The outputs of `graph`: tensors, numbers, and the constants among its outputs.

    evaluate: what computes the results of an equation, by default `evaluate_equation`.

    >>> from vescale_fn.trace import trace_flat
    >>> from vescale_fn.tracing import Aval
    >>> traced = trace_flat(lambda x: [x.sum() + 1, "done"], [Aval((3,), torch.float32)])
    >>> run_graph(traced.graph, [torch.ones(3)])
    [tensor(4.), 'done']
    """
    values: dict[Var, Any] = dict(zip(graph.inputs, inputs, strict=True))
    for e in graph.eqns:
        args, kwargs = map_vars(e.args, values.__getitem__), map_vars(e.kwargs, values.__getitem__)
        results = (evaluate or evaluate_equation)(e, args, kwargs)
        values.update(zip(e.outs, results, strict=True))
    return [values[v] if isinstance(v, Var) else v for v in graph.outputs]


def evaluate_equation(e: Eqn, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The results of one equation, nested lists flattened."""
    if isinstance(e.op, Call):
        return run_graph(e.op.body, args)
    if isinstance(e.op, Scan):
        return run_scan(e.op, args)
    results = e.op(*args, **kwargs)
    return flat_results(results) if e.outs else []


def run_scan(scan: Scan, operands: Sequence[Any], evaluate: Evaluate | None = None) -> list[Any]:
    """Final carries, then stacked outputs. evaluate: as for `run_graph`."""
    consts, first_xs = scan.num_consts, scan.num_consts + scan.num_carry
    carry, xs = list(operands[consts:first_xs]), operands[first_xs:]
    rows: list[list[Any]] = []
    for i in reversed(range(scan.length)) if scan.reverse else range(scan.length):
        out = run_graph(scan.body, [*operands[:consts], *carry, *(x[i] for x in xs)], evaluate)
        carry = out[: scan.num_carry]
        rows.append(out[scan.num_carry :])
    if scan.reverse:
        rows.reverse()
    return [*carry, *(torch.stack(column) for column in zip(*rows))]


def flat_results(result: Any) -> list[Any]:
    """Results in the order of an equation's outs: nested lists flattened, None kept."""
    if isinstance(result, (tuple, list)):
        return [leaf for r in result for leaf in flat_results(r)]
    return [result]
