"""Checkpoints against torch.save and torch.load of the same bytes, what of a step an asynchronous save takes, and how
soon a resumed run is at its first step.

python benchmarks/bench_checkpoint.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import Config, batch, functional, train_step
from race import Times, ratio, report

import vescale_fn as vf


def forced(values: Any, file: Path) -> None:
    """torch.save, with the file on the disk, as a checkpoint has it."""
    with file.open("wb") as f:
        torch.save(values, f)
        f.flush()
        os.fsync(f.fileno())


def clock(runs: dict[str, Callable[[], Any]], rounds: int) -> tuple[Times, Times]:
    """Seconds of each in each round, by the clock and of CPU time."""
    times: Times = {name: [] for name in runs}
    cpu: Times = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            start, busy = time.perf_counter(), time.process_time()
            run()
            if i:  # the first round warms up
                times[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - busy)
    return times, cpu


def compare(title: str, times: tuple[Times, Times], pairs: dict[tuple[str, str], float | None]) -> None:
    """Print times and ratios of pairs, with the aims that some have."""
    wall, cpu = times
    ratios, bounds = {}, {}
    for (a, b), aim in pairs.items():
        ratios[f"{a} / {b}"] = ratio(wall, a, b)
        ratios[f"{a} / {b}, CPU time"] = ratio(cpu, a, b)
        if aim is not None:
            bounds[f"{a} / {b}"] = aim
    report(title, wall, ratios, bounds, cpu)


def bandwidth(folder: Path, rounds: int = 5) -> None:
    values = {f"w{i}": torch.randn(1024, 4096) for i in range(12)}
    size = sum(x.nbytes for x in values.values())
    two, four = vf.make_mesh(dp=2, tp=2), vf.make_mesh(tp=4)
    sharded, columns = (vf.device_put(values, vf.rules({"*": s}), m) for s, m in (("d/dp f/tp", two), ("d f/tp", four)))
    saves = clock(
        {
            "torch.save": lambda: torch.save(values, folder / "t.pt"),
            "torch.save, forced": lambda: forced(values, folder / "t.pt"),
            "vf.save": lambda: vf.save(folder / "plain", values),
            "vf.save dp=2,tp=2": lambda: vf.save(folder / "sharded", sharded),
        },
        rounds,
    )
    against = "torch.save, forced"
    compare(
        f"saving {size / 2**20:.0f} MiB",
        saves,
        {("vf.save", "torch.save"): None, ("vf.save", against): None, ("vf.save dp=2,tp=2", against): None},
    )
    loads = clock(
        {
            "torch.load": lambda: torch.load(folder / "t.pt"),
            "vf.load": lambda: vf.load(folder / "plain", values),
            "vf.load dp=2,tp=2": lambda: vf.load(folder / "sharded", sharded),
            "vf.load as tp=4": lambda: vf.load(folder / "sharded", columns),
        },
        rounds,
    )
    others = ("vf.load", "vf.load dp=2,tp=2", "vf.load as tp=4")
    compare(f"loading {size / 2**20:.0f} MiB", loads, {(name, "torch.load"): None for name in others})


def stolen(folder: Path, rounds: int = 5, steps: int = 16) -> None:
    """The time of so many steps, in which one save runs."""
    c = Config(layers=4, width=256, heads=4)
    loss, params = functional(c)
    step, opt, mesh = train_step(loss, vf.optim.adamw()), vf.optim.adamw(), vf.make_mesh(dp=1)
    placed = vf.device_put(params, vf.rules({"*": "..."}), mesh)
    state: Any = {"params": placed, "opt": opt.init(placed)}
    x, y = vf.device_put(batch(c), "b/dp t", mesh)

    def run(save: bool) -> None:
        nonlocal state
        saving = vf.save(folder / "run", state, wait=False) if save else None
        for _ in range(steps):
            state, value = step(state, x, y)
        float(value)
        if saving is not None and not saving.done():
            print("  (the save took longer than the steps)")
            saving.result()

    times = clock({"without": lambda: run(False), "with a save": lambda: run(True)}, rounds)
    size = sum(s.nbytes for a in torch.utils._pytree.tree_leaves(state) for s in a.shards)
    title = f"{steps} steps and an asynchronous save of {size / 2**20:.0f} MiB"
    compare(title, times, {("with a save", "without"): 1.05})


def resumed(folder: Path) -> None:
    """From the start of the interpreter to the end of the first step, from the beginning and from a checkpoint."""
    script = Path(__file__).parents[1] / "examples" / "train_gpt.py"
    command = [sys.executable, str(script), "--mesh", "dp=2", "--save", str(folder / "gpt"), "--every", "1"]
    for name, extra in (("from the beginning", ["--steps", "1"]), ("resumed", ["--steps", "2", "--resume"])):
        start = time.perf_counter()
        with subprocess.Popen([*command, *extra], stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            next(line for line in job.stdout if line.startswith("step"))
            print(f"first step {name:20} {time.perf_counter() - start:6.1f} s")
            job.communicate()


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    try:
        bandwidth(folder)
        stolen(folder)
        resumed(folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
