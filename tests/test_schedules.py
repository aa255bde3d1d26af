"""Schedules are transforms: which pairs compose, that results are the plain function's, and what is said otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

import vescale_fn as vf
from vescale_fn import schedules
from vescale_fn.schedules.kinds import TRANSFORMS, Kind
from vescale_fn.sharding.graph import Call
from vescale_fn.tree import flatten

F64 = torch.float64
MESH = vf.make_mesh(dp=2, tp=2)
SPECS = {"up": "d f/tp", "bias": "f/tp", "down": "f/tp o"}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=F64)


PARAMS = {"up": normal(6, 8), "bias": normal(8), "down": normal(8, 4)}
X, Y = normal(12, 6), normal(12, 4)


def mlp(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = vf.named(torch.tanh(x @ p["up"] + p["bias"]), "hidden")
    return torch.sin(h @ p["down"])


def loss(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (mlp(p, x) - y).square().mean()


def masked(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
    """Mean over the rows whose first target is positive: a number of rows that the data decides."""
    rows = (y[:, 0] > 0).to(y.dtype)
    return vf.weighted(((mlp(p, x) - y).square().sum(1) * rows).sum(), rows.sum())


def step_of(grad_fn: Callable[..., Any], opt: Any) -> Callable[..., Any]:
    def step(state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        grads, value = grad_fn(state["params"], x, y)
        params, moments = opt.step(grads, state["opt"], state["params"])
        return {"params": params, "opt": moments}, value

    return step


def largest_difference(a: Any, b: Any) -> float:
    full = [x.full() if isinstance(x, vf.Array) else x for x in flatten(a)[0]]
    return max(float((x - y).abs().max()) for x, y in zip(full, flatten(b)[0], strict=True))


def run(grad_fn: Callable[..., Any], opt: Any, steps: int = 3) -> tuple[Any, Any]:
    """State and values on the mesh after some steps, and those of the plain optimizer on the whole batch."""
    if hasattr(opt, "place"):
        params, moments = opt.place(PARAMS, MESH, SPECS)
    else:
        params = vf.device_put(PARAMS, SPECS, MESH)
        moments = opt.init(params)
    state, batch = {"params": params, "opt": moments}, vf.device_put((X, Y), "b/dp _", MESH)
    step, values = vf.pjit(step_of(grad_fn, opt), donate_argnums=0), []
    for _ in range(steps):
        state, value = step(state, *batch)
        values.append(value)
    return state, values


def plain(grad_fn: Callable[..., Any], opt: Any, steps: int = 3) -> tuple[Any, Any]:
    state, values = {"params": PARAMS, "opt": opt.init(PARAMS)}, []
    for _ in range(steps):
        state, value = step_of(grad_fn, opt)(state, X, Y)
        values.append(value)
    return state, values


# ---- the table of pairs

ADAMW = vf.optim.adamw(lr=1e-2)
REMAT, CAST = schedules.remat, lambda f: schedules.mixed_precision(f, torch.float64, torch.float64)
MAKERS: dict[str, tuple[Kind, Callable[[Any], Any]]] = {
    "remat": ("loss", REMAT),
    "mixed_precision": ("loss", CAST),
    "accumulate": ("gradient function", lambda f: schedules.accumulate(f, 2)),
    "zero": ("optimizer", lambda o: schedules.zero(o, "dp", stage=2)),
    "offload": ("optimizer", schedules.offload),
    "pjit": ("step", vf.pjit),
}
PLAIN: dict[Kind, Any] = {
    "loss": loss,
    "gradient function": vf.grad_and_value(loss),
    "optimizer": ADAMW,
    "step": step_of(vf.grad_and_value(loss), ADAMW),
}


def test_the_table_of_kinds_names_every_transform() -> None:
    stated = {(name.rpartition(".")[2], kind) for kind, names in TRANSFORMS.items() for name in names}
    assert stated == {(name, kind) for name, (kind, _) in MAKERS.items()}


@pytest.mark.parametrize("inner", MAKERS)
@pytest.mark.parametrize("outer", MAKERS)
def test_transforms_compose_within_a_kind_and_refuse_others(outer: str, inner: str) -> None:
    """Around a transform of the same kind, the result is still the plain function's; others are named."""
    (wants, wrap), (kind, within) = MAKERS[outer], MAKERS[inner]
    made = within(PLAIN[kind])
    if outer == "pjit":  # a step is any function
        assert isinstance(wrap(made if callable(made) else made.step_fn), type(vf.pjit(loss)))
        return
    if wants != kind:
        with pytest.raises(TypeError, match=rf"schedules\.{outer} transforms an? {wants}, but was given an? {kind}, "):
            wrap(made)
        return
    chosen = {**PLAIN, kind: wrap(made)}
    if kind == "loss":
        chosen["gradient function"] = vf.grad_and_value(chosen["loss"])
    got = run(chosen["gradient function"], chosen["optimizer"])
    assert largest_difference(got, plain(grad_and_value(loss), ADAMW)) < 1e-12


