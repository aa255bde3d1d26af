"""`vf.debug(nans=True)`: it names the first operation that makes a NaN or an infinity, and nothing else."""

from __future__ import annotations

import math
import warnings
from typing import Any

import debug_tasks as tasks
import pytest
import torch
from gpt import MEGATRON, Sizes, make_step, on_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad
from torch.nn.functional import scaled_dot_product_attention
from worker_pool import Pool

import vescale_fn as vf

MESH = vf.make_mesh(dp=2, tp=2)


def message(fn: Any, *args: Any, **options: Any) -> str:
    """What a step that is watched says."""
    with vf.debug(nans=True, **options), pytest.raises(vf.NonFiniteError) as e:
        vf.pjit(fn)(*args)
    return str(e.value)


def vector(*values: float) -> vf.Array:
    return vf.device_put(torch.tensor(values), "d/dp", MESH)


def test_the_whole_text_of_a_nan() -> None:
    def step(batch: Any) -> Any:
        shifted = batch["x"] - 1
        logs = torch.log(shifted)  # the line
        return (logs * 2).sum()

    line = step.__code__.co_firstlineno + 2
    assert message(step, {"x": vector(3.0, 2.0, 0.5, 9.0)}) == (
        "step: aten.log makes 1 NaN of 2 values from operands without NaN, on rank 2 (dp=1, tp=0) of mesh dp=2,tp=2, "
        f"in forward, at {__file__}:{line}: logs = torch.log(shifted)  # the line\n"
        "  result   log  f32[2] from 2.07944 to 2.07944, 1 NaN\n"
        "  operand  sub  f32[2] from -0.5 to 8\n"
        "Keep its operands away from where it has no value: clamp them, or choose with torch.where before it."
    )


def test_the_whole_text_of_an_infinity() -> None:
    def step(x: Any, lr: float) -> Any:
        return (x * lr).exp()

    line = step.__code__.co_firstlineno + 1
    assert message(step, vector(0.0, 1.0, 2.0, 0.5), 100.0) == (
        "step: aten.exp makes 1 infinity of 2 values from finite operands, on rank 0 (dp=0, tp=0) of mesh dp=2,tp=2, "
        f"in forward, at {__file__}:{line}: return (x * lr).exp()\n"
        "  result   exp  f32[2] from 1 to 1, 1 inf\n"
        "  operand  mul  f32[2] from 0 to 100\n"
        "If they are meant, vf.debug(nans=True, infs=False) watches for NaN only."
    )


def test_an_argument_that_holds_a_nan() -> None:
    assert message(lambda batch: batch["x"].sum(), {"x": vector(1.0, 1.0, math.nan, 2.0)}) == (
        "<lambda>: batch.x holds NaN before the step computes anything, on rank 2 (dp=1, tp=0) of mesh dp=2,tp=2: "
        "f32[2] from 2 to 2, 1 NaN. Look at the step, or the data, that made it."
    )


def test_the_backward_of_a_line() -> None:
    """The trap of torch.where: forward is finite, and the derivative of what was not chosen is not."""

    def step(x: Any) -> Any:
        return grad(lambda x: torch.where(x > 0, x.sqrt(), 0.0).sum())(x)

    text = message(step, vector(1.0, 0.0, 4.0, 9.0))
    assert "in backward" in text
    assert "torch.where(x > 0, x.sqrt(), 0.0)" in text


def test_inside_a_loop_a_call_and_a_region() -> None:
    rows = vf.device_put(torch.tensor([[4.0, 1.0], [1.0, 1.0], [-1.0, 2.0]]), "a b/dp", MESH)

    def body(carry: Any, row: Any) -> Any:
        return carry + row.sqrt().sum(), None

    assert "aten.sqrt makes 1 NaN of 1 value" in message(lambda m: vf.scan(body, m.sum() * 0, m)[0], rows)
    assert "aten.log makes 1 NaN" in message(lambda m: vf.call(torch.log, m), rows)
    region = vf.shard_map(torch.log, mesh=MESH, in_specs="a b/dp", out_specs="a b/dp")
    assert "aten.log makes 1 NaN of 3 values" in message(lambda m: region(m), rows)


