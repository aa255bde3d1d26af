"""What comes before the first step: import, trace, lowering; and how lowering grows with layers and ranks.

python benchmarks/bench_lowering.py
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from models import TENSOR_PARALLEL, Config, Loss, batch, functional, scanned, train_step
from race import report

import vescale_fn as vf

# The scanned model has its layers on a leading dim.
_IN_BLOCKS = {k.replace("*.", "blocks."): f"l {spec}" for k, spec in TENSOR_PARALLEL.items() if k.startswith("*.")}
_OTHERS = {k: spec for k, spec in TENSOR_PARALLEL.items() if not k.startswith("*.")}
STACKED = {"blocks.norm?.weight": "l d", **_IN_BLOCKS, **_OTHERS}


def arguments(c: Config, rules: dict[str, str], made: tuple[Loss, dict[str, Any]], mesh: Any) -> tuple[Any, Any]:
    """A train step and its arguments, on `mesh`."""
    loss, params = made
    opt = vf.optim.adamw()
    placed = vf.device_put(params, vf.rules(rules, h=c.heads), mesh)
    x, y = vf.device_put(batch(c), "b/dp t", mesh)
    return train_step(loss, opt), ({"params": placed, "opt": opt.init(placed)}, x, y)


def seconds(act: Callable[[], Any], repeats: int = 3) -> float:
    """Median time of `act`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cpu_seconds(act: Callable[[], Any]) -> float:
    """CPU time of `act` in this process."""
    gc.collect()
    start = time.process_time()
    act()
    return time.process_time() - start


def region_ratio() -> float:
    """Time of tracing a step whose loss is a region, data parallel by hand, over the plain step's. Each is the least
    CPU time of several runs in turn, so that what else the machine does matters little."""
    c, mesh, opt = Config(layers=4), vf.make_mesh(dp=2), vf.optim.adamw()
    loss, params = functional(c)
    specs = ("...", "b/dp t", "b/dp t")
    region = vf.shard_map(lambda *args: vf.pmean(loss(*args), "dp"), in_specs=specs, out_specs="")
    args = ({"params": params, "opt": opt.init(params)}, *batch(c))
    steps = [vf.pjit(train_step(f, opt).fn, mesh=mesh) for f in (region, loss)]
    for step in steps:
        step.trace(*args)
    pairs = [[cpu_seconds(lambda s=s: s.trace(*args)) for s in steps] for _ in range(9)]  # type: ignore[misc]
    region_time, plain_time = map(min, zip(*pairs))
    return region_time / plain_time


def import_seconds(module: str) -> float:
    """Time of an import in a fresh interpreter."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) for _ in "123"]
    return statistics.median(runs)


def main() -> None:
    mesh = vf.make_mesh(dp=2, tp=2)
    twelve, args = arguments(Config(layers=12), TENSOR_PARALLEL, functional(Config(layers=12)), mesh)
    times = {
        "trace, 12 layers": seconds(lambda: twelve.trace(*args)),
        "trace and lower, 12 layers": seconds(lambda: twelve.lower(*args)),
        "import torch": import_seconds("torch"),
        "import vescale_fn": import_seconds("vescale_fn"),
    }
    for layers in (2, 96):
        c = Config(layers=layers, width=64, heads=4)
        step, scan_args = arguments(c, STACKED, scanned(c), mesh)
        times[f"lower, {layers} scanned layers"] = seconds(lambda: step.lower(*scan_args))  # noqa: B023
    ratios = {
        "trace and lower / trace": times["trace and lower, 12 layers"] / times["trace, 12 layers"],
        "trace with the loss in a shard_map / plain": region_ratio(),
        "96 scanned layers / 2": times["lower, 96 scanned layers"] / times["lower, 2 scanned layers"],
        "import vescale_fn - import torch, seconds": times["import vescale_fn"] - times["import torch"],
    }
    bounds = dict(zip(ratios, (3.0, 1.5, 1.2, 0.3)))
    report("lowering", {k: [t] for k, t in times.items()}, ratios, bounds)


if __name__ == "__main__":
    main()
