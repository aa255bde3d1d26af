"""scan and call equal the unrolled code, values and derivatives of any order, and are one node each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

import vescale_fn as vf
from vescale_fn.interpret import run_graph
from vescale_fn.primitives import RESHARD, reshard
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, equations
from vescale_fn.subprogram import call, scan
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval, Traced
from vescale_fn.tree import flatten

F64 = torch.float64
torch.manual_seed(0)
SCALE = torch.rand(5, dtype=F64)
ARGS = [torch.rand(3, 5, dtype=F64), torch.rand(4, 5, 5, dtype=F64), torch.rand(4, 5, dtype=F64)]
BATCHED = [torch.rand(2, 3, 5, dtype=F64), ARGS[1], torch.rand(2, 4, 5, dtype=F64)]
ALL = (0, 1, 2)

Fn = Callable[..., Any]


def trace(fn: Fn, args: list[Any]) -> Traced:
    avals = [Aval(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in args]
    return trace_flat(lambda *a: flatten(fn(*a))[0], avals)


def assert_equal(fn: Fn, reference: Fn, args: list[Any], bitwise: bool = False) -> Graph:
    traced = trace(fn, args)
    got, want = run_graph(traced.graph, [*args, *traced.captured]), flatten(reference(*args))[0]
    for a, b in zip(got, want, strict=True):
        if bitwise:
            assert torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    return traced.graph


def sub_programs(graph: Graph) -> Iterator[Eqn]:
    """Equations that are sub-programs, inner ones included."""
    for e in graph.eqns:
        if isinstance(e.op, (Scan, Call)):
            yield e
            yield from sub_programs(e.op.body)


# ---- functions and what they are unrolled


def layer(h: torch.Tensor, w: Any) -> Any:
    a, b = w
    h = h + torch.tanh(F.layer_norm(h, (5,)) @ a) * SCALE + b
    return h, {"sum": h.sum(), "nothing": None}


def scanned(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h, ys = scan(layer, x, (a, b))
    return (h**2).sum() + (ys["sum"] * ys["sum"]).mean()


def unrolled(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    sums = []
    for i in range(len(a)):
        x, y = layer(x, (a[i], b[i]))
        sums.append(y["sum"])
    total = torch.stack(sums)
    return (x**2).sum() + (total * total).mean()


def nested(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A scan in a scan in a call; the inner body closes over the outer carry."""

    def outer(h: torch.Tensor, w: Any) -> Any:
        def inner(c: torch.Tensor, row: torch.Tensor) -> Any:
            c = torch.tanh(c * row + h)
            return c, c.sum()

        c, sums = scan(inner, h, w[1], reverse=True)
        return h + c @ w[0], sums

    h, sums = call(lambda x, a, b: scan(outer, x, (a, b)))(x, a, b)
    return (h.sin() ** 2).sum() + (sums**3).mean()