def test_all_together() -> None:
    """Every transform of every kind, one inside the other, on a mesh of two axes."""
    layered = CAST(REMAT(loss, "dots"))
    opt = schedules.zero(vf.optim.adamw(lr=1e-2), "dp", stage=3)
    grad_fn = schedules.accumulate(vf.grad_and_value(layered), 3, optimizer=opt)
    assert grad_fn.reduce == "microbatch"
    assert largest_difference(run(grad_fn, opt), plain(grad_and_value(loss), ADAMW)) < 1e-12


# ---- accumulate


@pytest.mark.parametrize("reduce", ["step", "microbatch"])
@pytest.mark.parametrize("kind", ["torch", "own", "weighted"])
def test_accumulated_gradients_are_those_of_the_whole_batch(kind: str, reduce: Any) -> None:
    grad_fn = {
        "torch": grad_and_value(loss),
        "own": vf.grad_and_value(loss),
        "weighted": vf.grad_and_value(masked),
    }[kind]
    parts = schedules.accumulate(grad_fn, 3, reduce=reduce)
    want = grad_fn(PARAMS, X, Y)
    assert largest_difference(parts(PARAMS, X, Y), want) < 1e-12
    args = vf.device_put((PARAMS, X, Y), (SPECS, "b/dp _", "b/dp _"), MESH)
    assert largest_difference(vf.pjit(parts)(*args), want) < 1e-12


def test_weighted_is_not_the_mean_of_means() -> None:
    """The rows that count are spread unevenly over microbatches, so the mean of their means is another number."""
    rows = [i for i in range(12) if Y[i, 0] > 0]
    assert len({len([i for i in rows if i % 3 == part]) for part in range(3)}) > 1
    value = schedules.accumulate(vf.grad_and_value(masked), 3)(PARAMS, X, Y)[1]
    means = [masked(PARAMS, X[i::3], Y[i::3]).mean for i in range(3)]
    assert abs(float(value) - float(masked(PARAMS, X, Y).mean)) < 1e-12
    assert abs(float(value) - float(sum(means) / 3)) > 1e-3


def test_counts_of_accumulation() -> None:
    """ "step" reduces once after the loop, "microbatch" in each iteration; the loss always once."""
    args = vf.device_put((PARAMS, X, Y), ("...", "b/dp _", "b/dp _"), vf.make_mesh(dp=2))
    rows = {
        reduce: [
            (c.kind, c.operands, c.count)
            for c in vf.pjit(schedules.accumulate(vf.grad_and_value(loss), 3, reduce=reduce)).lower(*args).collectives
        ]
        for reduce in ("step", "microbatch")
    }
    assert rows["step"] == [("all_reduce", 4, 1)]
    assert sum(n * count for _, n, count in rows["microbatch"]) == 3 * 3 + 1
    assert {kind for kind, _, _ in rows["microbatch"]} == {"all_reduce"}


def test_microbatches_stay_on_their_ranks() -> None:
    """No row of the batch moves: nothing is sent but sums."""
    args = vf.device_put((PARAMS, X, Y), ("...", "b/dp _", "b/dp _"), vf.make_mesh(dp=2))
    found = vf.pjit(schedules.accumulate(grad_and_value(loss), 3)).lower(*args).collectives
    assert {c.kind for c in found} == {"all_reduce"}


