"""The reference interpreter, on graphs written by hand."""

from __future__ import annotations

import torch

from vescale_fn.interpret import flat_results, run_graph, run_scan
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var

aten = torch.ops.aten
F32 = torch.float32


def var(name: str, *shape: int) -> Var:
    return Var(name, shape, F32)


def running_sum() -> Graph:
    """(scale, total, x) -> (total + scale * x, total + scale * x)"""
    scale, total, x, scaled, new = (var(n) for n in ("scale", "total", "x", "scaled", "new"))
    eqns = (
        Eqn(aten.mul.Tensor, (scale, x), {}, (scaled,)),
        Eqn(aten.add.Tensor, (total, scaled), {}, (new,)),
    )
    return Graph((scale, total, x), eqns, (new, new))


def test_equations_constants_and_lists() -> None:
    x, a, b = var("x", 4), var("a", 2), var("b", 2)
    graph = Graph((x,), (Eqn(aten.split.Tensor, (x, 2), {"dim": 0}, (a, b)),), (b, "text", x))
    got = run_graph(graph, [torch.arange(4.0)])
    assert got[0].tolist() == [2, 3]
    assert got[1] == "text"


def test_scan_forward_and_reverse() -> None:
    operands = [torch.tensor(2.0), torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0])]
    last, sums = run_scan(Scan(running_sum(), 1, 1, 3), operands)
    assert (last.item(), sums.tolist()) == (13, [3, 7, 13])
    last, sums = run_scan(Scan(running_sum(), 1, 1, 3, reverse=True), operands)
    assert (last.item(), sums.tolist()) == (13, [13, 11, 7])


def test_call() -> None:
    ins, outs = tuple(var(n) for n in "abc"), (var("y"), var("z"))
    graph = Graph(ins, (Eqn(Call(running_sum()), ins, {}, outs),), outs)
    assert [t.item() for t in run_graph(graph, [torch.tensor(x) for x in (2.0, 1.0, 4.0)])] == [9, 9]


def test_results_keep_none_and_flatten_lists() -> None:
    assert flat_results([1, (2, None)]) == [1, 2, None]
    assert flat_results(3) == [3]