def nested_unrolled(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = []
    for i in range(len(a)):
        c, sums = x, []
        for j in reversed(range(b.shape[1])):
            c = torch.tanh(c * b[i, j] + x)
            sums.append(c.sum())
        rows.append(torch.stack(sums[::-1]))
        x = x + c @ a[i]
    return (x.sin() ** 2).sum() + (torch.stack(rows) ** 3).mean()


def remat(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    block = call(lambda h, w: layer(h, w)[0], remat=True)
    h, _ = scan(lambda h, w: (block(h, w), None), x, (a, b))
    return (h**2).sum()


def remat_unrolled(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for i in range(len(a)):
        x, _ = layer(x, (a[i], b[i]))
    return (x**2).sum()


FUNCTIONS = {
    "scan": (scanned, unrolled),
    "nested": (nested, nested_unrolled),
    "remat": (remat, remat_unrolled),
}


def squares(gradients: Any) -> torch.Tensor:
    total: torch.Tensor = sum((g.sin() ** 2).sum() for g in flatten(gradients)[0])
    return total


TRANSFORMS: dict[str, tuple[Callable[[Fn], Fn], list[Any]]] = {
    "value": (lambda f: f, ARGS),
    "grad": (lambda f: grad_and_value(f, ALL), ARGS),
    "jvp": (lambda f: lambda *a: jvp(f, a, tuple(x.cos() for x in a)), ARGS),
    "vmap": (lambda f: vmap(f, (0, None, 0)), BATCHED),
    "vmap of grad": (lambda f: vmap(grad(f, ALL), (0, None, 0)), BATCHED),
    "grad of vmap": (lambda f: grad(lambda *a: vmap(f, (0, None, 0))(*a).sum(), ALL), BATCHED),
    "grad of grad": (lambda f: grad(lambda *a: squares(grad(f, ALL)(*a)), ALL), ARGS),
    "jvp of grad": (lambda f: lambda *a: jvp(grad(f, ALL), a, a), ARGS),
    "grad of jvp": (lambda f: grad(lambda *a: jvp(f, a, a)[1], ALL), ARGS),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_the_unrolled_code(name: str, transform: str) -> None:
    fn, reference = FUNCTIONS[name]
    make, args = TRANSFORMS[transform]
    assert_equal(make(fn), make(reference), args)


@pytest.mark.parametrize("make", [lambda f: jacrev(grad(f)), hessian], ids=["jacrev of grad", "hessian"])
def test_second_derivatives(make: Callable[[Fn], Fn]) -> None:
    assert_equal(make(scanned), make(unrolled), ARGS)


@pytest.mark.parametrize("name", ["scan", "remat"])
def test_gradients_are_bitwise_equal(name: str) -> None:
    fn, reference = FUNCTIONS[name]
    assert_equal(grad_and_value(fn, ALL), grad_and_value(reference, ALL), ARGS, bitwise=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outside_a_trace_the_code_just_runs(name: str) -> None:
    fn, reference = FUNCTIONS[name]
    for a, b in zip(grad(fn, ALL)(*ARGS), grad(reference, ALL)(*ARGS)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# ---- the shape of the graph


def deep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def block(h: torch.Tensor, w: torch.Tensor) -> Any:
        return h + torch.relu(h @ w), None

    return scan(block, x, w)[0].sum()


def test_depth_costs_nothing() -> None:
    def graph(layers: int) -> Graph:
        return trace(grad(deep, (0, 1)), [torch.rand(3, 5), torch.rand(layers, 5, 5)]).graph

    def size(g: Graph) -> list[int]:
        return [len(g.eqns), *(len(e.op.body.eqns) for e in sub_programs(g))]

    assert size(graph(2)) == size(graph(96))
    assert len(graph(2).eqns) <= 6


def test_backward_reads_residuals_and_computes_nothing_again() -> None:
    graph = trace(grad(deep, (0, 1)), [torch.rand(3, 5), torch.rand(4, 5, 5)]).graph
    forward, backward = (e.op for e in sub_programs(graph))
    count = {s: [str(e.op) for e in s.body.eqns].count("aten.mm.default") for s in (forward, backward)}
    assert list(count.values()) == [1, 2]
    assert (forward.reverse, backward.reverse) == (False, True)
    assert {e.phase for e in backward.body.eqns} == {"backward"}
    assert [e.phase for e in sub_programs(graph)] == ["forward", "backward"]


def test_remat_keeps_nothing() -> None:
    graph = trace(grad(remat, ALL), ARGS).graph
    forward, inner, backward, inner_backward = (e.op for e in sub_programs(graph))
    assert len(forward.body.outputs) == 2  # the carry, and the carry that came in
    assert inner.remat
    assert inner_backward.remat
    assert sum("layer_norm.default" in str(e.op) for e in inner_backward.body.eqns) == 1
    assert backward.num_carry == 1


def test_no_value_is_shared_between_graphs() -> None:
    graph = trace(grad(nested, ALL), ARGS).graph
    seen: set[Any] = set()
    for g in (graph, *(e.op.body for e in sub_programs(graph))):
        own = {*g.inputs, *(v for e in g.eqns for v in e.outs), *g.eqns}
        assert seen.isdisjoint(own)
        seen |= own


def test_lines_inside_bodies() -> None:
    graph = trace(grad(scanned, ALL), ARGS).graph
    for e in sub_programs(graph):
        assert e.source.code == "h, ys = scan(layer, x, (a, b))"
        assert {x.source.code for x in e.op.body.eqns} == {
            "h = h + torch.tanh(F.layer_norm(h, (5,)) @ a) * SCALE + b",
            'return h, {"sum": h.sum(), "nothing": None}',
        }


# ---- operands of every kind


def test_integers_writes_in_place_and_captured_tensors() -> None:
    table, ids = torch.rand(7, 5, dtype=F64), torch.tensor([1, 2, 6, 0])

    def body(carry: Any, w: Any) -> Any:
        i, h = carry
        h = h.clone()
        h[0] += table[w[0]] * F.embedding(w[0], table)
        return (i + 1, h @ w[1]), h.sum() * i

    def fn(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        (i, h), ys = scan(body, (torch.tensor(3), x), (ids, a))
        return h.sin().sum() + (ys * i).sum()

    def reference(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        carry, ys = (torch.tensor(3), x), []
        for i in range(4):
            carry, y = body(carry, (ids[i], a[i]))
            ys.append(y)
        return carry[1].sin().sum() + (torch.stack(ys) * carry[0]).sum()

    assert_equal(grad(fn, (0, 1)), grad(reference, (0, 1)), ARGS[:2])


def test_numbers_in_a_body_stay_numbers() -> None:
    def fn(x: torch.Tensor, a: torch.Tensor, lr: float) -> torch.Tensor:
        h, _ = scan(lambda h, w: (h - lr * torch.sin(h @ w) * (1 - lr / 2), None), x, a)
        return call(lambda h, rate: (h**2).sum() * rate, h, lr * 3)

    def reference(x: torch.Tensor, a: torch.Tensor, lr: float) -> torch.Tensor:
        for w in a:
            x = x - lr * torch.sin(x @ w) * (1 - lr / 2)
        return (x**2).sum() * (lr * 3)

    traced = trace(grad(fn), [*ARGS[:2], 0.1])
    assert not traced.static
    for lr in (0.1, 0.7):
        (got,) = run_graph(traced.graph, [*ARGS[:2], lr])
        torch.testing.assert_close(got, grad(reference)(*ARGS[:2], lr), rtol=1e-12, atol=1e-12)


def test_numbers_come_out_of_a_body() -> None:
    """Found by review: a number that varies, in the carry or among the results, was looked for in the body's values."""

    def fn(x: torch.Tensor, lr: float) -> Any:
        (last, rate), half = scan(lambda c, row: ((c[0] + row * c[1], c[1]), lr / 2), (x[0], lr), x)
        scaled, double = call(lambda x, rate: (x * rate, rate * 2), last, rate)
        return scaled * half, double

    traced = trace(fn, [ARGS[0], 0.1])
    for lr in (0.1, 0.7):
        got = run_graph(traced.graph, [ARGS[0], lr])
        torch.testing.assert_close(got, [*fn(ARGS[0], lr)], rtol=1e-12, atol=1e-12)


def test_a_decision_in_a_body_makes_a_number_static() -> None:
    def fn(x: torch.Tensor, lr: float) -> torch.Tensor:
        return call(lambda x: x * lr if lr > 0 else x, x)

    with pytest.warns(UserWarning, match="depends on the value of x1"):
        assert trace(fn, [ARGS[0], 0.1]).static == {1}


def test_autocast_around_a_scan() -> None:
    def run(loop: Fn) -> Fn:
        def fn(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loop(lambda h, w: (torch.relu(h @ w).float(), None), x, a)[0].sum()

        return fn

    def unrolled(body: Fn, x: torch.Tensor, a: torch.Tensor) -> Any:
        for w in a:
            x, _ = body(x, w)
        return x, None

    args = [x.float() for x in ARGS[:2]]
    assert_equal(grad(run(scan), (0, 1)), grad(run(unrolled), (0, 1)), args, bitwise=True)


def test_stop_gradient_and_custom_gradients_are_kept() -> None:
    class Double(torch.autograd.Function):
        """The identity whose gradient is twice what it should be."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return 2 * g

    def body(h: torch.Tensor, w: torch.Tensor) -> Any:
        return Double.apply(h @ w) + torch.sin(h).detach() * h, None

    def fn(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return scan(body, x, a)[0].sum()

    def reference(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        for w in a:
            x, _ = body(x, w)
        return x.sum()

    def twice(f: Fn) -> Fn:
        return grad(lambda *a: squares(grad(f, (0, 1))(*a)), (0, 1))

    assert_equal(grad(fn, (0, 1)), grad(reference, (0, 1)), ARGS[:2])
    assert_equal(twice(fn), twice(reference), ARGS[:2])


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_flow_through_complex_results(remat: bool) -> None:
    def of_call(x: torch.Tensor) -> torch.Tensor:
        return call(lambda a: torch.complex(a, a * a), x, remat=remat).abs().sum()

    def of_scan(x: torch.Tensor) -> torch.Tensor:
        start = torch.zeros(5, dtype=torch.complex128)
        carry, ys = scan(lambda c, a: (c * 0.5 + torch.complex(a, a * a), torch.complex(a, c.real)), start, x)
        return carry.abs().sum() + ys.abs().sum()

    def unrolled(x: torch.Tensor) -> torch.Tensor:
        carry, total = torch.zeros(5, dtype=torch.complex128), torch.zeros((), dtype=F64)
        for a in x:
            total = total + torch.complex(a, carry.real).abs().sum()
            carry = carry * 0.5 + torch.complex(a, a * a)
        return carry.abs().sum() + total

    assert_equal(grad(of_call), grad(lambda x: torch.complex(x, x * x).abs().sum()), ARGS[:1])
    assert_equal(grad(of_scan), grad(unrolled), ARGS[:1])


def test_bodies_whose_results_have_no_derivative() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        first = call(lambda a: a.argmax(1), x)
        again = call(lambda a: a.argmin(1), x, remat=True)
        total, _ = scan(lambda c, a: (c + a.argmax(), a > 0), torch.zeros((), dtype=torch.int64), x)
        return ((first + again + total).to(F64) * x.sum(1)).sum()

    def plain(x: torch.Tensor) -> torch.Tensor:
        total = sum(a.argmax() for a in x)
        return ((x.argmax(1) + x.argmin(1) + total).to(F64) * x.sum(1)).sum()

    assert_equal(grad(step), grad(plain), ARGS[:1])


def test_constraints_inside_a_body() -> None:
    def fn(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        h, _ = scan(lambda h, w: (reshard(torch.tanh(h @ w), "b/dp d"), None), x, a)
        return h.sum()

    graph = assert_equal(grad(fn), grad(lambda x, a: fn(x, a)), ARGS[:2])
    found = [e for s in sub_programs(graph) for e in s.op.body.eqns if e.op is RESHARD]
    assert [e.args[1] for e in found] == ["b/dp d", "b/dp d"]


def test_arrays_that_a_body_captures() -> None:
    mesh = vf.make_mesh(dp=2)
    x, w = torch.rand(4, 3, dtype=F64), torch.rand(3, dtype=F64)
    captured = vf.device_put(w, "d", mesh)

    def loss(x: torch.Tensor, w: Any) -> torch.Tensor:
        return call(lambda x: (torch.sin(x) * w).sum(), x, remat=True)

    got = vf.pjit(grad(lambda x: loss(x, captured)))(vf.device_put(x, "b/dp d", mesh))
    torch.testing.assert_close(got.full(), torch.cos(x) * w, rtol=1e-12, atol=1e-12)


def test_length_without_xs_and_constant_results() -> None:
    def fn(x: torch.Tensor) -> Any:
        return scan(lambda h, _: (h * 2, ("text", h)), x, length=3)

    h, (text, rows) = fn(torch.tensor(1.0))
    assert (h.item(), text, rows.tolist()) == (8, "text", [1, 2, 4])
    assert_equal(lambda x: fn(x)[1][1], lambda x: fn(x)[1][1], [torch.tensor(1.0)], bitwise=True)


def test_calls_are_named_after_their_function() -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    graph = trace(grad(lambda x: call(attention, x).sum()), ARGS[:1]).graph
    assert [e.op.name for e in sub_programs(graph)] == ["attention", "attention_backward"]


# ---- errors


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda: scan(lambda c, x: (c, None), torch.ones(2), {"a": torch.ones(3), "b": torch.ones(4)}),
            "vf.scan: all of xs must have the same extent along dim 0, the number of iterations, but found a: 3, b: 4. "
            "Without xs, give length=.",
        ),
        (
            lambda: scan(lambda c, x: (c, None), torch.ones(2)),
            "vf.scan: all of xs must have the same extent along dim 0, the number of iterations, but found nothing. "
            "Without xs, give length=.",
        ),
        (
            lambda: scan(lambda c, x: (c, None), torch.ones(2), torch.ones(0, 3)),
            "vf.scan: there is nothing to iterate over (0 iterations). Leave the loop out, or pass at least one slice.",
        ),
        (
            lambda: scan(lambda c, x: c, torch.ones(2), torch.ones(3)),
            "vf.scan: the body returned a tensor. It must return a pair (carry, y); y may be None.",
        ),
        (
            lambda: scan(lambda c, x: ({"h": c["h"].double()}, None), {"h": torch.ones(2)}, torch.ones(3)),
            "vf.scan: the carry h goes into the body as f32[2] and comes out as f64[2]. Shape and dtype must stay the "
            "same: convert the initial value, or the result.",
        ),
    ],
)
def test_errors(run: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as e:
        run()
    assert str(e.value) == message
    with pytest.raises(ValueError) as e:  # the same inside a trace
        trace(lambda x: (run(), x), ARGS[:1])
    assert str(e.value) == message


def test_the_pull_back_of_a_vjp_reads_residuals_as_that_of_grad_does() -> None:
    """It runs when its transform is over, and nothing follows its operands any more: forward need not run again."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return scan(lambda c, row: (torch.sin(c * row), None), x[0], call(torch.exp, x))[0].sum()

    def pulled(x: torch.Tensor) -> torch.Tensor:
        value, pull = vjp(loss, x)
        (gradient,) = pull(torch.ones_like(value))
        return gradient

    of_vjp, of_grad = (trace_flat(lambda x, fn=fn: [fn(x)], [Aval((3, 2), F64)]).graph for fn in (pulled, grad(loss)))
    for graph in (of_vjp, of_grad):
        ops = [str(e.op) for e in equations(graph)]
        assert (ops.count("aten.exp.default"), ops.count("aten.sin.default")) == (1, 1)
    x = torch.rand(3, 2, dtype=F64)
    assert torch.equal(run_graph(of_vjp, [x])[0], grad(loss)(x))


def test_a_vjp_within_grad_is_still_differentiated() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        value, pull = vjp(lambda x: call(lambda y: (y**3).sum(), x), x)
        return (pull(torch.ones_like(value))[0] ** 2).sum()

    x = torch.rand(3, dtype=F64)
    (traced,) = run_graph(trace_flat(lambda x: [grad(norm)(x)], [Aval((3,), F64)]).graph, [x])
    torch.testing.assert_close(traced, 36 * x**3, rtol=1e-13, atol=0)
