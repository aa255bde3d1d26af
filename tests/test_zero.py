"""ZeRO: numbers equal to one device, the collectives of each stage, and memory to the byte."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpt import MEGATRON, Sizes, data, init, make_step, rules_for
from pairwise import pairwise, whole
from test_memory import measured
from torch.func import grad_and_value

import vescale_fn as vf
from vescale_fn import optim, schedules
from vescale_fn.sharding.graph import Scan, equations
from vescale_fn.tree import flatten

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=F64) * 0.3


# ---- numbers: what is trained

Params = dict[str, torch.Tensor]


def even(p: Params, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def tied(p: Params, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["up"] + p["bias"]) @ p["up"].t() @ p["down"]


def tiny(p: Params, x: torch.Tensor) -> torch.Tensor:
    return even(p, x) * p["scale"] + p["shift"]


MODELS: dict[str, tuple[Callable[[Params, torch.Tensor], torch.Tensor], Params]] = {
    "even": (even, {"up": normal(12, 24), "bias": normal(24), "down": normal(24, 12)}),
    "uneven": (even, {"up": normal(12, 10), "bias": normal(10), "down": normal(10, 12)}),
    "tied": (tied, {"up": normal(12, 24), "bias": normal(24), "down": normal(12, 12)}),
    "tiny": (
        tiny,
        {"up": normal(12, 24), "bias": normal(24), "down": normal(24, 12), "scale": normal(1), "shift": normal()},
    ),
}
SPECS = {"up": "d f/tp", "bias": "f/tp", "*": "..."}
MESHES: dict[str, dict[str, int]] = {
    "dp=2": {"dp": 2},
    "dp=3": {"dp": 3},
    "dp=4": {"dp": 4},
    "dp=2,tp=2": {"dp": 2, "tp": 2},
    "node=2,dp=2": {"node": 2, "dp": 2},
}
OPTIMIZERS: dict[str, optim.Optimizer] = {
    "adamw": optim.adamw(lr=0.02),
    "momentum": optim.sgd(lr=0.05, momentum=0.9),
    "muon": optim.groups({"bias": optim.sgd(lr=0.1), "*": optim.muon(lr=0.05, precision=F64)}),
    "frozen": optim.groups({"bias": None, "*": optim.adamw(lr=0.02)}),
    "clipped": optim.chain(optim.clip_norm(0.1), optim.adamw(lr=0.02)),
    "adafactor": optim.adafactor(lr=0.02),
    "adamw8bit": optim.adamw8bit(lr=0.02, block=24),
}
AXES = {
    "stage": [1, 2, 3],
    "model": [*MODELS],
    "mesh": [*MESHES],
    "optimizer": [*OPTIMIZERS],
    "gradients": ["once", "step", "microbatch"],
}


SMALL = {"stage": 3, "model": "tiny", "mesh": "dp=2", "optimizer": "momentum", "gradients": "microbatch"}


def admits(c: dict[str, Any]) -> bool:
    return not (c["model"] == "tiny" and c["optimizer"] == "muon")  # which trains matrices only


def step_of(grad_fn: Callable[..., Any], opt: Any) -> Callable[..., Any]:
    def step(state: Any, *batch: torch.Tensor) -> Any:
        grads, value = grad_fn(state["params"], *batch)
        params, moments = opt.step(grads, state["opt"], state["params"])
        return {"params": params, "opt": moments}, (grads, value)

    return step


def largest_difference(a: Any, b: Any) -> float:
    full = [x.full() if isinstance(x, vf.Array) else x for x in flatten(a)[0]]
    pairs = zip(full, flatten(b)[0], strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs if x is not None)


def compare(case: dict[str, Any]) -> None:
    """Five steps on the mesh against five of the plain step on one device: parameters, state, gradients, values."""
    model, params = MODELS[case["model"]]

    def loss(p: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(p, x) - y).square().mean()

    inner, mesh = OPTIMIZERS[case["optimizer"]], vf.make_mesh(**MESHES[case["mesh"]])
    opt = schedules.zero(inner, "dp", stage=case["stage"])
    if "node" in MESHES[case["mesh"]]:  # hybrid: the state is sharded over nodes too
        opt = schedules.zero(opt, "node", stage=1)
    grad_fn: Any = vf.grad_and_value(loss)
    if case["gradients"] != "once":
        grad_fn = schedules.accumulate(grad_fn, 2, reduce=case["gradients"], optimizer=opt)
    specs = vf.rules(SPECS) if "tp" in MESHES[case["mesh"]] else None
    rows = "b/(node dp) _" if "node" in MESHES[case["mesh"]] else "b/dp _"
    batch = normal(24, 12), normal(24, 12, seed=1)
    placed, moments = opt.place(params, mesh, specs)
    state, plain = {"params": placed, "opt": moments}, {"params": params, "opt": inner.init(params)}
    arrays = vf.device_put(batch, rows, mesh)
    run, alone = vf.pjit(step_of(grad_fn, opt), donate_argnums=0), step_of(grad_and_value(loss), inner)
    for _ in range(5):
        state, seen = run(state, *arrays)
        plain, wanted = alone(plain, *batch)
        assert largest_difference(seen, wanted) < 1e-12
    assert largest_difference(state, plain) < 1e-12
    assert largest_difference(plain["params"], params) > 1e-3  # it did train
    assert run.cache_info().misses == 1  # outputs live where inputs do


@pytest.mark.parametrize("case", [*pairwise(AXES, admits), SMALL], ids=lambda c: " ".join(map(str, c.values())))
def test_five_steps_equal_one_device(case: dict[str, Any]) -> None:
    compare(case)


@pytest.mark.deep
@pytest.mark.parametrize("stage", AXES["stage"])
@pytest.mark.parametrize("optimizer", AXES["optimizer"])
def test_the_whole_matrix_equals_one_device(stage: int, optimizer: str) -> None:
    for case in whole({**AXES, "stage": [stage], "optimizer": [optimizer]}):
        if admits(case):
            compare(case)


# ---- what is sent

LAYERS = {f"w{i}": normal(16, 16, seed=i) for i in range(4)}
P = sum(w.numel() * 8 for w in LAYERS.values())


def stack(p: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for w in p.values():
        x = torch.tanh(x @ w)
    return (x - y).square().mean()


def lowered(stage: int, n: int = 4, microbatches: int = 0, **options: Any) -> tuple[Any, Any]:
    """The step of a stack of matrices on n ranks, and its optimizer."""
    opt = schedules.zero(optim.adamw(lr=0.01), "dp", stage=stage)
    params, moments = opt.place(LAYERS, vf.make_mesh(dp=n))
    grad_fn: Any = vf.grad_and_value(stack)
    if microbatches:
        grad_fn = schedules.accumulate(grad_fn, microbatches, optimizer=opt)
    batch = vf.device_put((normal(48, 16), normal(48, 16)), "b/dp _", vf.make_mesh(dp=n))

    def step(state: Any, *batch: torch.Tensor) -> Any:
        state, (_, value) = step_of(grad_fn, opt)(state, *batch)
        return state, value

    return vf.pjit(step, donate_argnums=0, **options).lower({"params": params, "opt": moments}, *batch), opt


def big(low: Any) -> list[Any]:
    """The collectives of parameters and gradients: all but that of the loss."""
    return [c for c in low.collectives if math.prod(c.shape) > 1]


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_scatter_each_gradient_and_gather_each_parameter(stage: int) -> None:
    found = big(lowered(stage)[0])
    operands, sent = Counter[str](), Counter[str]()
    for c in found:
        operands[c.kind] += c.operands
        sent[c.kind] += c.total
    assert operands == {"reduce_scatter": 4, "all_gather": 4}
    assert sent == {"reduce_scatter": P * 3 // 4, "all_gather": P * 3 // 4}


def test_stage_3_gathers_twice_without_keeping() -> None:
    """Three times the parameters, but for the first: with no gradient of the data, backward does not read it."""
    keep, again = (big(lowered(3, keep=k)[0]) for k in ("all", "none"))
    each = P // 4 * 3 // 4
    assert sum(c.total for c in keep) == each * (4 + 4)
    assert sum(c.total for c in again) == each * (4 + 4 + 3)
    by_phase = Counter[tuple[str, str]]()
    for c in again:
        by_phase[c.kind, c.phase] += c.operands
    assert by_phase == {("all_gather", "forward"): 4, ("all_gather", "backward"): 3, ("reduce_scatter", "backward"): 4}


def test_a_budget_keeps_what_was_gathered_last() -> None:
    """Room for two matrices: backward gathers one again instead of three."""
    matrix = 16 * 16 * 8
    again, some = (lowered(3, keep=k)[0] for k in ("none", 2 * matrix + 1))
    for low, count in ((again, 3), (some, 1)):
        names = [c for c in big(low) if (c.kind, c.phase) == ("all_gather", "backward")]
        assert sum(c.operands for c in names) == count
    sent = [sum(c.total for c in big(low)) for low in (again, some)]
    assert sent[0] - sent[1] == 2 * matrix * 3 // 4


def test_parameters_are_gathered_in_each_microbatch() -> None:
    """Stage 3 gathers in the loop, and with keep="none" twice in each iteration; so no rank ever holds all of them."""
    low = lowered(3, microbatches=3, keep="none")[0]
    gathers = [c for c in big(low) if c.kind == "all_gather"]
    assert {c.count for c in gathers} == {3}
    assert sum(c.total for c in gathers) == 3 * (4 + 3) * (P // 4 * 3 // 4)


def test_casts_come_with_what_is_gathered() -> None:
    """bfloat16 parameters travel, in groups ahead of their use and again in backward, like any others."""
    loss = schedules.mixed_precision(stack, torch.bfloat16, F64)
    params = vf.device_put(LAYERS, "d/dp f", vf.make_mesh(dp=4))
    batch = vf.device_put((normal(48, 16), normal(48, 16)), "b/dp _", vf.make_mesh(dp=4))
    low = vf.pjit(vf.grad_and_value(loss), keep="none").lower(params, *batch)
    gathers = [c for c in big(low) if c.kind == "all_gather"]
    assert {c.dtype for c in gathers} == {torch.bfloat16}
    operands = [sum(c.operands for c in gathers if c.phase == phase) for phase in ("forward", "backward")]
    assert operands == [4, 3]


@pytest.mark.parametrize(("stage", "kind", "count"), [(1, "reduce_scatter", 1), (2, "reduce_scatter", 3)])
def test_gradients_meet_as_often_as_the_stage_says(stage: int, kind: str, count: int) -> None:
    found = [c for c in big(lowered(stage, microbatches=3)[0]) if c.kind == kind]
    assert {c.count for c in found} == {count}
    assert sum(c.total for c in found) == count * P * 3 // 4


# ---- what is held


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_between_steps_is_the_formula(stage: int, n: int) -> None:
    low, opt = lowered(stage, n)
    held = opt.held(LAYERS, vf.make_mesh(dp=n))
    whole, part = P, P // n
    assert held.parameters == (part if stage == 3 else whole)
    assert held.gradients == (whole if stage == 1 else part)
    assert held.state == 2 * part + 4  # two moments, and the number of updates
    batch = 2 * 48 * 16 * 8 // n
    assert low.memory_analysis().argument == held.parameters + held.state + batch


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_added_up_where_the_stage_says(stage: int) -> None:
    low, opt = lowered(stage, microbatches=3)
    loop = next(e for e in equations(low.program.graph) if isinstance(e.op, Scan))
    carries = [v for v in loop.outs if v.is_tensor and v.shape]
    assert sum(map(low.program.local_bytes, carries)) == opt.held(LAYERS, vf.make_mesh(dp=4)).gradients


@pytest.mark.parametrize("microbatches", [0, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_is_what_the_virtual_ranks_hold(stage: int, microbatches: int) -> None:
    low, _ = lowered(stage, microbatches=microbatches)
    assert measured(low.program) == [low.memory_analysis()] * 4


# ---- where things live


def test_table() -> None:
    params = {"w": normal(6, 8), "up": normal(4, 8), "b": normal(8), "odd": normal(3)}
    mesh = vf.make_mesh(dp=2, tp=2)
    opt = schedules.zero(optim.adamw(lr=0.1), "dp", stage=2)
    specs = vf.rules({"w": "d (h/tp k)", "up": "d f/tp", "b": "f/tp", "*": "..."}, h=2)
    assert opt.table(params, mesh, specs).splitlines() == [
        "path  shape   parameter       gradient     state        bytes per rank",
        "w     [6, 8]  'd (h=2/tp k)'  'a/dp b/tp'  'a/dp b/tp'             480",
        "up    [4, 8]  'd f/tp'        'd/dp f/tp'  'd/dp f/tp'             320",
        "b     [8]     'f/tp'          'f/(tp dp)'  'f/(tp dp)'              80",
        "odd   [3]     '...'           '...'        '...'                    96",
    ]


def test_megatron_and_zero() -> None:
    """Tensor parallel specs are kept, dp takes another dim; the step sends no more than the union."""
    s = Sizes(layers=1)
    mesh = vf.make_mesh(dp=2, tp=2)
    opt = schedules.zero(optim.adamw(lr=1e-3), "dp", stage=3)
    params, moments = opt.place(init(s, F64), mesh, rules_for(MEGATRON, init(s), s))
    assert str(params["blocks"][0]["up"].sharding.spec) == "d/dp f/tp"
    x, y = data(s)
    args = {"params": params, "opt": moments}, *vf.device_put((x, y), "b/dp s", mesh)
    plain = {"params": init(s, F64), "opt": opt.init(init(s, F64))}
    assert largest_difference(vf.pjit(make_step(s, opt))(*args), make_step(s, opt)(plain, x, y)) < 1e-10
    found = big(vf.pjit(make_step(s, opt)).lower(*args))
    assert {c.kind for c in found if c.axes == ("dp",)} == {"all_gather", "reduce_scatter"}


def test_lowering_without_devices() -> None:
    """Sixteen thousand ranks: the state of each is planned, none is made."""
    mesh = vf.abstract_mesh(dp=2048, tp=8)
    params = {"w": vf.ShapeDtype((4096, 16384), torch.bfloat16)}
    opt = schedules.zero(optim.adamw(lr=0.1), "dp", stage=3)
    placed, moments = opt.place(params, mesh, {"w": "d f/tp"})
    assert str(moments["exp_avg"]["w"].sharding.spec) == str(placed["w"].sharding.spec) == "d/dp f/tp"
    assert opt.held(placed).parameters == 4096 * 16384 * 2 // (2048 * 8)


# ---- bad input


def message(fn: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        fn()
    return str(caught.value)


def test_messages() -> None:
    adamw, mesh = optim.adamw(lr=0.1), vf.make_mesh(dp=2)
    assert message(lambda: schedules.zero(adamw, "dp", stage=4)) == (
        "schedules.zero: stage=4 does not exist. Stage 1 shards the optimizer state over 'dp', stage 2 the gradients "
        "too, stage 3 the parameters too."
    )
    assert message(lambda: vf.pjit(stack, keep="some")) == (
        "vf.pjit(stack): keep='some' is not known. It must be one of 'all', 'none', 'a number of bytes'."
    )
    assert message(lambda: schedules.zero(adamw, "fsdp", stage=1).place(LAYERS, mesh)) == (
        "schedules.zero: there is no mesh axis 'fsdp': this mesh has dp=2."
    )
    odd = optim.Optimizer("blocks", lambda p: {"scale": {k: x.new_zeros(2, 3) for k, x in p.items()}}, adamw.step_fn)
    assert message(lambda: schedules.zero(odd, "dp", stage=1).place(LAYERS, mesh)) == (
        "schedules.zero: the state of blocks is not shaped like the parameters: scale.w0 has shape [2, 3], and the "
        "parameter w0 has [16, 16]. State must mirror the parameters or be 0-d to be sharded; was it made for other "
        "parameters?"
    )
    opt = schedules.zero(adamw, "dp", stage=1)
    state, fewer = opt.init(LAYERS), {k: w for k, w in LAYERS.items() if k != "w3"}
    assert message(lambda: opt.step(fewer, state, fewer)) == (
        f"schedules.zero: the state of {adamw.name} is not shaped like the parameters: exp_avg.w0 has shape [16, 16], "
        "and the parameter w0 has [16, 16]. State must mirror the parameters or be 0-d to be sharded; was it made for "
        "other parameters?"
    )
