"""Transforms of optimizers: clipping, skipped steps, loss scaling, averages, groups, masks, and what goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad_and_value

import vescale_fn as vf
from vescale_fn import optim
from vescale_fn.sharding.graph import op_name
from vescale_fn.tree import flatten

SHAPES = {"up": {"weight": (8, 4), "bias": (4,)}, "down": {"weight": (4, 6), "bias": (6,)}}
SPECS = {"up": {"weight": "a/dp b/tp", "bias": "b/tp"}, "down": {"weight": "a/tp b", "bias": "b"}}


def tree(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    gen = torch.Generator().manual_seed(seed)
    return {
        k: {n: torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for n, s in v.items()}
        for k, v in SHAPES.items()
    }


def leaves(t: Any) -> list[torch.Tensor]:
    return [x.full() if isinstance(x, vf.Array) else x for x in flatten(t)[0]]


def assert_same(a: Any, b: Any, tolerance: float = 0.0) -> None:
    assert flatten(a)[1] == flatten(b)[1]
    for x, y in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)


def run(opt: optim.Optimizer, gradients: Any, put: Any = lambda t: t) -> tuple[Any, Any]:
    """Parameters and state after these gradients."""
    params = put(tree(0))
    state = opt.init(params)
    for g in gradients:
        params, state = opt.step(put(g), state, params)
    return params, state


BROKEN = tree(3)
BROKEN["down"]["bias"][2] = math.nan
HUGE = tree(4)
HUGE["up"]["weight"][0, 0] = -math.inf

FOUR = {
    "clip_norm": optim.chain(optim.clip_norm(0.5), optim.adamw(lr=0.1)),
    "clip_value": optim.chain(optim.clip_value(0.5), optim.rmsprop(lr=0.1)),
    "skip_nonfinite": optim.chain(optim.skip_nonfinite(), optim.clip_norm(1.0), optim.ema(0.9), optim.adamw(lr=0.1)),
    "skip_unfused": optim.chain(optim.skip_nonfinite(), optim.adafactor(lr=0.1)),
    "loss_scale": optim.chain(optim.loss_scale(8.0, interval=1), optim.ema(0.5), optim.sgd(lr=0.1, momentum=0.9)),
    "groups": optim.groups(
        {"*.bias": optim.sgd(lr=0.1), "up.*": optim.muon(lr=0.1, precision=torch.float64), "*": None}
    ),
    "groups in a chain": optim.chain(
        optim.skip_nonfinite(), optim.groups({"*.bias": optim.adagrad(), "*": optim.adamw(lr=0.1, amsgrad=True)})
    ),
}


@pytest.mark.parametrize("name", FOUR)
def test_on_arrays_they_are_what_they_are_on_tensors(name: str) -> None:
    opt, mesh = FOUR[name], vf.make_mesh(dp=2, tp=2)
    gradients = [tree(1), BROKEN, tree(2)] if "skip" in name or "scale" in name else [tree(1), tree(2)]
    params, state = run(opt, gradients, lambda t: vf.device_put(t, SPECS, mesh))
    expected, expected_state = run(opt, gradients)
    assert_same(params, expected, 1e-11)
    assert_same(state, expected_state, 1e-11)
    assert all(isinstance(x, vf.Array) for x in flatten(state)[0] if x is not None)
    layouts = [p.layout for p in flatten(params)[0]]
    assert layouts == [x.layout for x in flatten(vf.device_put(tree(0), SPECS, mesh))[0]]


@pytest.mark.parametrize("name", FOUR)
def test_a_step_lowers_once(name: str) -> None:
    """The state that comes out is of the form of the state that goes in, layouts included."""
    opt, mesh = FOUR[name], vf.make_mesh(dp=2, tp=2)
    step = vf.pjit(lambda g, s, p: opt.step(g, s, p), donate_argnums=(1, 2))
    params = vf.device_put(tree(0), SPECS, mesh)
    state = opt.init(params)
    for i in range(3):
        params, state = step(vf.device_put(tree(i + 1), SPECS, mesh), state, params)
    assert step.cache_info() == (2, 1)


def test_chains_apply_from_left_to_right() -> None:
    opt = optim.chain(optim.clip_value(1.0), optim.clip_norm(0.5), optim.sgd(lr=1.0))
    grads = tree(1)
    clipped, _ = optim.clip_by_global_norm(optim.clip_by_value(grads, 1.0), 0.5)
    assert_same(run(opt, [grads])[0], run(optim.sgd(lr=1.0), [clipped])[0])
    assert repr(opt) == "chain(clip_value(1.0), clip_norm(0.5), sgd(lr=1.0, momentum=0.0, weight_decay=0.0))"
    assert repr(optim.ema(0.5)(opt)).startswith("chain(ema(0.5), clip_value(1.0), ")


def test_clipping_by_value_is_torch() -> None:
    grads = tree(1)
    params = [torch.zeros_like(g).requires_grad_() for g in leaves(grads)]
    for p, g in zip(params, leaves(grads)):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_value_(params, 0.7)
    for p, g in zip(params, leaves(optim.clip_by_value(grads, 0.7))):
        assert torch.equal(g, p.grad)


# ---- steps that are left out


@pytest.mark.parametrize("inner", ["adamw", "adam", "sgd", "rmsprop", "nadam", "asgd", "adafactor"])
@pytest.mark.parametrize("bad", [BROKEN, HUGE], ids=["nan", "inf"])
def test_a_skipped_step_is_as_if_it_had_not_been(inner: str, bad: Any) -> None:
    plain = getattr(optim, inner)(lr=0.1)
    params, state = run(optim.chain(optim.skip_nonfinite(), plain), [tree(1), bad, bad, tree(2)])
    expected, expected_state = run(plain, [tree(1), tree(2)])
    assert_same(params, expected)
    assert int(state.pop("skipped")) == 2
    assert_same(state, expected_state)


def test_fused_updates_are_skipped_in_place() -> None:
    """No second copy of parameters and moments, the kernel itself leaves them as they are; and one number for each
    axis tells the ranks whether to skip."""
    opt, mesh = optim.chain(optim.skip_nonfinite(), optim.adamw(lr=0.1)), vf.abstract_mesh(dp=2, tp=2)
    params = vf.device_put({k: vf.ShapeDtype((512, 512)) for k in "ab"}, {"a": "x/dp y", "b": "x y/tp"}, mesh)
    step = vf.pjit(lambda g, s, p: opt.step(g, s, p), donate_argnums=(1, 2))
    lowered = step.lower(params, opt.init(params), params)
    big = [e for e in lowered.program.graph.eqns if any(v.shape for v in e.outs) and e.phase == "forward"]
    assert {op_name(e.op) for e in big} == {"aten.abs", "aten.lt.Scalar", "aten.stack", "adam_"}
    assert [(c.kind, c.axes, c.nbytes) for c in lowered.collectives] == [
        ("all_reduce", ("dp",), 8),
        ("all_reduce", ("tp",), 8),
    ]


def test_outside_of_a_chain_the_step_can_be_told_what_to_skip() -> None:
    opt = optim.adamw(lr=0.1)
    params = tree(0)
    state = opt.init(params)
    assert_same(opt.step(tree(1), state, params, torch.tensor(True)), (params, state))
    assert_same(opt.step(tree(1), state, params, torch.tensor(False)), opt.step(tree(1), state, params))


# ---- loss scaling


def test_loss_scaling_is_grad_scaler() -> None:
    """The same scales, and the same parameters, as torch.amp.GradScaler, over growth, overflow and growth again."""
    settings = {"init": 4.0, "growth": 2.0, "backoff": 0.5, "interval": 3}
    opt = optim.chain(optim.loss_scale(**settings), optim.sgd(lr=0.5, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    theirs = w.clone().requires_grad_()
    reference = torch.optim.SGD([theirs], lr=0.5, momentum=0.9)
    params, state = {"w": w}, opt.init({"w": w})
    for i in range(12):
        x = torch.tensor([math.inf if i in (4, 5) else 1.0 + i, 0.5], dtype=torch.float64)

        def loss(p: Any, x: torch.Tensor = x, state: Any = state) -> torch.Tensor:
            return optim.scale_loss((p["w"] * x).sum(), state)

        grads, _ = grad_and_value(loss)(params)
        params, state = opt.step(grads, state, params)
        reference.zero_grad()
        scaler.scale((theirs * x).sum()).backward()
        scaler.step(reference)
        scaler.update()
        assert float(state["loss_scale"]["scale"]) == scaler.get_scale()
        torch.testing.assert_close(params["w"], theirs.detach(), rtol=1e-12, atol=0)
    assert {float(scaler.get_scale()), 4.0} == {8.0, 4.0}


def test_a_static_scale_stays() -> None:
    opt = optim.chain(optim.loss_scale(8.0, interval=None), optim.sgd(lr=1.0))
    params, state = run(opt, [tree(1), BROKEN, tree(2)])
    assert float(state["loss_scale"]["scale"]) == 8.0
    scaled = [{k: {n: g / 8 for n, g in v.items()} for k, v in tree(i).items()} for i in (1, 2)]
    assert_same(params, run(optim.sgd(lr=1.0), scaled)[0])


def test_half_precision_gradients_survive_a_scale_whose_inverse_they_cannot_hold() -> None:
    opt = optim.chain(optim.loss_scale(2.0**30, interval=None), optim.sgd(lr=1.0))
    params = {"w": torch.zeros(1, dtype=torch.float16)}
    new, _ = opt.step({"w": torch.full((1,), 32768.0, dtype=torch.float16)}, opt.init(params), params)
    assert float(new["w"]) == -(2.0**-15)


# ---- averages


def test_ema_is_torch() -> None:
    model = torch.nn.Linear(3, 2).double()
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)  # the first one copies
    reference = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = optim.chain(optim.ema(0.9), optim.sgd(lr=0.1))
    state = opt.init(params)
    gen = torch.Generator().manual_seed(0)
    for _ in range(20):
        grads = {k: torch.randn(p.shape, generator=gen, dtype=torch.float64) for k, p in params.items()}
        for k, p in model.named_parameters():
            p.grad = grads[k]
        reference.step()
        average.update_parameters(model)
        params, state = opt.step(grads, state, params)
    for k, p in average.module.named_parameters():
        torch.testing.assert_close(state["ema"][k], p.detach(), rtol=1e-14, atol=1e-14)


def test_averages_of_half_precision_are_kept_in_float32() -> None:
    opt = optim.chain(optim.ema(0.999), optim.sgd(lr=1.0))
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    _, state = opt.step(params, opt.init(params), params)
    assert state["ema"]["w"].dtype == torch.float32
    torch.testing.assert_close(state["ema"]["w"], torch.full((2,), 0.999))


def test_two_averages() -> None:
    opt = optim.chain(optim.ema(0.5), optim.ema(0.9, "slow"), optim.sgd(lr=1.0))
    _, state = run(opt, [tree(1)])
    assert set(state) == {"step", "ema", "slow"}
    with pytest.raises(ValueError, match="the state has an entry 'ema' already"):
        optim.chain(optim.ema(0.5), optim.ema(0.9), optim.sgd()).init(tree(0))


# ---- groups and masks


def test_groups_are_parameter_groups_of_torch() -> None:
    opt = optim.groups(
        {"*.bias": optim.adamw(lr=0.2, weight_decay=0.0), "up.*": optim.sgd(lr=0.1), "*": optim.adamw(lr=0.1)}
    )
    params = tree(0)
    theirs = {k: {n: p.clone().requires_grad_() for n, p in v.items()} for k, v in params.items()}
    biases = [theirs["up"]["bias"], theirs["down"]["bias"]]
    others = [
        torch.optim.AdamW(
            [{"params": biases, "lr": 0.2, "weight_decay": 0.0}, {"params": [theirs["down"]["weight"]]}],
            lr=0.1,
            fused=True,
        ),
        torch.optim.SGD([theirs["up"]["weight"]], lr=0.1, fused=True),
    ]
    state = opt.init(params)
    assert set(state) == {"*.bias", "up.*", "*"}
    assert state["*"]["exp_avg"]["up"] == {"weight": None, "bias": None}
    for i in range(20):
        grads = tree(i + 1)
        for k, v in theirs.items():
            for n, p in v.items():
                p.grad = grads[k][n]
        for o in others:
            o.step()
        params, state = opt.step(grads, state, params)
    assert_same(params, {k: {n: p.detach() for n, p in v.items()} for k, v in theirs.items()})


@pytest.mark.parametrize("make", [optim.adamw, optim.adam, optim.sgd, optim.adamax, optim.nadam, optim.adafactor])
def test_weight_decay_of_some(make: Any) -> None:
    """A mask is the same as two groups, but the state stays one."""
    masks: list[Any] = ["*.weight", ["up.weight", "down.weight"], lambda path, p: p.ndim == 2]
    split = optim.groups({"*.weight": make(lr=0.1, weight_decay=0.3), "*": make(lr=0.1, weight_decay=0.0)})
    expected, _ = run(split, [tree(1), tree(2)])
    for mask in masks:
        params, state = run(make(lr=0.1, weight_decay=0.3, decay=mask), [tree(1), tree(2)])
        assert_same(params, expected)
    assert set(state) == set(make(lr=0.1).init(tree(0)))


# ---- what goes wrong

ADAM = "adamw(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)"
SGD = "sgd(lr=0.001, momentum=0.9, weight_decay=0.0)"
REMEDY = "Start with opt.init(params), or go on with the optimizer and the parameters that this state was made for."
W = {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: optim.adamw().step(W, optim.sgd(momentum=0.9).init(W), W),
            f"{ADAM}: the state has step, momentum_buffer, but this optimizer keeps step, exp_avg, exp_avg_sq: it is "
            f"the state of another optimizer. {REMEDY}",
        ),
        (
            lambda: optim.adamw().step(W, W["w"], W),
            f"{ADAM}: the state is a Tensor, but this optimizer keeps a dict with step, exp_avg, exp_avg_sq. Arguments "
            "go in the order opt.step(grads, state, params).",
        ),
        (
            lambda: optim.sgd(momentum=0.9).step(W, optim.sgd(momentum=0.9).init({"w": torch.ones(3)}), W),
            f"{SGD}: the state's momentum_buffer of w is f32[3], but it needs one of shape [2]. {REMEDY}",
        ),
        (
            lambda: optim.sgd(momentum=0.9).step(W, optim.sgd(momentum=0.9).init({"v": torch.ones(2)}), W),
            f"{SGD}: the state's momentum_buffer is not of the form of the parameters. It lacks 'w'. It has 'v', which "
            f"the parameters do not. {REMEDY}",
        ),
        (
            lambda: optim.sgd(momentum=0.9).step(W, optim.sgd(momentum=0.9).init({"w": None}), W),
            f"{SGD}: the state's momentum_buffer of w is missing, but it needs one of shape [2]. {REMEDY}",
        ),
        (
            lambda: optim.sgd().step({"v": W["w"]}, optim.sgd().init(W), W),
            "sgd(lr=0.001, momentum=0.0, weight_decay=0.0): the tree of gradients is not of the form of the "
            "parameters. It lacks 'w'. It has 'v', which the parameters do not.",
        ),
        (
            lambda: optim.chain(optim.ema(0.9), optim.sgd()).step(W, optim.sgd().init(W), W),
            "ema(0.9): the state has no entry 'ema', which ema(0.9) keeps; it has step. It was made by an optimizer "
            "without it: start with opt.init(params) of the whole chain.",
        ),
        (
            lambda: optim.sgd().step(W, optim.chain(optim.ema(0.9), optim.sgd()).init(W), W),
            "sgd(lr=0.001, momentum=0.0, weight_decay=0.0): the state has step, ema, but this optimizer keeps step: it "
            f"is the state of another optimizer. {REMEDY}",
        ),
        (
            lambda: optim.scale_loss(W["w"], optim.sgd().init(W)),
            "scale_loss: the state has no entry 'loss_scale', which scale_loss keeps; it has step. It was made by an "
            "optimizer without it: start with opt.init(params) of the whole chain.",
        ),
        (
            lambda: optim.chain(optim.sgd(), optim.ema(0.9)),
            "chain: the last part must be an optimizer such as adamw(), not ema(0.9).",
        ),
        (lambda: optim.chain(), "chain: the last part must be an optimizer such as adamw(), not NoneType."),
        (
            lambda: optim.chain(optim.sgd(), optim.sgd()),
            "chain: sgd(lr=0.001, momentum=0.0, weight_decay=0.0) stands before the end, where only transforms such as "
            "clip_norm(1.0) may stand. For several optimizers, each with parameters of its own, use "
            "groups({glob: optimizer}).",
        ),
        (
            lambda: optim.groups({"*.bias": optim.sgd(), "*": None}).init(W),
            "groups: '*.bias' matches no parameter. The parameters are: 'w'.",
        ),
        (
            lambda: optim.groups({"up.*": optim.sgd()}).init(tree(0)),
            "groups: no glob matches 'down.weight', 'down.bias'. Add one, or end with '*': None, which leaves the rest "
            "as it is.",
        ),
        (
            lambda: optim.adamw(decay="*.kernel").step(W, optim.adamw().init(W), W),
            f"{ADAM}: decay: '*.kernel' matches no parameter. The parameters are: 'w'.",
        ),
        (lambda: optim.ema(1.5), "ema: decay=1.5 must lie in [0, 1]."),
        (
            lambda: optim.loss_scale(0.0),
            "loss_scale: init=0.0 must be positive, growth=2.0 at least 1, backoff=0.5 in (0, 1], and interval=2000 "
            "None or at least 1.",
        ),
        (lambda: optim.clip_norm(1.0, 3), "clip_norm: norm_type=3 is not known; it must be 2 or math.inf."),
    ],
)
def test_messages(act: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as e:
        act()
    assert str(e.value) == message


def test_the_state_of_another_optimizer_is_found_in_a_step() -> None:
    mesh, opt = vf.make_mesh(dp=2), optim.adamw()
    params = vf.device_put(W, {"w": "a/dp"}, mesh)
    with pytest.raises(ValueError, match="it is the state of another optimizer"):
        vf.pjit(opt.step)(params, optim.sgd(momentum=0.9).init(params), params)
