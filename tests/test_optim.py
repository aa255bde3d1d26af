"""Optimizers against torch.optim with fused=True, bit for bit; schedules; clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.func import grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

import vescale_fn as vf
from vescale_fn import fused, optim
from vescale_fn.sharding.graph import Eqn, Var

SHAPES = {"a": (7, 5), "b": (33,), "c": (), "d": (4, 3, 8), "empty": (0, 3)}


def params_of(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=gen).to(dtype) for k, s in SHAPES.items()}


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for k in theirs:
        torch.testing.assert_close(ours[k], theirs[k], rtol=0, atol=0, equal_nan=True, msg=k)


def race(opt: optim.Optimizer, torch_class: Any, lr_lambda: Any = None, dtype: Any = torch.float32, **kw: Any) -> None:
    """20 steps of both on the same gradients."""
    ours = params_of(0, dtype)
    theirs = {k: v.clone().requires_grad_() for k, v in ours.items()}
    reference = torch_class(theirs.values(), fused=True, **kw)
    scheduler = torch.optim.lr_scheduler.LambdaLR(reference, lr_lambda) if lr_lambda else None
    state = opt.init(ours)
    for i in range(20):
        grads = params_of(i + 1, dtype)
        for k, p in theirs.items():
            p.grad = grads[k].clone()
        reference.step()
        if scheduler:
            scheduler.step()
        ours, state = opt.step(grads, state, ours)
    assert float(state["step"]) == 20
    assert_same_bits(ours, {k: p.detach() for k, p in theirs.items()})
    for moment in state.keys() - {"step"}:
        assert_same_bits(state[moment], {k: reference.state[p][moment] for k, p in theirs.items()})


@pytest.mark.parametrize(("amsgrad", "maximize", "weight_decay"), product([False, True], [False, True], [0.0, 0.1]))
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_adam_is_torch_bit_for_bit(name: str, amsgrad: bool, maximize: bool, weight_decay: float) -> None:
    kw: Any = {
        "lr": 3e-2,
        "betas": (0.8, 0.95),
        "eps": 1e-7,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    race(getattr(optim, name)(**kw), {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name], **kw)


@pytest.mark.parametrize(
    "kw",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "maximize": True},
        {"weight_decay": 0.1, "maximize": True},
    ],
)
def test_sgd_is_torch_bit_for_bit(kw: dict[str, Any]) -> None:
    race(optim.sgd(lr=3e-2, **kw), torch.optim.SGD, lr=3e-2, **kw)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    race(optim.adamw(lr=1e-2), torch.optim.AdamW, lr=1e-2, dtype=dtype)


def test_defaults_are_those_of_torch() -> None:
    race(optim.adamw(), torch.optim.AdamW)
    race(optim.adam(), torch.optim.Adam)
    race(optim.sgd(), torch.optim.SGD)


def test_tensor_learning_rate() -> None:
    race(optim.adamw(lr=torch.tensor(0.125)), torch.optim.AdamW, lr=0.125)


def test_schedule_sees_the_number_of_updates_done() -> None:
    """Powers of two are exact, so that torch's LambdaLR is matched bit for bit."""
    race(
        optim.adamw(lr=lambda step: 0.25 * 0.5**step),
        torch.optim.AdamW,
        lr=0.25,
        lr_lambda=lambda step: 0.5**step,
    )


@pytest.mark.parametrize("warmup", [0, 4])
def test_warmup_cosine(warmup: int) -> None:
    rate = optim.warmup_cosine(0.5, warmup, 20, floor=0.1)
    for step in range(25):
        done = min(max(step - warmup, 0) / (20 - warmup), 1.0)
        expected = 0.5 * (step + 1) / warmup if step < warmup else 0.1 + 0.4 * 0.5 * (1 + math.cos(math.pi * done))
        assert float(rate(torch.tensor(float(step), dtype=torch.float64))) == pytest.approx(expected, rel=1e-12)


def test_any_tree_and_none_leaves() -> None:
    params = {"blocks": [{"w": torch.ones(2, 2)}, {"w": None}], "scale": (torch.ones(()),)}
    grads = {"blocks": [{"w": torch.ones(2, 2)}, {"w": None}], "scale": (None,)}
    opt = optim.adamw(lr=0.1, weight_decay=0.0)
    state = opt.init(params)
    assert state["exp_avg"]["blocks"][1]["w"] is None
    new, state = opt.step(grads, state, params)
    assert new["blocks"][1]["w"] is None
    assert torch.allclose(new["blocks"][0]["w"], torch.full((2, 2), 0.9))
    assert float(new["scale"][0]) == 1.0  # no gradient: left alone
    assert float(state["exp_avg_sq"]["scale"][0]) == 0.0


