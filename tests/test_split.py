"""Forward, then backward from its residuals, is the joint graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import vjp

from vescale_fn.interpret import run_graph
from vescale_fn.sharding.graph import Graph, is_view
from vescale_fn.split import fresh, split
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval

F64 = torch.float64
X, W, CT = torch.rand(4, 3, dtype=F64), torch.rand(3, 3, dtype=F64), torch.rand(4, 3, dtype=F64)


def joint() -> Graph:
    def fn(x: torch.Tensor, w: torch.Tensor, ct: torch.Tensor) -> Any:
        y, pull = vjp(lambda x, w: torch.tanh(x.t().contiguous().t() @ w.exp()), x, w)
        return [y, *pull(ct)]

    return trace_flat(fn, [Aval(tuple(t.shape), F64) for t in (X, W, CT)]).graph


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_forward_then_backward_is_joint(remat: bool, constant: bool) -> None:
    graph = joint()
    constants = [graph.inputs[1]] if constant else []
    forward, backward = split(graph, 1, [graph.inputs[2]], constants, remat)
    y, *residuals = run_graph(forward, [X, W])
    gradients = run_graph(backward, [X, W, CT, *residuals])
    assert all(torch.equal(a, b) for a, b in zip([y, *gradients], run_graph(graph, [X, W, CT]), strict=True))
    assert {e.phase for e in backward.eqns} == {"backward"}
    assert not (remat and residuals)


def test_views_and_what_depends_on_constants_are_not_kept() -> None:
    graph = joint()
    kept = {}
    for constants in ([], [graph.inputs[1]]):
        forward, _ = split(graph, 1, [graph.inputs[2]], constants)
        makers = {v: e for e in forward.eqns for v in e.outs}
        kept[len(constants)] = [str(makers[v].op) for v in forward.outputs[1:]]
        assert not any(is_view(makers[v]) for v in forward.outputs[1:])
    assert "aten.exp.default" in kept[0]
    assert "aten.exp.default" not in kept[1]


def test_fresh_shares_nothing() -> None:
    graph = joint()
    copy = fresh(graph)
    assert str(copy) == str(graph)
    own = {*graph.inputs, *graph.eqns, *(v for e in graph.eqns for v in e.outs)}
    assert own.isdisjoint({*copy.inputs, *copy.eqns, *(v for e in copy.eqns for v in e.outs)})
