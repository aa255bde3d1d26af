"""Tracing: the graph computes what the step computes, knows the user's lines, and refuses what it cannot say."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value

from vescale_fn.decompositions import ALWAYS
from vescale_fn.interpret import run_graph
from vescale_fn.names import identifier
from vescale_fn.sharding.graph import Graph
from vescale_fn.trace import TraceError, trace_flat
from vescale_fn.tracing import Aval, ShapeDtype, Traced, current_trace
from vescale_fn.tree import flatten, flatten_with_paths, unflatten

F64 = torch.float64


def traced_and_run(fn: Any, *args: Any) -> tuple[Traced, list[Any]]:
    """Trace fn on the types of args (a pytree), and evaluate the graph on their values."""
    paths, leaves, treedef = flatten_with_paths(args)

    def flat(*values: Any) -> list[Any]:
        return flatten(fn(*unflatten(treedef, values)))[0]

    avals = [Aval(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]
    traced = trace_flat(flat, avals, names=paths)
    return traced, run_graph(traced.graph, [*leaves, *traced.captured])


def assert_traces(fn: Any, *args: Any) -> Graph:
    """The graph of fn gives the same bits as fn."""
    traced, got = traced_and_run(fn, *args)
    want = flatten(fn(*args))[0]
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
    return traced.graph


# ---- a train step


def gpt_params(layers: int = 2, d: int = 16, vocab: int = 11) -> dict[str, Any]:
    torch.manual_seed(0)
    block = {"norm": (d,), "wq": (d, d), "wk": (d, d), "wv": (d, d), "wo": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    return {
        "wte": torch.randn(vocab, d),
        "blocks": [{k: torch.randn(s) / math.sqrt(s[0]) for k, s in block.items()} for _ in range(layers)],
    }


def gpt_block(p: dict[str, Any], x: torch.Tensor, heads: int = 2) -> torch.Tensor:
    h = F.layer_norm(x, (x.shape[-1],), p["norm"])
    q, k, v = ((h @ p[w]).unflatten(-1, (heads, -1)).transpose(1, 2) for w in ("wq", "wk", "wv"))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + a.transpose(1, 2).flatten(2) @ p["wo"]
    return x + F.gelu(x @ p["up"]) @ p["down"]


def gpt_loss(params: dict[str, Any], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    x = F.embedding(tokens, params["wte"])
    for p in params["blocks"]:
        x = gpt_block(p, x)
    logits = x @ params["wte"].t()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_step(state: dict[str, Any], tokens: Any, targets: Any, lr: float) -> tuple[Any, Any]:
    grads, value = grad_and_value(gpt_loss)(state["params"], tokens, targets)
    step = state["step"] + 1
    new = []
    for p, g, m, v in zip(*(flatten(t)[0] for t in (state["params"], grads, state["m"], state["v"]))):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        scale = torch.sqrt(1 - 0.99**step) / (1 - 0.9**step)
        new.append((p * (1 - lr * 0.1) - lr * scale * m / (v.sqrt() + 1e-8), m, v))
    treedef = flatten(state["params"])[1]
    params, m, v = (unflatten(treedef, column) for column in zip(*new))
    return {"params": params, "m": m, "v": v, "step": step}, {"loss": value}


def gpt_state() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    params = gpt_params()
    leaves, treedef = flatten(params)
    zeros = [unflatten(treedef, [torch.zeros_like(x) for x in leaves]) for _ in range(2)]
    state = {"params": params, "m": zeros[0], "v": zeros[1], "step": torch.tensor(0.0)}
    return state, torch.randint(11, (2, 6)), torch.randint(11, (2, 6))


def test_train_step_is_bitwise_equal_to_eager() -> None:
    graph = assert_traces(train_step, *gpt_state(), 0.1)
    assert all(v.name.isidentifier() for e in graph.eqns for v in e.outs)
    names = [v.name for v in graph.inputs] + [v.name for e in graph.eqns for v in e.outs]
    assert len(names) == len(set(names))
    assert graph.inputs[0].name == "_0_params_wte"


def test_phases_follow_one_another() -> None:
    graph = assert_traces(train_step, *gpt_state(), 0.1)
    phases = [e.phase for e in graph.eqns]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    assert set(phases) == {"forward", "backward", "update"}


def test_every_equation_knows_its_line() -> None:
    graph = assert_traces(train_step, *gpt_state(), 0.1)
    assert all(e.source.file == __file__ for e in graph.eqns)

    def lines(phase: str, op: str) -> set[str]:
        return {e.source.code for e in graph.eqns if e.phase == phase and op in str(e.op)}

    attention = {"a = F.scaled_dot_product_attention(q, k, v, is_causal=True)"}
    assert lines("forward", "scaled_dot_product") == lines("backward", "scaled_dot_product") == attention
    gelu = {'return x + F.gelu(x @ p["up"]) @ p["down"]'}
    assert lines("forward", "gelu") == lines("backward", "gelu") == gelu
    embedding = {'x = F.embedding(tokens, params["wte"])'}
    assert lines("forward", "embedding") == lines("backward", "embedding") == embedding
    assert lines("update", "sqrt") == {
        "scale = torch.sqrt(1 - 0.99**step) / (1 - 0.9**step)",
        "new.append((p * (1 - lr * 0.1) - lr * scale * m / (v.sqrt() + 1e-8), m, v))",
    }


def test_backward_of_backward_knows_its_line() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        with torch.no_grad():
            z = torch.cos(x)
        return (y * z).sum()

    graph = assert_traces(lambda x: grad(lambda y: grad(f)(y).sum())(x), torch.rand(3))
    lines = {e.source.code for e in graph.eqns if "tanh" in str(e.op)}
    assert lines == {"y = torch.tanh(x)"}


# ---- what goes in


def test_numbers_stay_numbers() -> None:
    graph = assert_traces(lambda x, lr: [x * lr, torch.full((2,), lr), x**lr, lr * 2 + 1], torch.rand(3).half(), 0.3)
    assert graph.inputs[1].dtype is float
    assert graph.outputs[0].dtype is torch.float16
    for lr in (0.0, 1.0, -2.5, math.inf):  # no value is special
        traced, _ = traced_and_run(lambda x, lr: x * lr, torch.ones(2), lr)
        assert not traced.static
        assert run_graph(traced.graph, [torch.ones(2), 7.0])[0].tolist() == [7, 7]


def test_nan_passes_through() -> None:
    _, (got,) = traced_and_run(lambda x: x * 2, torch.tensor([math.nan]))
    assert math.isnan(got)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, lr: x * lr if lr > 0 else x,
        lambda x, lr: x if lr else x + 1,
        lambda x, lr: x * max(lr, 0.01),
        lambda x, lr: x * math.exp(lr),
        lambda x, lr: x * int(lr * 100),
        lambda x, lr: (x * lr, f"{lr:.2f}"),
        lambda x, lr: torch.arange(0, lr, 0.01),
    ],
)
def test_decision_on_a_number_makes_it_static(fn: Any) -> None:
    with pytest.warns(UserWarning, match="step takes a decision that depends on the value of 1, so a new program"):
        traced, got = traced_and_run(fn, torch.rand(3), 0.1)
    assert traced.static == {1}
    for a, b in zip(got, flatten(fn(*[torch.rand(3), 0.1]))[0]):
        assert type(a) is type(b)


def test_captured_tensors_become_inputs() -> None:
    w, b = torch.rand(3, requires_grad=True), torch.rand(2)
    traced, _ = traced_and_run(lambda x: [grad(lambda x: (x * w).sum())(x) + w, w, b], torch.rand(3))
    assert [id(t) for t in traced.captured] == [id(w), id(b)]
    with torch.no_grad():
        w.fill_(2)
    got = run_graph(traced.graph, [torch.rand(3), *traced.captured])
    assert got[0].tolist() == [4, 4, 4]
    assert got[1] is w
    assert current_trace() is None


def test_constants_and_empty_results() -> None:
    assert_traces(lambda x: {"a": None, "b": "text", "c": 3, "d": x, "e": x}, torch.rand(2))
    assert_traces(list)
    assert_traces(lambda x: x.sum(), torch.rand(0, 3))
    assert_traces(lambda x: x.t().reshape(-1), torch.rand(2, 3).t())
    graph = assert_traces(lambda x: x + torch.tensor(2.0) + torch.tensor([1.0, 2.0]), torch.rand(2))
    assert [v.name for v in graph.inputs] == ["_0", "captured_0"]
    assert any(str(e.op) == "aten.full.default" for e in graph.eqns)


def test_a_tensor_as_a_position() -> None:
    assert_traces(lambda x, i: x[i], torch.rand(3, 2), torch.tensor(1))
    assert_traces(grad(lambda x, i: (x[i] ** 2).sum()), torch.rand(3, 2), torch.tensor(2))


def test_ambient_modes() -> None:
    def f(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        with torch.no_grad():
            z = x.sin()
        return y, z, torch.is_grad_enabled(), torch.compiler.is_compiling()

    with torch.no_grad():
        _, got = traced_and_run(f, torch.rand(3, 3))
    assert got[0].dtype is torch.bfloat16
    assert got[2:] == [False, True]
    with torch.autocast("cpu", torch.bfloat16):
        _, got = traced_and_run(lambda x: grad(lambda x: (x @ x).sum().float())(x), torch.rand(3, 3))
        assert got[0].dtype is torch.float32
    assert not torch.compiler.is_compiling()


def test_decompositions_are_applied() -> None:
    table = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)}
    traced = trace_flat(lambda x: [F.silu(x)], [Aval((3,), torch.float32)], decompositions=table)
    assert [str(e.op) for e in traced.graph.eqns] == ["aten.sigmoid.default", "aten.mul.Tensor"]


# ---- writes in place


def in_place_writes(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    y[1:3] += 1
    y.view(-1)[0] = 5
    y.t()[0].mul_(2)
    y.index_put_((torch.tensor([0, 1]),), x[:2])
    y[:, 0].copy_(x[:, 1])
    z = torch.zeros(4)
    z.fill_(2.0).add_(1, alpha=2)
    pair = [x * 1, x * 2]
    torch._foreach_add_(pair, 1.0)
    diagonal = y.diagonal()
    diagonal.zero_()
    out = torch.empty(4, 3)
    torch.mul(x, 2, out=out)
    rows = y.unsqueeze(0).expand(2, 4, 3).reshape(8, 3)
    rows.scatter_(0, torch.zeros(1, 3, dtype=torch.long), 1.0)
    cast = torch.empty(2, 3, dtype=F64)
    cast.copy_(x[0])
    return [y, z, *pair, diagonal, out, rows, cast]


def test_writes_in_place_become_values() -> None:
    graph = assert_traces(in_place_writes, torch.rand(4, 3))
    assert not any(e.op._schema.is_mutable for e in graph.eqns)
    assert all(e.source.file == __file__ for e in graph.eqns)


def test_writes_in_place_under_grad() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[0] *= 3
        return (y * y).sum()

    assert_traces(grad(loss), torch.rand(3, 2))


# ---- refusals


def refusal(fn: Any, *args: Any) -> str:
    with pytest.raises(TraceError) as e:
        traced_and_run(fn, *args)
    return str(e.value)


def here(fn: Any) -> str:
    """The place and code of the one line of fn."""
    code = fn.__code__
    line = code.co_firstlineno + 1
    import linecache

    return f"{__file__}:{line}: {linecache.getline(__file__, line).strip()}"


def test_reading_a_value() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    def item(x: torch.Tensor) -> Any:
        return x.sum().item()

    def to_float(x: torch.Tensor) -> Any:
        return float(x.sum())

    for fn in (branch, item, to_float):
        assert refusal(fn, torch.rand(3)) == (
            f"step reads the value of a tensor (`if tensor:`, float(), .item(), .tolist()) at {here(fn)}\n"
            "A step is traced without values. Choose with torch.where, return the tensor and read it after the call, "
            "or pass the number as a Python argument."
        )


def test_shapes_that_depend_on_values() -> None:
    def select(x: torch.Tensor) -> Any:
        return x[x > 0]

    def nonzero(x: torch.Tensor) -> Any:
        return x.nonzero()

    for fn in (select, nonzero):
        assert refusal(fn, torch.rand(3)) == (
            f"step: the shape of the result of aten.nonzero depends on the values of a tensor, at {here(fn)}\n"
            "A step is traced with fixed shapes. Use a mask of fixed shape and torch.where instead of selecting "
            "elements."
        )


def test_random_numbers_without_a_key() -> None:
    def dropout(x: torch.Tensor) -> Any:
        return F.dropout(x, 0.5)

    def attention(x: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    assert refusal(dropout, torch.rand(3)) == (
        f"step calls the random operation aten.bernoulli_.float without a key, at {here(dropout)}\n"
        "Its values would depend on the mesh and on how often the step ran. Pass a key to the step, and write "
        "`with vf.random.scope(key):` around the draw, inside the step; or switch the layer to eval mode."
    )
    assert "without a key" in refusal(attention, torch.rand(1, 1, 4, 8))
    assert "aten.rand " in refusal(lambda: torch.rand(3))
    assert_traces(lambda x: F.dropout(x, 0.5, training=False), torch.rand(3))


def test_writing_to_what_is_not_the_steps_own() -> None:
    w = torch.zeros(3)

    def captured(x: torch.Tensor) -> Any:
        return w.view(-1).add_(x)

    def argument(x: torch.Tensor) -> Any:
        return x[:2].mul_(2)

    assert refusal(captured, torch.rand(3)) == (
        f"step writes in place (aten.add_.Tensor) to a tensor that it captures, at {here(captured)}\n"
        "A step is a pure function. Write to a copy (.clone()), return the new value, and pass it to the next call."
    )
    assert "to argument 0, at" in refusal(argument, torch.rand(3))
    assert w.tolist() == [0, 0, 0]


def test_running_statistics_are_not_lost() -> None:
    def normalize(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
        return F.batch_norm(x, mean, var, training=True)

    avals = [Aval((4, 3), F64), Aval((3,), F64), Aval((3,), F64)]
    with pytest.raises(TraceError, match=r"writes in place \(aten.copy_\) to argument mean, at"):
        trace_flat(lambda *x: [normalize(*x)], avals, names=["x", "mean", "var"], decompositions=ALWAYS)


def test_an_exception_of_the_step_is_kept() -> None:
    def step(x: torch.Tensor) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as e:
        traced_and_run(step, torch.rand(3))
    assert e.value.__notes__ == [f"while tracing step, at {here(step)}"]
    assert current_trace() is None


# ---- small things


def test_names() -> None:
    assert [identifier(p) for p in ("params.w", "0.x", "blocks[0]['w']", "", "a-b")] == [
        "params_w",
        "_0_x",
        "blocks_0_w",
        "x",
        "a_b",
    ]
    traced = trace_flat(lambda a, b: [a + b], [Aval((1,), F64)] * 2, names=["p.w", "p_w"])
    assert [v.name for v in traced.graph.inputs] == ["p_w", "p_w_1"]


def test_shape_dtype() -> None:
    assert ShapeDtype((2, 3)) == ShapeDtype((2, 3), torch.float32, "cpu")


def test_no_warning_without_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        traced_and_run(lambda x, lr: x * lr, torch.rand(3), 0.1)


def test_factories_read_no_tensor_and_keep_its_device() -> None:
    """Found by review: zeros like a tensor on a GPU were made on the CPU."""
    avals = [Aval((3,), torch.float32, "cuda")]
    fns = [torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, 2), lambda x: x.new_full((3,), 2.0)]
    graph = trace_flat(lambda x: [fn(x) for fn in fns], avals).graph
    assert {str(e.op) for e in graph.eqns} == {"aten.full.default"}
    assert not any(e.operands for e in graph.eqns)
    assert [e.args[1] for e in graph.eqns] == [0, 1, 2, 2.0]
    assert all(e.kwargs == {"dtype": torch.float32, "device": torch.device("cuda:0")} for e in graph.eqns)


@pytest.mark.parametrize(
    "index",
    [
        lambda i: (i,),
        lambda i: (slice(None), i),
        lambda i: (i, ..., i),
        lambda i: (..., i, slice(1, None)),
        lambda i: (None, i, 1, i),
        lambda i: (slice(None), None, i, ...),
    ],
)
def test_a_position_among_slices_is_not_read(index: Any) -> None:
    x, i = torch.arange(120.0).reshape(2, 3, 4, 5), torch.tensor(1)
    traced = trace_flat(lambda x, i: [x[index(i)]], [Aval((2, 3, 4, 5), torch.float32), Aval((), torch.int64)])
    (found,) = run_graph(traced.graph, [x, i])
    assert torch.equal(found, x[index(i)])
