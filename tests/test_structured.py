"""Optimizers that update blocks or whole matrices: AdamW with 8-bit moments, Muon; alone and over the ranks of zero."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gpt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_zero import largest_difference, normal
from torch.func import grad

import vescale_fn as vf
from vescale_fn import optim, schedules
from vescale_fn.orthogonal import ORTHOGONAL, work
from vescale_fn.quantized import signed_code, signed_value, unsigned_code, unsigned_value
from vescale_fn.schedules.layouts import owners
from vescale_fn.sharding.graph import equations
from vescale_fn.sharding.layout import Ragged
from vescale_fn.sharding.ragged import owned_by
from vescale_fn.tree import flatten, map_leaves

F32, F64 = torch.float32, torch.float64
ROOT = Path(__file__).parents[1]


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers, whose sums have the same bits in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed + sum(shape))).float()


def kinds(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [c.kind for c in vf.pjit(fn).lower(*args).collectives]


# ---- eight bits


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20), st.floats(2**-100, 2**100, width=32))
def test_codes_are_the_nearest_in_steps_of_the_fourth_root(numbers: list[float], scale: float) -> None:
    x, s = torch.tensor(numbers, dtype=F64) * scale, torch.tensor(scale)
    for exact, code, value, steps in (
        (x, signed_code, signed_value, 127),
        (x.abs(), unsigned_code, unsigned_value, 256),
    ):
        back = value(code(exact, s), s, F64)
        apart = ((back / scale).abs() ** 0.25 - (exact / scale).abs() ** 0.25).abs()
        lowest = 1 / steps if steps == 256 else 0.5 / steps  # what is divided by is never zero
        assert float(apart.max()) <= lowest + 1e-6
        large = exact.abs() > scale * 2**-26
        assert not large.any() or float(apart[large].max()) < 0.51 / steps
        assert torch.equal(back[large].sign(), exact[large].sign())


def test_the_first_step_is_that_of_adamw() -> None:
    """Moments are rounded after they are used; so from nothing the first update is exact, and later ones near."""
    params = {"w": normal(64, 96), "cube": normal(3, 4, 32), "b": normal(10), "none": None, "scalar": normal()}
    grads = {k: None if p is None else p.cos() for k, p in params.items()}
    for block in (256, (32, 32)):
        ours, theirs = optim.adamw8bit(lr=0.1, block=block), optim.adamw(lr=0.1)
        got, state = ours.step(grads, ours.init(params), params)
        want, _ = theirs.step(grads, theirs.init(params), params)
        assert largest_difference(got, want) < 1e-15
        assert largest_difference(got, params) > 0.01
        again = ours.step(grads, state, got)[0]
        twice = theirs.step(grads, theirs.step(grads, theirs.init(params), params)[1], got)[0]
        assert 1e-6 < largest_difference(again, twice) < 0.1 * 0.05


@pytest.mark.parametrize("block", [2048, (32, 32)])
def test_state_is_two_bytes_for_each_parameter_and_eight_for_each_block(block: Any) -> None:
    params = gpt.init(gpt.Sizes(layers=2, width=128), F32)
    state = optim.adamw8bit(block=block).init(params)
    sizes = [p.numel() for p in flatten(params)[0]]
    blocks = sum(x.numel() for x in flatten(state["exp_avg_scale"])[0])
    held = sum(x.numel() * x.itemsize for x in flatten(state)[0])
    assert held == 2 * sum(sizes) + 8 * blocks + 4  # and the number of updates
    elements = math.prod(block) if isinstance(block, tuple) else block
    assert held <= 1.03 * (2 * sum(sizes) + 8 * sum(sizes) / elements)


SHAPES = {"up": (64, 96), "bias": (96,), "down": (96, 64), "long": (4100,), "odd": (80, 64)}
PARAMS = {k: integers(*s) for k, s in SHAPES.items()}
MESHES = {"dp=2": {"dp": 2}, "dp=3": {"dp": 3}, "dp=4": {"dp": 4}, "dp=2,tp=2": {"dp": 2, "tp": 2}}


@pytest.mark.parametrize("block", [256, (32, 32)])
@pytest.mark.parametrize(("mesh", "stage"), [("dp=2", 2), ("dp=3", 1), ("dp=3", 3), ("dp=4", 3), ("dp=2,tp=2", 2)])
def test_zero_gives_the_bits_of_one_device(block: Any, mesh: str, stage: int) -> None:
    """Sums of whole numbers are exact, so what ranks add up has the bits of one device, and so has all that follows.
    Nothing of the state is ever sent."""
    inner = optim.adamw8bit(lr=0.01, block=block)
    opt, m = schedules.zero(inner, "dp", stage=stage), vf.make_mesh(**MESHES[mesh])
    specs = vf.rules({"up": "d f/tp", "*": "..."}) if "tp" in MESHES[mesh] else None

    def step(params: Any, state: Any, xs: Any, ys: Any) -> Any:
        def loss(p: Any) -> torch.Tensor:
            return sum(((x @ w if w.ndim > 1 else x * w) * y).sum() for w, x, y in zip(p.values(), xs, ys))

        return opt.step(grad(loss)(params), state, params)

    placed, state = opt.place(PARAMS, m, specs)
    plain = PARAMS, inner.init(PARAMS)
    run = vf.pjit(step, donate_argnums=(0, 1))
    for i in range(3):
        xs, ys = ([integers(24, p.shape[d], seed=i + d) for p in PARAMS.values()] for d in (0, -1))
        arrays = vf.device_put((xs, ys), "b/dp _", m)
        if not i:
            found = run.lower(placed, state, *arrays).collectives
            assert Counter(c.kind for c in found for _ in range(c.operands) if c.axes == ("dp",)) == {
                "reduce_scatter": 4,  # each gradient but that of the bias, which is one block
                "all_reduce": 1,
                **({"all_gather": 4} if stage < 3 else {}),  # a linear loss reads no parameters
            }
            assert {c.dtype for c in found} == {F32}
        placed, state = run(placed, state, *arrays)
        plain = step(*plain, xs, ys)
    assert all(map(torch.equal, flatten(map_leaves(lambda a: a.full(), [placed, state]))[0], flatten([*plain])[0]))
    assert run.cache_info().misses == 1


def test_shards_between_blocks_are_updated_where_they_are() -> None:
    opt, m = optim.adamw8bit(lr=0.1, block=256), vf.make_mesh(dp=3)
    params, grads = {"w": normal(48, 64).float()}, {"w": normal(48, 64, seed=1).float()}
    for spec, rows in (("a~[4 8 36]/dp b", 9), ("a~@1/dp b", 12), ("a~[0 4 8]/dp b", 8), ("a/dp b", 4)):
        p, g = vf.device_put((params, grads), spec, m)
        state = opt.init(p)
        assert state["exp_avg_scale"]["w"].sharding.shard_shape((12, 1)) == (rows, 1)
        assert kinds(opt.step, g, state, p) == []
        for _ in range(3):
            p, state = opt.step(g, state, p)
        plain, wanted = params, opt.init(params)
        for _ in range(3):
            plain, wanted = opt.step(grads, wanted, plain)
        assert all(
            map(torch.equal, flatten(map_leaves(lambda a: a.full(), [p, state]))[0], flatten([plain, wanted])[0])
        )


@cache
def main_job() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_exported_step_brings_the_update_with_it(tmp_path: Path) -> None:
    opt, params = optim.adamw8bit(), vf.device_put({"w": normal(64, 64)}, "a/dp b", vf.make_mesh(dp=2))
    vf.pjit(opt.step).lower(params, opt.init(params), params).export(tmp_path / "step.py")
    text = (tmp_path / "step.py").read_text()
    assert "def adamw8_(" in text
    assert "vescale_fn." not in text
    compile(text, "step.py", "exec")


def losses(opt: optim.Optimizer, text: Path | None, steps: int, layers: int, width: int, seq: int) -> torch.Tensor:
    """Losses of the main job, trained on one device."""
    train_gpt = main_job()
    params = train_gpt.init(layers, width, 0)
    state, found = {"params": params, "opt": opt.init(params)}, []
    batches = train_gpt.batches(train_gpt.read_text(text), 8, seq, 0)
    with vf.disable_pjit():
        step = train_gpt.make_train_step(opt)
        for _ in range(steps):
            state, metrics = step(state, next(batches))
            found.append(float(metrics["loss"]))
    return torch.tensor(found, dtype=F64)


def gap(text: Path | None, steps: int, *sizes: int, block: Any = 2048) -> float:
    """By how much the loss of 8-bit AdamW lies above that of AdamW, over the last tenth of the steps."""
    settings: dict[str, Any] = {"lr": optim.warmup_cosine(2e-3, steps // 10, steps, floor=1e-4), "betas": (0.9, 0.95)}
    eight = losses(optim.adamw8bit(**settings, block=block), text, steps, *sizes)
    full = losses(optim.adamw(**settings), text, steps, *sizes)
    assert full[0] - full[-1] > 0.5
    return float((eight - full)[-steps // 10 :].mean())


def test_training_with_eight_bits_keeps_up() -> None:
    assert abs(gap(ROOT / "CONTRIBUTING.md", 60, 1, 64, 32)) < 0.01


@pytest.mark.deep
@pytest.mark.parametrize("block", [2048, (32, 32)])
def test_two_hundred_steps_of_the_demo_keep_up(block: Any) -> None:
    assert abs(gap(None, 200, 4, 256, 128, block=block)) < 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "adamw8bit: lr=-1.0 must not be negative."),
        ({"betas": (0.9, 1.0)}, "adamw8bit: betas=(0.9, 1.0) must both lie in [0, 1)."),
        (
            {"block": (2, 3, 4)},
            "adamw8bit: block=(2, 3, 4) must be a number of elements, such as 2048, or the sides of a tile, such as "
            "(32, 32).",
        ),
        (
            {"block": 0},
            "adamw8bit: block=0 must be a number of elements, such as 2048, or the sides of a tile, such as (32, 32).",
        ),
    ],
)
def test_messages_of_eight_bits(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        optim.adamw8bit(**settings)
    assert str(caught.value) == message


def test_state_of_another_block_size_is_refused() -> None:
    params = {"w": torch.zeros(64, 64)}
    opt = optim.adamw8bit(block=256)
    with pytest.raises(ValueError) as caught:
        opt.step(params, optim.adamw8bit(block=128).init(params), params)
    assert str(caught.value) == (
        "adamw8bit(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, block=256): the state's exp_avg_scale "
        "of w is f32[32, 1], but it needs one of shape [16, 1]. Start with opt.init(params), or go on with the "
        "optimizer and the parameters that this state was made for."
    )


# ---- Muon

MATRICES = {
    "up": normal(64, 96),
    "bias": normal(96),
    "down": normal(96, 64),
    "mid": normal(64, 64),
    "low": normal(8, 64),
}
MUON = optim.groups({"bias": optim.sgd(lr=0.1), "*": optim.muon(lr=0.05)})


def deep_loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"] @ p["mid"] @ p["low"].t() - y).square().mean()


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_matrix_goes_to_its_owner_and_comes_back(stage: int, n: int) -> None:
    """Gradients meet where their matrix is made orthogonal, parameters are gathered from there; no more is sent."""
    opt, m = schedules.zero(MUON, "dp", stage=stage), vf.make_mesh(dp=n)
    params, state = opt.place(MATRICES, m)
    arrays = vf.device_put((normal(24, 64), normal(24, 8)), "b/dp _", m)

    def step(params: Any, state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return opt.step(grad(deep_loss)(params, x, y), state, params)

    low = vf.pjit(step, donate_argnums=(0, 1)).lower(params, state, *arrays)
    found = Counter((c.kind, c.phase == "update") for c in low.collectives for _ in range(c.operands))
    vectors = {("all_reduce", False): 1} if stage == 1 else {("reduce_scatter", False): 1}  # that of the bias
    gathered = 4 + (stage > 1)
    expected = Counter({("reduce_scatter", False): 4, ("all_gather", stage < 3): gathered}) + Counter(vectors)
    assert found == expected
    nodes = [e for e in equations(low.program.graph) if e.op is ORTHOGONAL]
    assert len(nodes) == 4
    held = [p.shape for p in MATRICES.values() if p.ndim == 2]
    owner = owners([work(*s, 5) for s in held], n)
    assert [low.program.layouts[e.outs[0]]["dp"] for e in nodes] == [Ragged(0, owned_by(r, n)) for r in owner]


def test_owners_run_what_one_device_runs() -> None:
    """A whole matrix on one rank: bfloat16 products in the same order, hence the same bits, and nothing is sent."""
    opt, m = optim.muon(lr=0.05), vf.make_mesh(dp=3)
    params = {k: w.float() for k, w in MATRICES.items() if w.ndim == 2}
    grads = {k: w.cos() for k, w in params.items()}
    specs = {k: f"a~@{i % 3}/dp b" for i, k in enumerate(params)}
    p, g = vf.device_put((params, grads), (specs, specs), m)
    state = opt.init(p)
    assert kinds(opt.step, g, state, p) == []
    plain, wanted = params, opt.init(params)
    for _ in range(3):
        p, state = opt.step(g, state, p)
        plain, wanted = opt.step(grads, wanted, plain)
    assert all(map(torch.equal, flatten(map_leaves(lambda a: a.full(), [p, state]))[0], flatten([plain, wanted])[0]))


def longest(works: Sequence[float], by: Sequence[int]) -> float:
    """What the rank with most has to do."""
    done = Counter[int]()
    for w, rank in zip(works, by, strict=True):
        done[rank] += w
    return max(done.values(), default=0.0)


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(1, 3))
def test_no_rank_has_more_than_a_third_more_to_do_than_it_must(works: list[int], n: int) -> None:
    best = min(longest(works, by) for by in itertools.product(range(n), repeat=len(works)))
    assert longest(works, owners(works, n)) <= (4 - 1 / n) / 3 * best + 1e-9


def test_the_work_of_a_model_is_spread_evenly() -> None:
    """Llama-3-8B on 64 ranks: none has a tenth more to do than the mean."""
    layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3
    works = [work(*s, 5) for s in layer * 32]
    assert longest(works, owners(works, 64)) < 1.1 * sum(works) / 64


def test_tensor_parallel_parameters_keep_their_cuts() -> None:
    """The state of a matrix has one owner whatever cuts the matrix; a parameter is never gathered for it."""
    opt = schedules.zero(MUON, "dp", stage=3)
    specs = vf.rules({"up": "d f/tp", "bias": "f/tp", "*": "..."})
    assert opt.table(MATRICES, vf.make_mesh(dp=2, tp=2), specs).splitlines() == [
        "path  shape     parameter    gradient     state        bytes per rank",
        "up    [64, 96]  'd/dp f/tp'  'd~@0/dp f'  'd~@0/dp f'         110,592",
        "bias  [96]      'f/(tp dp)'  'f/(tp dp)'                          384",
        "down  [96, 64]  'a~@1/dp b'  'a~@1/dp b'  'a~@1/dp b'         147,456",
        "mid   [64, 64]  'a~@0/dp b'  'a~@0/dp b'  'a~@0/dp b'          98,304",
        "low   [8, 64]   'a~@1/dp b'  'a~@1/dp b'  'a~@1/dp b'          12,288",
    ]
