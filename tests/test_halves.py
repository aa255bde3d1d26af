"""Backward in halves: the same gradients, every equation once, and nothing of forward again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vescale_fn as vf
from vescale_fn.halves import Halves, halves_of, inputs_read
from vescale_fn.interpret import run_graph
from vescale_fn.sharding.graph import Call, Graph, Scan, equations, has_effect, is_view
from vescale_fn.subprogram import call, scan
from vescale_fn.tracing import Aval

F64 = torch.float64
N = 3
MATRIX, STACK = (N, N), (4, N, N)
Stage = Callable[[list[Any], list[Any]], Sequence[Any]]


def values(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(s, dtype=F64, generator=generator) for s in shapes]


def avals(tensors: Sequence[Tensor]) -> list[Aval]:
    return [Aval(tuple(t.shape), t.dtype) for t in tensors]


def run(halves: Halves, weights: list[Tensor], inputs: list[Tensor], seed: int = 9) -> tuple[list[Any], ...]:
    """Results, cotangents, gradients of inputs, gradients of weights; one graph after the other."""
    primals = [*weights, *inputs]
    outputs = run_graph(halves.forward, primals)
    results, residuals = outputs[: halves.num_results], outputs[halves.num_results :]
    cotangents = values([tuple(r.shape) for r in results if r.is_floating_point()], seed)
    first = run_graph(halves.input_half, [*primals, *cotangents, *residuals])
    n = halves.num_input_gradients
    second = run_graph(halves.weight_half, [*primals, *cotangents, *residuals, *first[n:]])
    return results, cotangents, first[:n], second


def equal_to_vjp(fn: Stage, weights: list[Tensor], inputs: list[Tensor], remat: bool = False) -> Halves:
    """Run the halves and the vjp of the plain function."""
    halves = halves_of(fn, avals(weights), avals(inputs), remat)
    results, cotangents, of_inputs, of_weights = run(halves, weights, inputs)
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in (*weights, *inputs)]
    plain = fn(leaves[: len(weights)], leaves[len(weights) :])
    for ours, theirs in zip(results, plain, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-13, atol=1e-13)
    floats = [t for t in leaves if t.requires_grad]
    outputs = [r for r in plain if r.is_floating_point()]
    grads = torch.autograd.grad(outputs, floats, cotangents, allow_unused=True, materialize_grads=True)
    for ours, theirs in zip([*of_weights, *of_inputs], grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    return halves


def products(graph: Graph) -> int:
    """Matrix products that a run makes, those of loops in each iteration."""
    n = sum(str(e.op) == "aten.mm.default" for e in graph.eqns)
    for e in graph.eqns:
        if isinstance(e.op, (Scan, Call)):
            n += products(e.op.body) * (e.op.length if isinstance(e.op, Scan) else 1)
    return n


def all_products(halves: Halves) -> tuple[int, int, int]:
    return products(halves.forward), products(halves.input_half), products(halves.weight_half)


def mlp(w: list[Any], x: list[Any]) -> list[Any]:
    return [torch.tanh(x[0] @ w[0]) @ w[1]]


@pytest.mark.parametrize("remat", [False, True])
def test_two_layers(remat: bool) -> None:
    halves = equal_to_vjp(mlp, values([MATRIX] * 2, 0), values([MATRIX], 1), remat)
    assert all_products(halves) == (2, 3 if remat else 2, 2)


def test_a_weight_that_is_used_twice_on_a_path_counts_twice_and_once() -> None:
    def tied(w: list[Any], x: list[Any]) -> list[Any]:
        return [torch.tanh(torch.tanh(x[0] @ w[0]) @ w[0]) @ w[0].t()]

    halves = equal_to_vjp(tied, values([MATRIX], 0), values([MATRIX], 1))
    assert all_products(halves) == (3, 3, 3)


def test_weights_beside_the_path_cost_nothing_in_the_input_half() -> None:
    def gated(w: list[Any], x: list[Any]) -> list[Any]:
        return [x[0] * (w[0].exp() @ w[1]).sum() + x[1]]

    halves = equal_to_vjp(gated, values([MATRIX] * 2, 0), values([MATRIX] * 2, 1))
    assert products(halves.input_half) == 1  # x * (exp(w0) @ w1): of weights only, so computed again, not kept
    assert products(halves.weight_half) == 2
    assert not halves.residuals


def test_a_first_stage_without_floating_point_inputs_has_all_in_the_weight_half() -> None:
    def embedding(w: list[Any], x: list[Any]) -> list[Any]:
        return [w[0][x[0]] @ w[1], x[0] + 1]

    weights, tokens = values([(7, N), MATRIX], 0), [torch.tensor([3, 1, 3, 6])]
    halves = equal_to_vjp(embedding, weights, tokens)
    assert halves.num_input_gradients == 0
    assert not halves.input_half.eqns


def test_a_stage_without_weights_has_all_in_the_input_half() -> None:
    halves = equal_to_vjp(lambda w, x: [torch.tanh(x[0]) * x[1]], [], values([MATRIX] * 2, 1))
    assert not halves.weight_half.eqns
    assert halves.kept_bytes == 0


# ---- sub-programs are divided, too


def layers(w: list[Any], x: list[Any]) -> list[Any]:
    """A stack of layers, one more weight that all of them use, and a sum that each adds to."""

    def body(carry: Any, layer: Any) -> Any:
        h, total = carry
        h = torch.tanh(h @ layer) @ w[1]
        return (h, total + h.sum()), h.mean()

    (h, total), means = scan(body, (x[0], torch.zeros((), dtype=F64)), w[0])
    return [h, total, means]


@pytest.mark.parametrize("remat", [False, True])
def test_layers_in_a_scan(remat: bool) -> None:
    fn = (lambda w, x: list(call(layers, w, x, remat=True))) if remat else layers
    halves = equal_to_vjp(fn, values([STACK, MATRIX], 0), values([MATRIX], 1))
    assert all_products(halves) == ((8, 16, 8) if remat else (8, 8, 8))
    assert sum(isinstance(e.op, Scan) for e in equations(halves.weight_half)) == 1


def test_layers_in_a_scan_of_scans() -> None:
    def outer(w: list[Any], x: list[Any]) -> list[Any]:
        def body(h: Any, pair: Any) -> Any:
            return scan(lambda h, layer: (torch.tanh(h @ layer), None), h, pair)[0], None

        return [scan(body, x[0], w[0].reshape(2, 2, N, N))[0]]

    halves = equal_to_vjp(outer, values([STACK], 0), values([MATRIX], 1))
    assert all_products(halves) == (4, 4, 4)


def test_a_called_stage_is_divided() -> None:
    halves = equal_to_vjp(lambda w, x: list(call(mlp, w, x)), values([MATRIX] * 2, 0), values([MATRIX], 1))
    assert all_products(halves) == (2, 2, 2)


def test_what_a_backward_prints_is_printed_once() -> None:
    """Effects in a stage come once, in whichever part they are."""

    def printing(w: list[Any], x: list[Any]) -> list[Any]:
        def inner(w: Any, x: Any) -> Any:
            vf.debug_print("sum {}", w.sum())
            return torch.tanh(x @ w)

        return [call(inner, w[0], x[0], remat=True) @ w[0]]

    halves = halves_of(printing, avals(values([MATRIX], 0)), avals(values([MATRIX], 1)))
    parts = (halves.forward, halves.input_half, halves.weight_half)
    assert [sum(has_effect(e) and not isinstance(e.op, Call) for e in equations(g)) for g in parts] == [1, 0, 0]


# ---- what is held


def test_bytes_of_a_linear_layer() -> None:
    """Its input until the weight half; there, also the cotangent of its output."""
    x, w = torch.rand(5, 3, dtype=F64), torch.rand(3, 2, dtype=F64)
    halves = equal_to_vjp(lambda w, x: [x[0] @ w[0]], [w], [x])
    assert halves.activation_bytes == 8 * 5 * 3
    assert halves.kept_bytes == 8 * (5 * 3 + 5 * 2)


def test_bytes_of_two_layers() -> None:
    halves = equal_to_vjp(mlp, values([MATRIX] * 2, 0), values([MATRIX], 1))
    matrix = 8 * N * N
    assert halves.activation_bytes == 2 * matrix  # x, tanh(x @ w0)
    assert halves.kept_bytes == 4 * matrix  # both, and the cotangents of both products
    assert [v.nbytes for v in halves.residuals] == [matrix]
    assert [v.nbytes for v in halves.kept] == [matrix]


def test_inputs_that_nobody_reads_are_not_held() -> None:
    halves = equal_to_vjp(lambda w, x: [x[0] @ w[0] + x[1]], values([MATRIX], 0), values([MATRIX] * 2, 1))
    assert halves.activation_bytes == 8 * N * N
    assert len(inputs_read(halves.input_half)) == 2  # the weight, and the cotangent


# ---- any stage

OPS: list[Callable[[Any, Any], Any]] = [
    torch.add,
    torch.mul,
    torch.matmul,
    lambda a, b: torch.tanh(a),
    lambda a, b: a.t(),
    lambda a, b: a * b.sum(),
    lambda a, b: a.softmax(-1),
    lambda a, b: call(torch.matmul, a, b),
    lambda a, b: scan(lambda c, row: (torch.tanh(c + row @ b), c.sum()), a[0], a)[1].expand(N, N),
    lambda a, b: scan(lambda c, _: (torch.tanh(c @ b), None), a, length=2)[0],
]


@st.composite
def stages(draw: st.DrawFn) -> tuple[Stage, int, int]:
    """Operations on any two of: weights, inputs, and what was computed before."""
    weights, inputs = draw(st.integers(0, 3)), draw(st.integers(1, 2))
    steps = []
    for i in range(draw(st.integers(1, 6))):
        there = weights + inputs + i
        operand = st.integers(0, there - 1)
        steps.append((draw(st.sampled_from(OPS)), draw(operand), draw(operand)))
    outputs = draw(st.lists(st.integers(0, weights + inputs + len(steps) - 1), min_size=1, max_size=3))

    def fn(w: list[Any], x: list[Any]) -> list[Any]:
        made = [*w, *x]
        for op, a, b in steps:
            made.append(op(made[a], made[b]))
        return [made[i] * 1.0 for i in outputs]

    return fn, weights, inputs


@given(stages(), st.booleans())
@settings(max_examples=60)
def test_halves_of_any_stage(stage: tuple[Stage, int, int], remat: bool) -> None:
    fn, weights, inputs = stage
    halves = equal_to_vjp(fn, values([MATRIX] * weights, 0), values([MATRIX] * inputs, 1), remat)
    if not remat:
        assert_each_once(fn, halves, weights, inputs)


def assert_each_once(fn: Stage, halves: Halves, weights: int, inputs: int) -> None:
    """Of operations that are no views and read more than weights, the halves have what backward has in one piece."""
    whole = halves_of(lambda w, x: fn(x[:weights], x[weights:]), [], avals(values([MATRIX] * (weights + inputs), 0)))
    ops = Counter(map(str, work(whole.forward, 0) + work(whole.input_half, 0)))
    parts = (halves.forward, halves.input_half, halves.weight_half)
    assert Counter(str(op) for graph in parts for op in work(graph, weights)) <= ops


def work(graph: Graph, weights: int) -> list[Any]:
    """Operations, those of sub-programs too, that read something which is not made of weights alone."""
    alone = set(graph.inputs[:weights])
    found = []
    for e in graph.eqns:
        if alone.issuperset(e.reads):
            alone.update(e.outs)
        elif isinstance(e.op, (Scan, Call)):
            found += [x.op for x in equations(e.op.body) if not is_view(x) and x.operands and callable(x.op)]
        elif not is_view(e) and e.operands:
            found.append(e.op)
    return found
