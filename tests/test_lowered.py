"""What a lowered step says about itself, through pjit, for real steps."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gpt
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad_and_value

import vescale_fn as vf
from vescale_fn.lowered import Lowered
from vescale_fn.memory import MemoryStats, measure_memory
from vescale_fn.tree import flatten, map_leaves

SIZES = gpt.Sizes()


def mlp(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    opt = vf.optim.sgd(lr=0.1, momentum=0.9)

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ p["up"]) @ p["down"] - y).square().mean()

    def step(state: Any, x: Any, y: Any) -> Any:
        grads, value = grad_and_value(loss)(state["params"], x, y)
        params, moments = opt.step(grads, state["opt"], state["params"])
        return {"params": params, "opt": moments}, value

    params = vf.device_put({"up": torch.randn(8, 16), "down": torch.randn(16, 8)}, "...", mesh)
    data = vf.device_put((torch.randn(12, 8), torch.randn(12, 8)), "b/dp d", mesh)
    return step, ({"params": params, "opt": opt.init(params)}, *data)


STEPS = {
    "mlp on dp": lambda: mlp(vf.make_mesh(dp=2)),
    "gpt on tp": lambda: (gpt.make_step(SIZES), gpt.on_mesh(SIZES, vf.make_mesh(tp=2), gpt.MEGATRON)),
    "gpt with sharded parameters": lambda: (
        gpt.make_step(SIZES),
        gpt.on_mesh(SIZES, vf.make_mesh(dp=2), gpt.FSDP, "b/dp s"),
    ),
}


def lowered(mesh: Any = None) -> Lowered:
    step, args = mlp(mesh or vf.make_mesh(dp=2))
    out: Lowered = vf.pjit(step, donate_argnums=0).lower(*args)
    return out


def inputs_of(low: Lowered, args: Any) -> list[list[torch.Tensor]]:
    """Copies of what every rank gets."""
    parts = [[s.clone() for s in x.shards] for x in flatten(args)[0]]
    assert len(parts) == len(low.program.graph.inputs)
    rows = [list(row) for row in zip(*parts)]
    parts.clear()
    return rows


@pytest.mark.parametrize("donate", [(), 0])
@pytest.mark.parametrize("name", STEPS)
def test_memory_analysis_is_what_the_virtual_engine_counts(name: str, donate: Any) -> None:
    step, args = STEPS[name]()
    low = vf.pjit(step, donate_argnums=donate).lower(*args)
    measured = measure_memory(low.program, inputs_of(low, args))
    assert low.memory_analysis() == measured[0]


def test_donation_saves_memory() -> None:
    step, args = mlp(vf.make_mesh(dp=2))
    kept, given = vf.pjit(step).lower(*args), vf.pjit(step, donate_argnums=0).lower(*args)
    stats: list[MemoryStats] = [kept.memory_analysis(), given.memory_analysis()]
    assert stats[1].peak < stats[0].peak
    assert stats[0].argument == stats[1].argument


def test_a_gpt_of_70b_shape_lowers_on_4096_ranks_without_memory() -> None:
    sizes = gpt.Sizes(layers=2, width=8192, heads=64, seq=4096, vocab=32768, batch=512)
    mesh, opt = vf.abstract_mesh(dp=512, tp=8), vf.optim.adamw(lr=1e-3)
    with FakeTensorMode():
        shapes = map_leaves(lambda t: vf.ShapeDtype(tuple(t.shape), t.dtype), gpt.init(sizes, torch.bfloat16))
    params = vf.device_put(shapes, gpt.rules_for(gpt.MEGATRON, shapes, sizes), mesh)
    tokens = vf.device_put(vf.ShapeDtype((512, 4096), torch.int64), "b/dp s", mesh)
    state = {"params": params, "opt": opt.init(params)}
    low = vf.pjit(gpt.make_step(sizes), donate_argnums=0).lower(state, tokens, tokens)
    assert all(x.addressable_shards == [] for x in flatten(state)[0])
    assert [r.axes for r in low.collectives if r.phase == "forward" and r.shape == (4096, 8192)] == [("tp",)] * 4
    whole = sum(x.numel() * x.dtype.itemsize for x in flatten(state)[0])
    assert whole / 8 < low.memory_analysis().argument < whole / 7  # almost all is cut over tp, the norms are not


def test_text_and_collectives() -> None:
    low = lowered()
    assert low.as_text().startswith("program on mesh dp=2\n")
    assert [(r.kind, r.axes, r.operands, r.phase) for r in low.collectives] == [
        ("all_reduce", ("dp",), 1, "forward"),  # the loss
        ("all_reduce", ("dp",), 2, "backward"),  # one bucket for both gradients
    ]
    assert [row.split()[:4] for row in str(low.collectives).splitlines()] == [
        ["all_reduce", "sum", "dp", "f32[]"],
        ["all_reduce", "sum", "dp", "f32[256]"],
    ]


def test_costs() -> None:
    cost = lowered().cost_analysis()
    products = 2 * (12 // 2) * 8 * 16
    assert cost.flops == 5 * products  # two forward; two for the weights and one for the hidden layer backward
    assert dict(cost.bytes_sent) == {("dp",): lowered().collectives.nbytes}


def test_explain() -> None:
    text = lowered().explain("params.up")
    assert text.splitlines()[0] == "state_params_up: f32[8, 16], whole"
    assert "the layout it comes in" in text
    with pytest.raises(KeyError, match=r"No value is called 'nope'. There are: state_params_up, "):
        lowered().explain("nope")


def test_diff() -> None:
    assert lowered().diff(lowered()) == ""
    lines = lowered().diff(lowered(vf.make_mesh(dp=4))).splitlines()
    assert lines[:2] == ["--- step", "+++ step"]
    assert "-program on mesh dp=2" in lines
    assert "+program on mesh dp=4" in lines


def test_export(tmp_path: Path) -> None:
    path = tmp_path / "step_rank.py"
    lowered().export(path)
    text = path.read_text()
    assert "import vescale_fn" not in text
    assert "torchrun --nproc-per-node 2 step_rank.py" in text
    subprocess.run([sys.executable, "-c", f"compile(open({str(path)!r}).read(), 'step_rank.py', 'exec')"], check=True)


def test_a_plan_read_from_a_file_is_the_same_plan(tmp_path: Path) -> None:
    step, args = mlp(vf.make_mesh(dp=2))
    first, second = (vf.pjit(step, cache_dir=tmp_path).lower(*args) for _ in range(2))
    assert first.diff(second) == ""
    assert second.explain("params.up") == "state_params_up: f32[8, 16], whole"  # reasons are not kept


def test_an_operation_without_a_rule_warns_once_with_the_line_and_the_fix() -> None:
    mesh, x = vf.make_mesh(dp=2), torch.tensor([[3.0, 5.0], [1.0, 2.0]])
    step = vf.pjit(lambda a: torch.geqrf(a).a + torch.geqrf(2 * a).tau)
    with pytest.warns(UserWarning, match="has no rule") as caught:
        got = step(vf.device_put(x, "b/dp d", mesh))
    (warning,) = caught
    line = step.fn.__code__.co_firstlineno
    assert str(warning.message) == (
        f"aten.geqrf at {__file__}:{line} has no rule: every rank does all of it. State one with "
        'vescale_fn.register_rule(op, "b !d -> b !d").'
    )
    assert torch.equal(got.full(), step.fn(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(vf.device_put(x, "b d", mesh))