def test_dtypes_are_grouped() -> None:
    params = {"half": torch.ones(3, dtype=torch.bfloat16), "single": torch.ones(3)}
    new, _ = optim.sgd(lr=0.5).step(params, optim.sgd().init(params), params)
    assert {k: v.dtype for k, v in new.items()} == {"half": torch.bfloat16, "single": torch.float32}
    assert all(v.tolist() == [0.5] * 3 for v in new.values())


def test_arguments_are_left_alone() -> None:
    params, grads = params_of(0), params_of(1)
    opt = optim.adamw(lr=0.1)
    state = opt.init(params)
    opt.step(grads, state, params)
    assert_same_bits(params, params_of(0))
    assert_same_bits(grads, params_of(1))
    assert float(state["step"]) == 0
    assert all(not m.any() for m in state["exp_avg"].values())


@pytest.mark.parametrize(
    "opt",
    [
        optim.adamw(lr=0.1),
        optim.adam(lr=optim.warmup_linear(0.1, 2, 9), amsgrad=True),
        optim.sgd(lr=0.1, momentum=0.9),
    ],
    ids=str,
)
def test_one_node_under_make_fx(opt: optim.Optimizer) -> None:
    def step(params: Any, state: Any, x: torch.Tensor) -> Any:
        grads, value = grad_and_value(lambda p: sum((p[k].sin() * x).sum() for k in p))(params)
        return (*opt.step(grads, state, params), value)

    params = params_of(0)
    args = (params, opt.init(params), torch.tensor(2.0))
    graph = make_fx(step, tracing_mode="fake")(*args)
    assert sum(n.target in fused.IN_PLACE for n in graph.graph.nodes) == 1
    for new, want in zip(graph(*args)[:2], step(*args)[:2]):
        leaves = [torch.utils._pytree.tree_leaves(t) for t in (new, want)]
        assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))


@pytest.mark.parametrize("op", fused.IN_PLACE, ids=str)
def test_in_place_form_writes_what_the_functional_form_returns(op: Any) -> None:
    names = [a.name for a in op._schema.arguments if not a.kwarg_only]
    kw = {a.name: {"float": 0.5, "bool": False}[str(a.type)] for a in op._schema.arguments if a.kwarg_only}
    args = [[t.abs() for t in params_of(i).values()] for i, _ in enumerate(names[:-3])]
    if "max_exp_avg_sqs" in names:
        args[-1] = []  # no amsgrad
    lr = torch.tensor(0.1) if op._overloadname == "tensor_lr" else 0.1
    expected = op(*args, torch.ones(()), lr, None, **kw)
    results = fused.IN_PLACE[op](*args, torch.ones(()), lr, None, **kw)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert all(a is b for a, b in zip(results, fused.written(args), strict=True))