def test_a_reduction_over_ranks_that_overflows() -> None:
    x = vf.device_put(torch.full((4,), 3e38), "d/dp", MESH)
    assert "makes 1 infinity of 1 value from finite operands" in message(lambda x: (x / 2).sum() * 1.0, x)


def test_what_the_step_wrote_itself_is_meant() -> None:
    """Masks of attention, the identity of a maximum, and NaN that marks what is missing."""

    def step(x: Any) -> Any:
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        scores = (x @ x.mT).masked_fill(~mask, -math.inf)
        missing = torch.full((8, 8), math.nan)
        best = x.amax(0) + torch.full((4,), -math.inf).amax()
        chosen = torch.where(mask, scores, torch.full((), -math.inf)).softmax(-1)
        out = scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True)
        return chosen, torch.where(mask, x @ x.mT, missing).nan_to_num(), best, out

    x = vf.device_put(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), "b/dp d", MESH)
    plain = vf.pjit(step)(x)
    with vf.debug(nans=True):
        watched = vf.pjit(step)(x)
    assert all(torch.equal(a.full(), b.full()) for a, b in zip(plain, watched))


def test_empty_and_uneven_parts() -> None:
    x = vf.device_put(torch.tensor([1.0, 2.0, 3.0]), "d~/(dp tp)", MESH)
    with vf.debug(nans=True):
        assert float(vf.pjit(lambda x: x.max() + x.mean() + x.logsumexp(0))(x).full()) > 0


def test_infinities_that_are_meant() -> None:
    x = vector(0.0, 1.0, 1.0, 0.0)
    assert "aten.log makes 2 infinities" in message(lambda x: x.log(), x)
    with vf.debug(nans=True, infs=False):
        assert vf.pjit(lambda x: x.log())(x).full().tolist() == [-math.inf, 0.0, 0.0, -math.inf]
    assert "makes 1 NaN" in message(lambda x: x.log() - x.log(), x, infs=False)


def test_a_watched_step_gives_the_same_bits_and_its_own_program() -> None:
    opt = vf.optim.adamw(lr=0.1)
    step = vf.pjit(lambda g, s, p: opt.step(g, s, p), donate_argnums=(1, 2))
    whole = {"w": torch.linspace(-1, 1, 32).reshape(8, 4)}
    results = []
    for watched in (False, True, False):
        params = vf.device_put(whole, {"w": "a/dp b/tp"}, MESH)
        with vf.debug(nans=watched):
            results.append(
                step(params, opt.init(params), vf.device_put(whole, {"w": "a/dp b/tp"}, MESH))[0]["w"].full()
            )
    assert torch.equal(results[0], results[1])
    assert step.cache_info() == (1, 2)


def test_a_whole_model_is_quiet_until_it_overflows() -> None:
    s = Sizes()
    state, x, y = on_mesh(s, MESH, MEGATRON, "b/dp s")
    with vf.debug(nans=True):
        vf.pjit(make_step(s))(state, x, y)
    wild = {**state, "params": {**state["params"], "head": state["params"]["head"] * 1e38}}
    text = message(make_step(s), wild, x, y)
    assert "return F.cross_entropy(logits" in text
    assert "makes 1 infinity of 1 value from finite operands" in text


def test_donated_arguments_survive() -> None:
    x = vector(1.0, -1.0, 1.0, 1.0)
    with vf.debug(nans=True), pytest.raises(vf.NonFiniteError):
        vf.pjit(lambda x: x.log(), donate_argnums=0)(x)
    assert x.full().tolist() == [1.0, -1.0, 1.0, 1.0]


