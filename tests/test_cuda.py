"""What only a GPU can show. Run with `pytest -m cuda`; skipped, with the reason, where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gpt import MEGATRON, Sizes, data, init, make_step, rules_for
from torch.func import grad

import vescale_fn as vf
from vescale_fn.tree import flatten, map_leaves

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


def test_four_virtual_ranks_on_one_gpu() -> None:
    """A GPT step on dp=2, tp=2, in float64, equals the plain step on the GPU."""
    s, mesh = Sizes(layers=1), vf.make_mesh(dp=2, tp=2, device="cuda")
    opt = vf.optim.adamw(lr=1e-3)
    params = map_leaves(lambda p: p.cuda(), init(s, torch.float64))
    state = {"params": params, "opt": opt.init(params)}
    x, y = (t.cuda() for t in data(s))
    placed = vf.device_put(params, rules_for(MEGATRON, params, s), mesh)
    arrays = ({"params": placed, "opt": opt.init(placed)}, *vf.device_put((x, y), "b/dp s", mesh))
    got, want = vf.pjit(make_step(s, opt))(*arrays), make_step(s, opt)(state, x, y)
    for a, b in zip(flatten(got)[0], flatten(want)[0], strict=True):
        assert a.device.type == "cuda"
        torch.testing.assert_close(a.full(), b, rtol=1e-9, atol=1e-10)


def test_attention_in_bf16_stays_flash() -> None:
    mesh = vf.make_mesh(dp=2, tp=2, device="cuda")
    q = torch.randn(4, 8, 128, 64, device="cuda", dtype=torch.bfloat16)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    arrays = vf.device_put((q, q, q), "b/dp h/tp s k", mesh)
    low = vf.pjit(attend).lower(*arrays)
    assert "flash_attention" in low.as_text() or "cudnn_attention" in low.as_text()
    assert len(low.collectives) == 0
    torch.testing.assert_close(vf.pjit(attend)(*arrays).full(), attend(q, q, q), rtol=2e-2, atol=2e-2)
    gradient = vf.pjit(grad(lambda q: attend(q, q, q).float().pow(2).sum()))(arrays[0])
    assert gradient.dtype is torch.bfloat16


def test_the_main_job_takes_its_gpu_from_local_rank() -> None:
    """One process under torchrun: NCCL, and the device that LOCAL_RANK names."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += [str(ROOT / "examples" / "train_gpt.py"), "--mesh", "dp=1", "--steps", "3", "--layers", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "held-out loss" in done.stdout


def test_offloaded_state_lies_in_pinned_memory() -> None:
    mesh, ones = vf.make_mesh(dp=2, device="cuda"), torch.ones(64, 64, device="cuda")
    opt = vf.schedules.zero(vf.schedules.offload(vf.optim.adamw()), "dp", stage=1)
    params, state = opt.place({"w": ones}, mesh)
    plain, wanted = {"w": ones}, vf.optim.adamw().init({"w": ones})
    for _ in range(2):
        assert all(s.data.is_pinned() for s in state["exp_avg"]["w"].addressable_shards)
        params, state = opt.step(vf.device_put({"w": ones}, "...", mesh), state, params)
        plain, wanted = vf.optim.adamw().step({"w": ones}, wanted, plain)
    assert torch.equal(params["w"].full(), plain["w"])
