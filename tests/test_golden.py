"""The plan of the main job, word for word. A change here is a change of what users' steps send: look before you accept
it with `python tests/test_golden.py`, which writes the file anew."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

import vescale_fn as vf
from vescale_fn.tree import map_leaves

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "train_gpt.txt"


def main_job() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plan_text() -> str:
    """Plan and collectives of the default run, lowered on an abstract mesh."""
    job, mesh = main_job(), vf.abstract_mesh(dp=2, tp=2)
    shapes = map_leaves(lambda p: vf.ShapeDtype(tuple(p.shape), p.dtype), job.init(layers=4, width=256, seed=0))
    params = vf.device_put(shapes, vf.rules(job.SHARDINGS, qkv=3, k=job.HEAD), mesh)
    opt = vf.optim.adamw(lr=1e-3)
    x = vf.ShapeDtype((8, 128), torch.int64)
    batch = vf.device_put((x, x), "b/dp t", mesh)
    low = job.make_train_step(opt).lower({"params": params, "opt": opt.init(params)}, batch)
    return f"{low.plan}\n\n{low.collectives}\n".replace(f"{ROOT}/", "")


def test_plan_of_the_main_job() -> None:
    assert plan_text() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(plan_text())
