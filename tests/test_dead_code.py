"""Dropping dead code changes no result, and leaves nothing that no result needs."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

from vescale_fn.dead_code import drop_dead
from vescale_fn.interpret import run_graph
from vescale_fn.sharding.graph import Graph, Scan
from vescale_fn.subprogram import call, scan
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval

F64 = torch.float64


def step(x: torch.Tensor, w: torch.Tensor, unused: torch.Tensor) -> list[torch.Tensor]:
    """Carries that feed each other (a reads b), one that feeds nobody (c), and a constant for c only."""

    def body(carry: Any, row: torch.Tensor) -> Any:
        a, b, c = carry
        return (a + b * row, b.sin(), c * unused), (a * 2, c.cos())

    (a, b, c), (p, q) = scan(body, (x, x + 1, x + 2), w)
    d, e = call(lambda x, y: (x.sin(), (x * y).cos()), a, c)
    return [a, b, c, p, q, d, e]


ARGS = [torch.rand(3, dtype=F64), torch.rand(4, 3, dtype=F64), torch.rand(3, dtype=F64)]
GRAPH = trace_flat(lambda *a: step(*a), [Aval(tuple(x.shape), F64) for x in ARGS]).graph


def restricted(*outputs: int) -> Graph:
    return drop_dead(Graph(GRAPH.inputs, GRAPH.eqns, tuple(GRAPH.outputs[i] for i in outputs)))


def the_scan(graph: Graph) -> Scan:
    (found,) = (e.op for e in graph.eqns if isinstance(e.op, Scan))
    return found


def test_any_subset_of_outputs_keeps_its_values() -> None:
    want = run_graph(GRAPH, ARGS)
    for n in range(1, 4):
        for outputs in combinations(range(7), n):
            got = run_graph(restricted(*outputs), ARGS)
            assert all(torch.equal(a, want[i]) for a, i in zip(got, outputs))


def test_carries_that_feed_nobody_are_dropped() -> None:
    assert (the_scan(GRAPH).num_carry, the_scan(GRAPH).num_consts) == (3, 1)
    only_a, only_b = the_scan(restricted(0)), the_scan(restricted(1))
    assert (only_a.num_carry, only_a.num_consts, len(only_a.body.outputs)) == (2, 0, 2)
    assert (only_b.num_carry, len(only_b.body.inputs)) == (1, 1)
    assert not restricted().eqns


def test_operands_of_a_call_are_dropped() -> None:
    (e,) = (e for e in restricted(5).eqns if not isinstance(e.op, Scan) and hasattr(e.op, "body"))
    assert len(e.args) == len(e.outs) == 1
