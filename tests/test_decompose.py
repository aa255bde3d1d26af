"""Decompositions equal the operations they stand for, and happen only where the user's layouts ask for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import kernel_samples
import op_samples
import pytest
import torch
import torch.nn.functional as F
from kernel_samples import at
from op_samples import Sample, s, t
from rule_machine import equation
from torch.func import grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

from vescale_fn.decompose import decompose_eqn, splice
from vescale_fn.decompositions import ALWAYS, ON_INTENT
from vescale_fn.lowering import split_on_intent
from vescale_fn.sharding.graph import Call, Eqn, Graph, Source, Var, map_vars
from vescale_fn.sharding.layout import Layout, Shard, State
from vescale_fn.sharding.mesh import Mesh, MeshShape
from vescale_fn.sharding.rules import rule_for
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval

aten = torch.ops.aten
BOTH = {**ALWAYS, **ON_INTENT}


def run_graph(graph: Graph, *tensors: torch.Tensor) -> list[Any]:
    """The graph, equation by equation."""
    values: dict[Var, Any] = dict(zip(graph.inputs, tensors, strict=True))
    for e in graph.eqns:
        args, kwargs = map_vars((e.args, e.kwargs), values.__getitem__)
        out = e.op(*args, **kwargs)
        values.update(zip(e.outs, out if isinstance(out, (tuple, list)) else [out]))
    return [values[v] if isinstance(v, Var) else v for v in graph.outputs]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [x for part in tree for x in tensors_in(part)] if isinstance(tree, (tuple, list)) else []


def assert_equal(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    want = want if isinstance(want, (tuple, list)) else [want]
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:
            assert a is b
        else:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


# --- each equals its operation --------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
MASKED = torch.tensor([[-INF, -INF, -INF], [1.0, -INF, 2.0], [NAN, 1.0, 2.0]], dtype=torch.float64)

MORE = [
    *(s(aten.linalg_vector_norm.default, t(4, 5), p, [1], True) for p in (0, 1, 2, 3, INF, -INF)),
    s(aten.linalg_vector_norm.default, t(4, 5), 2),
    *(s(aten.var.correction, t(4, 5), [1], correction=c, keepdim=True) for c in (0, 1, 5, None)),
    s(aten.std.correction, t(4, 5, dtype=torch.complex128), [0]),
    s(aten.var_mean.correction, t(4, 5), None, correction=0),
    s(aten.std_mean.correction, t(4, 5), [0, 1]),
    s(aten._softmax.default, MASKED, 1, False),
    s(aten._log_softmax.default, MASKED, 1, False),
    s(aten._safe_softmax.default, MASKED, 1),
    s(aten.logsumexp.default, MASKED, [1]),
    s(aten.logsumexp.default, t(4, 5), [0, 1], True),
    *(s(op, MASKED, 1) for op in (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)),
    s(aten.argmax.default, t(4, 5, dtype=torch.int64)),
    s(aten.argmin.default, t(4, 5), None, True),
    s(aten.max.dim, t(4, 5, dtype=torch.int64), 0, True),
    s(aten.aminmax.default, t(4, 5), dim=1),
    s(aten.aminmax.default, t(4, 5)),
    s(aten.mean.default, t(4, 5)),
    s(aten.mean.dim, t(4, 5), [1], True),
    s(aten.mean.dim, t(4, 5, dtype=torch.int64), [0], dtype=torch.float64),
    s(aten.mean.default, t(0, 5)),
    *(s(aten.dist.default, t(4, 5), t(5), p) for p in (1, 2, INF)),
    s(aten.addmm.default, t(5), t(4, 6), t(6, 5), beta=2, alpha=3),
    s(aten.baddbmm.default, t(3, 4, 5), t(3, 4, 6), t(3, 6, 5)),
    s(aten.addmv.default, t(4), t(4, 5), t(5)),
    s(aten.index_add.default, t(4, 6, 3), 1, at(5, size=6), t(4, 5, 3), alpha=2),
    s(aten.index_put.default, t(4, 6, 3), [None, t(5, 2, dtype=torch.int64, low=-6, high=6)], t(4, 5, 2, 3), True),
    s(aten.native_batch_norm_backward.default, t(4, 5), t(4, 5), None, None, None, t(5), t(5), True, 1e-5, [True] * 3),
    s(
        aten.native_layer_norm_backward.default,
        *(t(4, 5), t(4, 5), [4, 5], t(1, 1), t(1, 1), None, None, [True, False, False]),
    ),
]
ALL = [x for x in (*op_samples.SAMPLES, *kernel_samples.SAMPLES, *MORE) if x.op in BOTH]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sample", ALL, ids=str)
def test_a_decomposition_equals_its_operation(sample: Sample) -> None:
    args, kwargs = sample.tensors()
    graph = decompose_eqn(equation(sample), BOTH[sample.op])
    if graph is not None:
        assert sample.op not in {e.op for e in graph.eqns} or sample.op in SAME_KERNEL
        assert_equal(run_graph(graph, *tensors_in((args, kwargs))), sample.op(*args, **kwargs))


# They call their own operation with other arguments: without a bias, without a reduction.
SAME_KERNEL = {aten.convolution.default, aten.convolution_backward.default} | {
    op for op in ALWAYS if str(op).split(".")[1].removesuffix("_backward").endswith(("_loss", "cross_entropy"))
}


def test_every_decomposition_is_tried() -> None:
    tried = {x.op for x in ALL}
    cuda = {aten.cudnn_batch_norm.default, aten.cudnn_batch_norm_backward.default}
    below = {op for op in ALWAYS if "nll_loss" in str(op)}
    below |= {aten._fused_rms_norm_backward.default, aten.index_put_.default}
    assert set(BOTH) - tried - cuda == below


def test_rms_norm_backward() -> None:
    """Which has no kernel on CPU."""
    grad, x, w = torch.randn(4, 5, 6), torch.randn(4, 5, 6), torch.randn(6)
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    _, pull = torch.func.vjp(lambda x, w: F.rms_norm(x, (6,), w, 1e-5), x, w)
    backward = ON_INTENT[aten._fused_rms_norm_backward.default]
    assert_equal(backward(grad, x, [6], rstd, w, [True, True]), pull(grad), 1e-5)
    assert backward(grad, x, [6], rstd, None, [True, False])[1] is None


@pytest.mark.parametrize("op", [aten._softmax.default, aten._log_softmax.default])
def test_half_precision_accumulates_in_float32(op: Any) -> None:
    x = torch.randn(4, 300).bfloat16() * 4
    e = Eqn(op, (Var("x", (4, 300), x.dtype), 1, False), {}, (Var("y", (4, 300), x.dtype),))
    graph = decompose_eqn(e, ON_INTENT[op])
    assert graph is not None
    assert_equal(run_graph(graph, x), op(x, 1, False), 1e-2)


# --- losses ---------------------------------------------------------------------------------------------------------


def traced(fn: Callable[..., Any], *args: torch.Tensor) -> Callable[..., Any]:
    return make_fx(lambda *xs: fn(*xs), dict(ALWAYS), tracing_mode="fake")(*args)


LOSS_OPTIONS = list(
    itertools.product(["mean", "sum", "none"], [-100, 1], [False, True], [0.0, 0.1], [(6, 5), (5,), (3, 5, 2, 2)])
)


@pytest.mark.parametrize(("reduction", "ignore", "weighted", "smoothing", "shape"), LOSS_OPTIONS)
def test_cross_entropy(reduction: str, ignore: int, weighted: bool, smoothing: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    scores = torch.randn(shape, dtype=torch.float64)
    classes = shape[1] if len(shape) > 1 else shape[0]
    target = torch.randint(0, classes, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())

    def step(scores: torch.Tensor, target: torch.Tensor, *weight: torch.Tensor) -> Any:
        def loss(scores: torch.Tensor) -> torch.Tensor:
            each = F.cross_entropy(
                scores, target, *weight, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing
            )
            return (each * each).sum()

        return grad_and_value(loss)(scores)

    args = (scores, target, torch.rand(classes, dtype=torch.float64)) if weighted else (scores, target)
    assert_equal(traced(step, *args)(*args), step(*args))


def test_the_mean_over_no_targets_is_nan() -> None:
    scores, target = torch.randn(3, 4), torch.full((3,), -100)
    assert traced(F.cross_entropy, scores, target)(scores, target).isnan()


def test_no_loss_keeps_a_reduction_over_the_batch() -> None:
    x, y = torch.rand(4, 5), torch.rand(4, 5)
    for loss in (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss):
        graph = traced(lambda x, y, loss=loss: grad_and_value(loss)(x, y), x, y)
        targets = {str(n.target) for n in graph.graph.nodes}
        assert any("sum" in name for name in targets)
        assert_equal(graph(x, y), grad_and_value(loss)(x, y), 1e-6)


# --- statistics that are written --------------------------------------------------------------------------------------


def test_running_statistics_of_batch_norm_are_results() -> None:
    def step(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor]:
        mean, var = mean.clone(), var.clone()
        return [F.batch_norm(x, mean, var, training=True), mean, var]

    x, mean, var = torch.randn(6, 3), torch.randn(3), torch.rand(3)
    avals = [Aval(tuple(v.shape), v.dtype) for v in (x, mean, var)]
    graph = trace_flat(step, avals, decompositions=ALWAYS).graph
    assert_equal(run_graph(graph, x, mean, var), step(x, mean, var), 1e-6)


# --- masks and classes ----------------------------------------------------------------------------------------------


def test_a_number_put_under_a_mask_is_a_choice_for_each_element() -> None:
    def step(x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        y = x.clone()
        y[x > 0] = 0.5
        y[rows] = 2.0
        y[:, x[0] > 0] = 3.0
        return [y]

    x, rows = torch.randn(4, 5), torch.tensor([True, False, False, True])
    graph = trace_flat(step, [Aval((4, 5), x.dtype), Aval((4,), torch.bool)], decompositions=ALWAYS).graph
    assert "index_put" not in {str(e.op).split(".")[1] for e in graph.eqns}
    assert_equal(run_graph(graph, x, rows), step(x, rows))


def test_one_hot_inside_a_gradient() -> None:
    def step(w: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        return [torch.func.grad(lambda w: (F.one_hot(i, 4).to(w.dtype) @ w).sum())(w)]

    w, i = torch.randn(4, 2), torch.tensor([3, 1, 1])
    graph = trace_flat(step, [Aval((4, 2), w.dtype), Aval((3,), torch.int64)]).graph
    assert_equal(run_graph(graph, w, i), step(w, i))


def test_the_batch_norm_of_cudnn_is_the_native_one() -> None:
    x, w, b, mean, var = torch.randn(6, 3), torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3)
    forward, backward = (ALWAYS[op] for op in (aten.cudnn_batch_norm.default, aten.cudnn_batch_norm_backward.default))
    for training in (True, False):
        mine, theirs = (mean.clone(), var.clone()), (mean.clone(), var.clone())
        got = forward(x, w, b, *mine, training, 0.1, 1e-5)
        assert_equal(got[:1], F.batch_norm(x, *theirs, w, b, training, 0.1, 1e-5), 1e-6)
        assert_equal(mine, theirs, 1e-6)
    grad = torch.randn(6, 3)
    _, saved_mean, saved_rstd, kept = forward(x, w, b, mean, var, True, 0.1, 1e-5)
    _, pull = torch.func.vjp(lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5), x, w, b)
    assert_equal(backward(x, grad, w, None, None, saved_mean, saved_rstd, 1e-5, kept), pull(grad), 1e-5)


# --- which equations ------------------------------------------------------------------------------------------------

MESH = MeshShape(("dp", "tp"), (2, 2))


def ops_after(
    fn: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]], states: list[Mapping[str, State]], roles: list[str]
) -> set[str]:
    """Names of the operations of `fn`, decomposed for layouts of its arguments."""
    avals = [Aval(shape, torch.float32) for shape in shapes.values()]
    graph = trace_flat(lambda *xs: [fn(*xs)], avals).graph
    layouts = tuple(Layout.of(MESH, v.shape, x) for v, x in zip(graph.inputs, states))
    request: Any = SimpleNamespace(mesh=Mesh(MESH), inputs=layouts, outputs=(None,), roles=roles)
    return {str(e.op).split(".")[1] for e in split_on_intent(graph, request, rule_for).eqns}


def test_a_softmax_over_a_sharded_dim_is_decomposed() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(x, 1)

    over = {"tp": Shard(1)}
    assert "amax" in ops_after(fn, {"x": (4, 6)}, [over], ["data"])
    assert ops_after(fn, {"x": (4, 6)}, [{"dp": Shard(0)}], ["data"]) == {"_log_softmax"}


def test_a_weight_sharded_only_to_be_gathered_breaks_up_nothing() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (6,), w)

    shapes = {"x": (4, 6), "w": (6,)}
    assert ops_after(fn, shapes, [{"dp": Shard(0)}, {"dp": Shard(0)}], ["data", "state"]) == {"native_layer_norm"}
    assert "native_layer_norm" not in ops_after(fn, shapes, [{"tp": Shard(1)}, {}], ["data", "state"])


def test_a_bias_is_split_off_where_the_contraction_is_sharded() -> None:
    def fn(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.addmm(b, x, w)

    shapes = {"b": (5,), "x": (4, 6), "w": (6, 5)}
    assert ops_after(fn, shapes, [{}, {}, {"tp": Shard(0)}], ["state"] * 3) == {"mm", "add"}
    assert ops_after(fn, shapes, [{}, {}, {"tp": Shard(1)}], ["state"] * 3) == {"addmm"}


# --- splicing -------------------------------------------------------------------------------------------------------


def test_spliced_equations_keep_line_and_phase() -> None:
    x, y = Var("x", (4, 6), torch.float32), Var("y", (4, 6), torch.float32)
    line = Source("train.py", 7, "y = x.softmax(1)")
    e = Eqn(aten._softmax.default, (x, 1, False), {}, (y,), line, "backward")
    body = decompose_eqn(e, ON_INTENT[e.op])
    assert body is not None
    graph = splice(Graph((x,), (e,), (y,)), {e: body})
    assert {(step.source, step.phase) for step in graph.eqns} == {(line, "backward")}
    value = torch.randn(4, 6)
    assert_equal(run_graph(graph, value), [value.softmax(1)], 1e-6)


def test_splicing_enters_sub_programs_and_leaves_others_alone() -> None:
    x, y, a, b, c = (Var(n, (4, 6), torch.float32) for n in "xyabc")
    inner = Eqn(aten._softmax.default, (a, 1, False), {}, (b,))
    other = Eqn(aten.exp.default, (y,), {}, (c,))
    call = Eqn(Call(Graph((a,), (inner,), (b,))), (x,), {}, (y,))
    graph = Graph((x,), (call, other), (c,))
    body = decompose_eqn(inner, ON_INTENT[inner.op])
    assert body is not None
    spliced = splice(graph, {inner: body})
    assert aten.amax.default in {e.op for e in spliced.eqns[0].op.body.eqns}
    assert spliced.eqns[1] is other


def test_a_number_that_varies_is_not_decomposed() -> None:
    x, beta = Var("x", (4, 4), torch.float32), Var("beta", (), float)
    e = Eqn(aten.addmm.default, (x, x, x), {"beta": beta}, (Var("y", (4, 4), torch.float32),))
    assert decompose_eqn(e, ON_INTENT[e.op]) is None
