"""Exact counts of collectives for the textbook parallelisms, at test sizes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from gpt import FSDP, MEGATRON, Sizes, init, make_step, on_mesh
from torch.func import grad

import vescale_fn as vf
from vescale_fn.tree import flatten


def rows(s: Sizes, mesh: Any, table: dict[str, str], batch: str = "b s", **options: Any) -> list[Any]:
    """The collectives of a train step."""
    args = on_mesh(s, mesh, table, batch)
    return list(vf.pjit(make_step(s, **options), donate_argnums=0).lower(*args).collectives)


def numel(r: Any) -> int:
    """Elements of the operand on one rank."""
    return math.prod(r.shape)


def kinds(rs: list[Any]) -> Counter[str]:
    return Counter(r.kind for r in rs)


def test_data_parallel_reduces_each_gradient_once() -> None:
    s = Sizes()
    rs = rows(s, vf.make_mesh(dp=4), {"*": "..."}, "b/dp s")
    assert set(kinds(rs)) == {"all_reduce"}
    parameters = sum(p.numel() for p in flatten(init(s))[0])
    # The loss is a sum over a count, which travel apart: the count depends on the targets alone, starts with the step
    # and is there when backward divides by it; nothing waits for the sum before the end.
    assert [(numel(r), r.phase) for r in rs] == [(1, "forward"), (1, "forward"), (parameters, "backward")]


def test_megatron_has_two_all_reduces_a_layer_each_way() -> None:
    for layers in (1, 3):
        s = Sizes(layers=layers)
        rs = rows(s, vf.make_mesh(tp=4), MEGATRON)
        assert set(kinds(rs)) == {"all_reduce"}
        big = [r for r in rs if numel(r) == s.batch * s.seq * s.width]
        assert Counter(r.phase for r in big) == {"forward": 2 * layers + 1, "backward": 2 * layers + 1}
        assert all(numel(r) <= s.batch * s.seq for r in rs if r not in big)


@pytest.mark.parametrize("change", [{"fused": True}, {"tied": True}])
def test_variants_cost_no_more(change: dict[str, bool]) -> None:
    mesh = vf.make_mesh(tp=4)
    plain, other = (sum(r.total for r in rows(s, mesh, MEGATRON)) for s in (Sizes(), Sizes(**change)))
    assert other <= plain


def test_fsdp_gathers_parameters_and_scatters_gradients() -> None:
    s = Sizes()
    rs = rows(s, vf.make_mesh(dp=4), FSDP, "b/dp s")
    n = len(flatten(init(s))[0])
    big = [r for r in rs if numel(r) > 4]
    assert set(kinds(big)) == {"all_gather", "reduce_scatter"}
    assert all(sum(r.operands for r in big if r.kind == kind) == n for kind in kinds(big))


def test_fsdp_can_gather_again_in_backward() -> None:
    s = Sizes(layers=4, width=256, batch=4, seq=4)  # a layer is more than one group of gathers
    args = on_mesh(s, vf.make_mesh(dp=4), FSDP, "b/dp s")
    kept, again = (vf.pjit(make_step(s), donate_argnums=0, keep=k).lower(*args) for k in ("all", "none"))
    forward, backward = (
        sum(r.operands for r in again.collectives if r.kind == "all_gather" and r.phase == p)
        for p in ("forward", "backward")
    )
    assert forward == len(flatten(init(s))[0])
    assert backward == forward - 2  # of the two embeddings only indices are needed
    assert again.memory_analysis().peak < kept.memory_analysis().peak


def test_data_times_tensor_parallel_is_the_product() -> None:
    s = Sizes()
    rs = rows(s, vf.make_mesh(dp=2, tp=2), MEGATRON, "b/dp s")
    assert set(kinds(rs)) == {"all_reduce"}
    local = s.batch // 2 * s.seq * s.width
    assert sum(numel(r) == local and r.axes == ("tp",) for r in rs) == 2 * (2 * s.layers + 1)
    gradients = [r for r in rs if r.axes == ("dp",) and numel(r) > 4]
    assert len(gradients) == 1


def test_sequence_parallel_pairs_gathers_with_scatters() -> None:
    s = Sizes()
    mesh = vf.make_mesh(tp=4)
    rs = rows(s, mesh, MEGATRON, between=lambda h: vf.reshard(h, "b s/tp d"))
    big = [r for r in rs if numel(r) >= s.batch * s.seq * s.width // 4]
    assert set(kinds(big)) == {"all_gather", "reduce_scatter"}


def test_accumulation_in_a_loop_reduces_once() -> None:
    """Six microbatches: their gradients are added up as partial sums, and meet once after the loop."""

    def loss(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w["up"]) @ w["down"]).square().mean()

    def step(w: dict[str, torch.Tensor], xs: torch.Tensor) -> dict[str, torch.Tensor]:
        def body(total: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[dict[str, torch.Tensor], None]:
            gradient = grad(loss)(w, x)
            return {k: total[k] + gradient[k] for k in total}, None

        total, _ = vf.scan(body, {k: torch.zeros_like(p) for k, p in w.items()}, xs)
        return {k: w[k] - 0.1 * total[k] for k in w}

    g = torch.Generator().manual_seed(0)
    w = {"up": torch.randn(16, 32, generator=g).double(), "down": torch.randn(32, 8, generator=g).double()}
    xs = torch.randn(6, 8, 16, generator=g).double()
    args = vf.device_put((w, xs), ("...", "n b/dp d"), vf.make_mesh(dp=4))
    rs = vf.pjit(step).lower(*args).collectives
    assert [(r.kind, r.operands, r.count) for r in rs] == [("all_reduce", 2, 1)]
    for k, want in step(w, xs).items():
        torch.testing.assert_close(vf.pjit(step)(*args)[k].full(), want, rtol=1e-12, atol=1e-12)


def test_step_equals_single_device() -> None:
    s = Sizes(layers=1)
    mesh = vf.make_mesh(dp=2, tp=2)
    state, x, y = on_mesh(s, mesh, MEGATRON, "b/dp s", torch.float64)
    step = make_step(s)
    want, loss = step(*_plain(s))
    got, value = vf.pjit(step)(state, x, y)
    assert abs(float(value) - float(loss)) < 1e-12
    for a, b in zip(flatten(got)[0], flatten(want)[0], strict=True):
        torch.testing.assert_close(a.full(), b, rtol=1e-9, atol=1e-10)


def _plain(s: Sizes) -> Any:
    from gpt import data

    params = init(s, torch.float64)
    return {"params": params, "opt": vf.optim.adamw(lr=1e-3).init(params)}, *data(s)