def test_rule_ties_the_lists_element_by_element() -> None:
    def column(name: str) -> list[Var]:
        return [Var(name, (4, 6), torch.float32), Var(name, (8,), torch.float32)]

    lists = [column(n) for n in ("p", "g", "m", "v")]
    step = Var("step", (), torch.float32)
    op = torch.ops.vescale_fn.fused_adam.default
    eqn = Eqn(op, (*lists, [], step, 0.1, None), {}, (*column("p2"), *column("m2"), *column("v2")))
    rule = fused.RULES[op](eqn)
    assert rule is not None
    assert str(rule) == (
        "p0d0 p0d1, p1d0, p0d0 p0d1, p1d0, p0d0 p0d1, p1d0, p0d0 p0d1, p1d0,  -> "
        "p0d0 p0d1, p1d0, p0d0 p0d1, p1d0, p0d0 p0d1, p1d0"
    )
    assert not rule.linear
    assert not rule.through


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_is_torch(norm_type: float, max_norm: float) -> None:
    grads = params_of(0, torch.float64)
    leaves = [torch.zeros_like(g).requires_grad_() for g in grads.values()]
    for p, g in zip(leaves, grads.values()):
        p.grad = g.clone()
    clipped, norm = optim.clip_by_global_norm(grads, max_norm, norm_type)
    nonempty = [p for p in leaves if p.numel()]  # torch refuses the maximum of nothing
    expected = torch.nn.utils.clip_grad_norm_(nonempty, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
    for p, g in zip(leaves, clipped.values()):
        torch.testing.assert_close(g, p.grad, rtol=1e-14, atol=0)


def test_clipping_half_precision_sums_in_float32() -> None:
    grads = {"w": torch.full((4096,), 0.5, dtype=torch.bfloat16), "none": None}
    clipped, norm = optim.clip_by_global_norm(grads, 1.0)
    assert norm.dtype == torch.float32
    assert float(norm) == 32.0
    assert clipped["w"].dtype == torch.bfloat16
    assert clipped["none"] is None


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: optim.adamw(lr=-1.0), "adamw: lr=-1.0 must not be negative."),
        (lambda: optim.adam(betas=(0.9, 1.0)), "adam: betas=(0.9, 1.0) must both lie in [0, 1)."),
        (lambda: optim.sgd(nesterov=True), "sgd: nesterov=True needs momentum > 0 and dampening=0."),
        (lambda: optim.warmup_cosine(1.0, 5, 5), "warmup=5 must be at least 0 and less than total=5."),
        (
            lambda: optim.clip_by_global_norm({}, 1.0, 3),
            "clip_by_global_norm: norm_type=3 is not known; it must be 2 or math.inf.",
        ),
        (
            lambda: optim.sgd().init({"w": [torch.ones(2, dtype=torch.int64)]}),
            "sgd(lr=0.001, momentum=0.0, weight_decay=0.0): w.0 is torch.int64; only floating-point tensors can be "
            "trained. Keep other values in a tree of their own.",
        ),
        (
            lambda: optim.sgd().step(
                {"w": torch.ones(3)}, optim.sgd().init({"w": torch.ones(2)}), {"w": torch.ones(2)}
            ),
            "sgd(lr=0.001, momentum=0.0, weight_decay=0.0): the gradient of w is torch.float32 of shape [3], but the "
            "parameter is torch.float32 of shape [2].",
        ),
    ],
)
def test_messages(act: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as e:
        act()
    assert str(e.value) == message


def test_state_of_arrays_lives_where_the_parameters_do() -> None:
    mesh = vf.make_mesh(dp=2, tp=3)
    params = vf.device_put(
        {"w": torch.ones(4, 6), "b": torch.ones(5), "none": None}, {"w": "a/dp b/tp", "b": "b~/tp", "none": None}, mesh
    )
    opt = optim.adamw(lr=0.1, amsgrad=True)
    state = opt.init(params)
    for moment in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert state[moment]["w"].layout == params["w"].layout
        assert state[moment]["b"].layout == params["b"].layout
        assert state[moment]["none"] is None
        assert not state[moment]["w"].full().any()
    assert state["step"].layout.is_whole


@pytest.mark.parametrize("opt", [optim.adamw(lr=0.1), optim.sgd(lr=0.1, momentum=0.9)], ids=str)
def test_steps_on_arrays_are_those_on_tensors(opt: optim.Optimizer) -> None:
    mesh = vf.make_mesh(dp=2, tp=2)
    whole = {k: v for k, v in params_of(0, torch.float64).items() if k in "ad"}
    specs = {"a": "a~/dp b", "d": "x/dp y z/tp"}
    placed, state, expected = vf.device_put(whole, specs, mesh), opt.init(whole), whole
    sharded_state = opt.init(placed)
    for i in range(3):
        grads = {k: v for k, v in params_of(i + 1, torch.float64).items() if k in "ad"}
        expected, state = opt.step(grads, state, expected)
        placed, sharded_state = opt.step(vf.device_put(grads, specs, mesh), sharded_state, placed)
    for k, p in expected.items():
        assert placed[k].layout == vf.device_put(whole, specs, mesh)[k].layout
        torch.testing.assert_close(placed[k].full(), p, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_arrays(norm_type: float) -> None:
    mesh = vf.make_mesh(dp=2, tp=2)
    whole = {k: v for k, v in params_of(0, torch.float64).items() if k in "ad"}
    specs = {"a": "a~/dp b", "d": "x/(dp tp) y z"}
    expected, norm = optim.clip_by_global_norm(whole, 0.5, norm_type)
    clipped, found = optim.clip_by_global_norm(vf.device_put(whole, specs, mesh), 0.5, norm_type)
    torch.testing.assert_close(found.full(), norm, rtol=1e-12, atol=0)
    for k, g in expected.items():
        torch.testing.assert_close(clipped[k].full(), g, rtol=1e-12, atol=1e-14)


def test_state_on_an_abstract_mesh() -> None:
    mesh = vf.abstract_mesh(dp=512, tp=8)
    params = vf.device_put({"w": vf.ShapeDtype((4096, 64))}, {"w": "a/dp b/tp"}, mesh)
    opt = optim.adamw(lr=optim.warmup_cosine(0.1, 2, 9))
    state = opt.init(params)
    assert state["exp_avg_sq"]["w"].layout == params["w"].layout
    lowered = vf.pjit(lambda g, s, p: opt.step(g, s, p)).lower(params, state, params)
    assert len(lowered.collectives) == 0