def test_other_dims_and_leaves_without_dims() -> None:
    def scaled(p: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (mlp(p, x.t()) * scale).square().mean()

    got = schedules.accumulate(grad_and_value(scaled), 4, dim=-1)(PARAMS, X.t(), torch.tensor(2.0, dtype=F64))
    assert largest_difference(got, grad_and_value(scaled)(PARAMS, X.t(), torch.tensor(2.0, dtype=F64))) < 1e-12


# ---- remat

POLICIES: dict[str, tuple[Any, int]] = {  # and the values that are kept of the function below
    "whole": ("whole", 0),
    "dots": ("dots", 2),
    "names": (schedules.names("hidden"), 1),
    "budget of one": (schedules.budget(12 * 8 * 8), 1),
    "budget of all": (schedules.budget(2**20), 3),
}


@pytest.mark.parametrize("name", POLICIES)
def test_remat_keeps_what_the_policy_says(name: str) -> None:
    policy, kept = POLICIES[name]
    rematted = schedules.remat(mlp, policy)

    def loss_of(fn: Any) -> Any:
        return grad_and_value(lambda p, x, y: (fn(p, x) - y).square().mean())

    args = vf.device_put((PARAMS, X, Y), (SPECS, "b/dp _", "b/dp _"), MESH)
    assert largest_difference(vf.pjit(loss_of(rematted))(*args), loss_of(mlp)(PARAMS, X, Y)) < 1e-12
    forward = next(e.op for e in vf.pjit(loss_of(rematted)).trace(*args).graph.eqns if isinstance(e.op, Call))
    assert len(forward.body.outputs) == 1 + kept


def test_remat_none_is_the_function() -> None:
    args = vf.device_put((PARAMS, X, Y), (SPECS, "b/dp _", "b/dp _"), MESH)
    assert not any(isinstance(e.op, Call) for e in vf.pjit(schedules.remat(loss, "none")).trace(*args).graph.eqns)


def test_remat_takes_memory_away() -> None:
    """A deep chain of elementwise operations: whole keeps only its input."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(x)
        return x.sum()

    x = vf.device_put(normal(64, 16), "b/dp _", MESH)
    peak = {
        p: vf.pjit(grad_and_value(schedules.remat(chain, p))).lower(x).memory_analysis().peak for p in ("none", "whole")
    }
    assert peak["whole"] <= peak["none"]


def test_derivatives_of_derivatives_of_a_policy() -> None:
    fn = schedules.remat(lambda w, x: torch.tanh(x @ w).square().sum(), "dots")

    def twice(f: Any) -> Any:
        return torch.func.grad(lambda w, x: torch.func.grad(f)(w, x).square().sum())

    args = vf.device_put((PARAMS["up"], X), ("...", "b/dp _"), MESH)
    want = twice(lambda w, x: torch.tanh(x @ w).square().sum())(PARAMS["up"], X)
    assert largest_difference(vf.pjit(twice(fn))(*args), want) < 1e-12


# ---- mixed precision

LOW = {k: p.float() for k, p in PARAMS.items()}


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["...", "d/dp ..."])
def test_gradients_are_reduced_in_the_stated_dtype(spec: str, reduce: torch.dtype) -> None:
    args = vf.device_put((LOW, X.float(), Y.float()), (spec, "b/dp _", "b/dp _"), vf.make_mesh(dp=2))
    grad_fn = vf.grad_and_value(schedules.mixed_precision(loss, reduce=reduce))
    found = vf.pjit(grad_fn).lower(*args).collectives
    reductions = [c for c in found if c.kind in ("all_reduce", "reduce_scatter")]
    assert sum(c.operands for c in reductions) == 4  # three gradients, and the loss
    assert {c.dtype for c in reductions} == {reduce}
    gathers = [c for c in found if c.kind == "all_gather"]
    assert {c.dtype for c in gathers} <= {torch.bfloat16}  # cast before it is sent
    assert bool(gathers) == (spec != "...")
    got, want = vf.pjit(grad_fn)(*args), vf.grad_and_value(loss)(PARAMS, X, Y)
    assert {x.dtype for x in flatten(got)[0]} == {torch.float32}
    assert largest_difference(got, want) < 0.05


def test_reduction_in_a_loop_is_wide_too() -> None:
    grad_fn = vf.grad_and_value(schedules.mixed_precision(loss))
    args = vf.device_put((LOW, X.float(), Y.float()), ("...", "b/dp _", "b/dp _"), vf.make_mesh(dp=2))
    for reduce in ("step", "microbatch"):
        found = vf.pjit(schedules.accumulate(grad_fn, 3, reduce=reduce)).lower(*args).collectives
        assert {c.dtype for c in found} == {torch.float32}


def test_wide_sums_are_exact_where_narrow_ones_round() -> None:
    """256 on one rank and 1 on the other: bfloat16 has no 257."""
    w, x = torch.ones(16), torch.zeros(512, 16)
    x[0], x[256] = 256.0, 1.0
    args = vf.device_put((w, x), ("...", "b/dp _"), vf.make_mesh(dp=2))
    for reduce, want in ((torch.float32, 257.0), (torch.bfloat16, 256.0)):
        low = schedules.mixed_precision(lambda w, x: (w * x).sum(), reduce=reduce)
        grads, _ = vf.pjit(vf.grad_and_value(low))(*args)
        assert torch.equal(grads.full(), torch.full((16,), want))


# ---- bad input


def message(fn: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        fn()
    return str(caught.value)


def test_messages_of_kinds() -> None:
    assert message(lambda: schedules.accumulate(schedules.remat(loss), 2), TypeError) == (
        f"schedules.accumulate transforms a gradient function, but was given a loss, {schedules.remat(loss)!r}. "
        "Take its gradient first, with vf.grad_and_value(loss)."
    )
    assert message(lambda: schedules.remat(vf.optim.sgd(lr=1.0)), TypeError) == (
        "schedules.remat transforms a loss, but was given an optimizer, sgd(lr=1.0, momentum=0.0, weight_decay=0.0). "
        "An optimizer is transformed by schedules.zero and schedules.offload."
    )
    assert message(lambda: schedules.zero(loss, stage=1), TypeError) == (
        "schedules.zero transforms an optimizer, but was given loss, which is none. Optimizers are made by vf.optim."
    )
    assert message(lambda: schedules.accumulate(loss, 2)(PARAMS, X, Y), TypeError) == (
        "schedules.accumulate transforms a gradient function, but was given a loss, loss. Take its gradient first, "
        "with vf.grad_and_value(loss)."
    )
    assert message(lambda: vf.grad_and_value(grad_and_value(loss))(PARAMS, X, Y), TypeError) == (
        "vf.grad_and_value transforms a loss, but was given a gradient function, loss. Transform the loss before you "
        "take its gradient."
    )


def test_messages_of_accumulate() -> None:
    grad_fn = grad_and_value(loss)
    assert message(lambda: schedules.accumulate(grad_fn, 0)) == (
        "schedules.accumulate: microbatches=0 must be at least 1."
    )
    assert message(lambda: schedules.accumulate(grad_fn, 2, reduce="never")) == (
        "schedules.accumulate: reduce='never' must be 'step' or 'microbatch'."
    )
    assert message(lambda: schedules.accumulate(grad_fn, 5)(PARAMS, X, Y)) == (
        "schedules.accumulate: argument 0 of the batch has shape [12, 6]: its dim 0 of 12 rows cannot be cut into 5 "
        "microbatches of equal size. Choose a number that divides it, or pad the batch and return vf.weighted(sum, "
        "count) from the loss."
    )
    assert message(lambda: schedules.accumulate(grad_fn, 2, dim=2)(PARAMS, X, Y)) == (
        "schedules.accumulate: argument 0 of the batch has shape [12, 6], and so no dim 2 to cut into microbatches. "
        "State another `dim`."
    )
    assert message(lambda: schedules.accumulate(grad_fn, 2)(PARAMS)) == (
        "schedules.accumulate: the batch has no tensor with dims that could be cut into microbatches."
    )
    assert message(lambda: schedules.accumulate(lambda p, x: ({}, x.sum()), 2)(PARAMS, X)) == (
        "schedules.accumulate: the gradients must have the form of the parameters, but they differ in bias, down, up."
    )
    assert message(lambda: schedules.accumulate(lambda p, x: (p, x), 2)(PARAMS, X), TypeError) == (
        "schedules.accumulate: the value that <lambda> returns must be a 0-d floating-point tensor, but it is a tensor "
        "of shape [6, 6]."
    )
    assert message(lambda: schedules.accumulate(lambda p, x: [p, x], 2)(PARAMS, X), TypeError) == (
        "schedules.accumulate: <lambda> must return (grads, value), but it returned a list."
    )


FIX = (
    "so microbatches with few items would count as much as full ones. Return vf.weighted(sum, count) from the loss, "
    "and take its gradient with vf.grad_and_value."
)
LABELS = torch.arange(12) % 4
MEANS: dict[str, tuple[Any, str]] = {
    "ignored labels": (
        lambda p, x: F.cross_entropy(mlp(p, x[:, :6]), x[:, 6].long(), ignore_index=0),
        "F.cross_entropy leaves out the labels 0",
    ),
    "weights": (
        lambda p, x: F.cross_entropy(mlp(p, x[:, :6]), x[:, 6].long(), torch.ones(4, dtype=F64)),
        "F.cross_entropy weighs classes",
    ),
    "mask": (
        lambda p, x: mlp(p, x[:, :6]).square().sum() / (x[:, 0] > 0).sum(),
        "the loss is divided by a number that depends on the batch",
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_with_padding_is_refused(name: str) -> None:
    uneven, why = MEANS[name]
    x = torch.cat([X, LABELS[:, None].double()], 1)
    for grad_fn in (grad_and_value(uneven), vf.grad_and_value(uneven)):
        parts = schedules.accumulate(grad_fn, 2)
        want = f"schedules.accumulate: {why}, {FIX}"
        assert message(lambda parts=parts: parts(PARAMS, x)) == want
        arrays = vf.device_put((PARAMS, x), ("...", "b/dp _"), MESH)
        assert message(lambda parts=parts, arrays=arrays: vf.pjit(parts)(*arrays)) == want


def test_an_even_mean_is_not_refused() -> None:
    def even(p: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = mlp(p, x[:, :6])
        return F.cross_entropy(h, x[:, 6].long()) + h.square().sum() / x.shape[0] + h.mean() / h.detach().abs().max()

    x = torch.cat([X, LABELS[:, None].double()], 1)
    schedules.accumulate(vf.grad_and_value(even), 2)(PARAMS, x, torch.tensor(3.0))


def test_messages_of_losses() -> None:
    assert message(lambda: vf.weighted(X, X.sum())) == (
        "vf.weighted: sum must be a 0-d tensor, but it is a tensor of shape [12, 6]."
    )
    assert message(lambda: vf.weighted(X.sum(), 12)) == "vf.weighted: count must be a 0-d tensor, but it is int."
    assert message(lambda: vf.grad_and_value(mlp)(PARAMS, X), TypeError) == (
        "vf.grad_and_value: mlp must return a 0-d tensor or vf.weighted(sum, count), but it returned a tensor of shape "
        "[12, 4]."
    )
    assert message(lambda: schedules.mixed_precision(loss)(PARAMS, X, Y), TypeError) == (
        "schedules.mixed_precision: the parameter up is torch.float64, but params=torch.float32. Convert it, or state "
        "its dtype."
    )
    assert message(lambda: schedules.mixed_precision(loss, reduce=torch.float16)) == (
        "schedules.mixed_precision: reduce=torch.float16 must be the dtype of the parameters, torch.float32, or the "
        "one that the loss computes in, torch.bfloat16."
    )
    assert message(lambda: schedules.mixed_precision(loss, compute=torch.int8)) == (
        "schedules.mixed_precision: compute=torch.int8 is no floating-point dtype."
    )


def test_messages_of_remat() -> None:
    assert message(lambda: schedules.remat(loss, "some")) == (
        "schedules.remat: there is no policy 'some': there are 'whole', 'none', 'dots', schedules.names(...) and "
        "schedules.budget(nbytes)."
    )
    assert message(lambda: schedules.budget(-1)) == "schedules.budget: nbytes=-1 must not be negative."
    named = vf.pjit(grad_and_value(schedules.remat(loss, schedules.names("logits"))))
    args = vf.device_put((PARAMS, X, Y), "...", MESH)
    assert re.match(
        r"remat: the policy keeps 'logits', but the function names no such value \(it names: 'hidden'\)\. Name it "
        r'where it is computed: x = vf\.named\(x, "logits"\)\.',
        message(lambda: named(*args)),
    )
