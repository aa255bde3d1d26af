"""Optimizer state in host memory: the numbers of the optimizer, what is moved and when, and memory to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory import measured
from test_zero import MODELS, normal, step_of

import vescale_fn as vf
from vescale_fn import optim, schedules
from vescale_fn.host import TO_DEVICE, TO_HOST
from vescale_fn.memory import peak_bytes
from vescale_fn.sharding.graph import equations, op_name
from vescale_fn.tree import flatten, map_leaves

MODEL, PARAMS = MODELS["even"]
OPTIMIZERS = {
    "adamw": optim.adamw(lr=0.02),
    "clipped": optim.chain(optim.clip_norm(0.1), optim.adamw(lr=0.02)),
    "adamw8bit": optim.adamw8bit(lr=0.02, block=24),
    "muon": optim.groups({"bias": optim.sgd(lr=0.1, momentum=0.9), "*": optim.muon(lr=0.05)}),
    "frozen": optim.groups({"bias": None, "*": optim.adamw(lr=0.02)}),
}


def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (MODEL(p, x) - y).square().mean()


def trained(opt: Any, mesh: vf.Mesh) -> Any:
    params, state = opt.place(PARAMS, mesh)
    batch = vf.device_put((normal(24, 12), normal(24, 12, seed=1)), "b/dp _", mesh)
    run = vf.pjit(step_of(vf.grad_and_value(loss), opt), donate_argnums=0)
    both = {"params": params, "opt": state}
    for _ in range(3):
        both, _ = run(both, *batch)
    assert run.cache_info().misses == 1
    return map_leaves(lambda x: None if x is None else x.full(), both)


@pytest.mark.parametrize(("optimizer", "stage"), [(k, 1 + i % 3) for i, k in enumerate(OPTIMIZERS)])
def test_the_numbers_are_those_of_the_optimizer(optimizer: str, stage: int) -> None:
    inner, mesh = OPTIMIZERS[optimizer], vf.make_mesh(dp=3)
    plain = trained(schedules.zero(inner, "dp", stage=stage), mesh)
    inside = trained(schedules.zero(schedules.offload(inner), "dp", stage=stage), mesh)
    around = trained(schedules.offload(schedules.zero(inner, "dp", stage=stage)), mesh)
    for got in (inside, around):
        assert all(map(torch.equal, *(filter(torch.is_tensor, flatten(x)[0]) for x in (got, plain))))
    assert not torch.equal(plain["params"]["up"], PARAMS["up"])


def lowered(opt: Any, mesh: vf.Mesh, params: Any) -> Any:
    placed = vf.device_put(params, "a/dp ...", mesh)
    grads = map_leaves(lambda x: x, placed)
    return vf.pjit(opt.step, donate_argnums=(1, 2)).lower(grads, opt.init(placed), placed)


def test_one_part_of_the_state_is_on_the_device_at_a_time() -> None:
    """Four matrices of 64 MiB and both their moments on two ranks: 64 MiB of state is there at once, not 256."""
    params = {f"w{i}": vf.ShapeDtype((4096, 4096), torch.float32) for i in range(4)}
    mesh, part = vf.abstract_mesh(dp=2), 32 << 20
    stats = lowered(schedules.offload(optim.adamw()), mesh, params).memory_analysis()
    assert stats.argument == 2 * 4 * part + 4  # parameters, gradients, the number of updates
    assert stats.peak == stats.argument + 2 * part
    assert stats.host == 2 * 4 * part
    assert f"host         {stats.host:>14,} B" in str(stats)
    kept = lowered(optim.adamw(), mesh, params).memory_analysis()
    assert (kept.argument, kept.host) == (4 * 4 * part + 4, 0)


def test_small_parameters_are_updated_together() -> None:
    params = {f"w{i}": normal(6, 4) for i in range(4)}
    low = lowered(schedules.offload(optim.adamw()), vf.make_mesh(dp=2), params)
    names = [op_name(e.op).rpartition(".")[2] for e in low.program.graph.eqns]
    assert names == ["Tensor", *["to_device"] * 8, "adam_", *["to_host"] * 8]
    assert measured(low.program) == [peak_bytes(low.program, c) for c in low.program.mesh.all_coords()]


def test_each_matrix_is_moved_when_its_turn_comes() -> None:
    params = {f"w{i}": normal(6, 4) for i in range(3)}
    low = lowered(schedules.offload(optim.adafactor()), vf.make_mesh(dp=2), params)
    moves = [e.op for e in equations(low.program.graph) if e.op in (TO_DEVICE, TO_HOST)]
    assert moves == [*[TO_DEVICE] * 2, *[TO_HOST] * 2] * 3


def test_state_that_does_not_change_stays_where_it_is() -> None:
    opt = schedules.offload(optim.adamw())
    params = {"a": normal(6, 4), "b": normal(6, 4)}
    state = opt.init(params)
    _, new = opt.step({"a": normal(6, 4), "b": None}, state, params)
    assert new["exp_avg"]["b"] is state["exp_avg"]["b"]
    assert not torch.equal(new["exp_avg"]["a"], state["exp_avg"]["a"])


def test_an_exported_step_moves_too(tmp_path: Path) -> None:
    low = lowered(schedules.offload(optim.adamw()), vf.make_mesh(dp=2), {"w": normal(6, 4)})
    low.export(tmp_path / "step.py")
    assert "def to_host(" in (tmp_path / "step.py").read_text()


def test_message() -> None:
    with pytest.raises(TypeError) as caught:
        schedules.offload(loss)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "schedules.offload transforms an optimizer, but was given loss, which is none. Optimizers are made by vf.optim."
    )
