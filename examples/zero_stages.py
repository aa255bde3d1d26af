"""The same training step under ZeRO stages 0 to 3: what a rank holds, what it sends, and that the result is the same.

    python examples/zero_stages.py                                  # four virtual devices in this process
    torchrun --nproc-per-node 2 examples/zero_stages.py --ranks 2   # two processes

A stage is a number at the optimizer; nothing else changes. With matplotlib zero_stages.png shows the memory as bars.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from optree import tree_leaves
from torch import Tensor

import vescale_fn as vf
from vescale_fn import schedules

MIB, ADAMW = 2**20, vf.optim.adamw(lr=1e-3)
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
KINDS = ("parameters", "gradients", "optimizer state", "peak of a step")


def init(layers: int, width: int) -> dict[str, Any]:
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    up, down = normal(layers, width, 4 * width) * width**-0.5, normal(layers, 4 * width, width) * 0.1 * width**-0.5
    return {"blocks": [{"up": u, "down": d} for u, d in zip(up, down)], "head": normal(width, 32) * width**-0.5}


def loss(params: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
    for block in params["blocks"]:
        x = x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ block["up"]) @ block["down"]
    return F.cross_entropy(x @ params["head"], y)


class Run(NamedTuple):
    held: dict[str, int]  # bytes per rank, by kind
    sent: Counter[str]  # the same of a step, by collective
    seconds: float
    params: Any


def train(stage: int, mesh: vf.Mesh, params: Any, batch: Any, steps: int, microbatches: int) -> Run:
    """Some steps under a stage; 0 is plain data parallelism."""
    opt = schedules.zero(ADAMW, "dp", stage=stage) if stage else ADAMW
    grad_fn = schedules.accumulate(vf.grad_and_value(loss), microbatches, optimizer=opt)

    @vf.pjit(donate_argnums=0, keep="none")
    def step(state: dict[str, Any], x: Tensor, y: Tensor) -> tuple[dict[str, Any], Tensor]:
        grads, value = grad_fn(state["params"], x, y)
        params, moments = opt.step(grads, state["opt"], state["params"])
        return {"params": params, "opt": moments}, value

    size = sum(p.nbytes for p in tree_leaves(params))
    placed = opt.place(params, mesh)[0] if isinstance(opt, schedules.Zero) else vf.device_put(params, "...", mesh)
    kept = opt.held(placed) if isinstance(opt, schedules.Zero) else schedules.Held(size, size, 2 * size + 4)
    state, arrays = {"params": placed, "opt": opt.init(placed)}, vf.device_put(batch, ("b/dp d", "b/dp"), mesh)
    low = step.lower(state, *arrays)
    sent = sum((Counter({c.kind: c.total}) for c in low.collectives), Counter[str]())
    state, _ = step(state, *arrays)  # compiles, too
    start = time.perf_counter()
    for _ in range(steps - 1):
        state, _ = step(state, *arrays)
    seconds = (time.perf_counter() - start) / max(steps - 1, 1)
    held = dict(zip(KINDS, (kept.parameters, kept.gradients, kept.state, low.memory_analysis().peak)))
    return Run(held, sent, seconds, state["params"])


def table(runs: list[Run], apart: list[float]) -> str:
    """Memory, traffic, time and distance from one device: a column for each stage."""
    rows = [("per rank", [f"stage {i}" for i in range(len(runs))])]
    rows += [(f"{kind}, MiB", [f"{r.held[kind] / MIB:.2f}" for r in runs]) for kind in KINDS]
    rows += [(f"{kind} sends, MiB", [f"{r.sent[kind] / MIB:.2f}" for r in runs]) for kind in COLLECTIVES]
    rows += [("step, ms", [f"{r.seconds * 1e3:.1f}" for r in runs])]
    rows += [("largest difference", [f"{a:.0e}" for a in apart])]
    return "\n".join(f"{name:<28}" + "".join(f"{cell:>12}" for cell in cells) for name, cells in rows)


def draw(runs: list[Run], path: str) -> str:
    """Bars of the MiB that each stage holds, as a PNG; what happened."""
    if find_spec("matplotlib") is None:
        return "matplotlib is not installed: no picture"
    from matplotlib.figure import Figure

    axes = (figure := Figure()).subplots()
    for i, kind in enumerate(KINDS):
        axes.bar([s + 0.2 * i for s in range(4)], [r.held[kind] / MIB for r in runs], width=0.2, label=kind)
    axes.legend()
    figure.savefig(path)
    return f"wrote {path}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"ranks": 4, "layers": 4, "width": 128, "batch": 64, "steps": 5, "microbatches": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--picture", default="zero_stages.png")
    a = parser.parse_args()
    mesh, params = vf.make_mesh(dp=a.ranks), init(a.layers, a.width)
    batch = torch.arange(1.0, a.batch * a.width + 1).double().sin().view(a.batch, -1), torch.arange(a.batch) % 32
    runs = [train(stage, mesh, params, batch, a.steps, a.microbatches) for stage in range(4)]
    moments = ADAMW.init(params)
    for _ in range(a.steps):  # the plain step, on one device
        params, moments = ADAMW.step(vf.grad_and_value(loss)(params, *batch)[0], moments, params)
    pairs = [list(zip(tree_leaves(r.params), tree_leaves(params))) for r in runs]
    apart = [max(float((p.full() - q).abs().max()) for p, q in both) for both in pairs]
    vf.print0(f"mesh {mesh}\n\n{table(runs, apart)}")
    if not vf.process_index():
        print(f"\n{draw(runs, a.picture)}")


if __name__ == "__main__":
    main()