def test_only_looking_does_not_run_the_checks() -> None:
    with vf.debug(nans=True):
        lowered = vf.pjit(lambda x: x.log()).lower(vector(1.0, 2.0, 3.0, 4.0))
    assert "check_finite" in lowered.as_text()
    assert lowered.memory_analysis().peak > 0
    with vf.debug(nans=True), vf.debug(nans=False):
        assert "check_finite" not in vf.pjit(lambda x: x.log()).lower(vector(1.0, 2.0, 3.0, 4.0)).as_text()


def test_inside_a_step_it_is_refused() -> None:
    def step(x: Any) -> Any:
        with vf.debug(nans=True):
            return x.log()

    with pytest.raises(RuntimeError, match=r"vf\.debug stands inside a step, which is traced once and runs without it"):
        vf.pjit(step)(vector(1.0, 2.0, 3.0, 4.0))


def test_the_first_in_the_program_whichever_rank_runs_first() -> None:
    """Rank 0 fails late, rank 2 early; rank 0 runs before it."""

    def step(x: Any) -> Any:
        return (x.rsqrt() * 100).exp()

    text = message(step, vector(0.1, 0.1, 0.0, 0.1))
    assert text.startswith("step: aten.rsqrt makes 1 infinity of 2 values from finite operands, on rank 2 (dp=1, tp=0)")


CHAIN = ["sin", "exp", "neg", "abs", "square", "sigmoid"]


@settings(max_examples=15)
@given(
    st.lists(st.sampled_from(CHAIN), max_size=4),
    st.sampled_from(["log", "sqrt", "rsqrt", "acos", "reciprocal"]),
    st.lists(st.sampled_from(CHAIN), max_size=3),
    st.integers(0, 3),
)
def test_it_names_the_first_operation_of_a_chain(before: list[str], bad: str, after: list[str], where: int) -> None:
    """An operation that has no value at one place of its operand, among others that have one everywhere."""
    poison = {"log": -1.0, "sqrt": -1.0, "rsqrt": 0.0, "acos": 2.0, "reciprocal": 0.0}[bad]

    def step(x: Any, at: Any) -> Any:
        y = x
        for name in before:
            y = getattr(torch, name)(y).clamp(-2, 2)
        y = torch.where(at, poison, y.abs().clamp(0.1, 0.9))
        y = getattr(torch, bad)(y)
        for name in after:
            y = getattr(torch, name)(y)
        return y

    at = torch.zeros(4, dtype=torch.bool)
    at[where] = True
    text = message(step, vector(0.3, 0.5, 0.1, 0.7), vf.device_put(at, "d/dp", MESH))
    assert text.startswith(f"step: aten.{bad} makes 1 ")
    assert f"on rank {where // 2 * 2} " in text


def test_a_function_lowered_for_ever_new_shapes_warns_once() -> None:
    step = vf.pjit(lambda batch, w: batch["x"] @ w, mesh=MESH)
    w = torch.ones(2, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for n in (*range(1, 9), 3, 5):
            step({"x": torch.ones(n, 2)}, w)
        assert not seen
        for n in range(9, 12):
            step({"x": torch.ones(n, 2)}, w)
    (warning,) = seen
    assert warning.filename == __file__
    assert str(warning.message) == (
        "<lambda> has been lowered for 9 sets of shapes, each of which takes a trace and a solve: batch.x has been "
        "[1, 2], [2, 2], [3, 2], [4, 2], [5, 2] and 4 more. Pad to one shape, or to a few, with a mask, and leave out "
        "a last batch that is short (DataLoader(drop_last=True))."
    )


def test_on_real_processes(pool: Pool) -> None:
    """The process that finds it says so, the other one does not wait for it."""
    first, second = pool.run(tasks.watched, processes=2)
    assert "aten.log makes 1 NaN of 2 values from operands without NaN, on rank 1 (dp=1) of mesh dp=2" in second
    assert "NonFiniteError" in first
