"""Contestants run in turn in the same processes, so that the noise of the machine hits all of them alike.

A contestant is a function of (config, rank, world) that builds everything and returns a step: a function without
arguments. Processes are pinned to one core each. What counts is the median over rounds of the ratio to another
contestant in the same round.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Step = Callable[[], Any]
Contestant = Callable[[Any, int, int], Step]
Times = dict[str, list[float]]

RESULTS = Path(__file__).parent / "results.json"


def race(
    contestants: Mapping[str, Contestant], config: Any, world: int = 2, rounds: int = 15, steps: int = 2
) -> tuple[Times, Times]:
    """Seconds per step of each contestant in each round on rank 0: by the clock, and of CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        args = (dict(contestants), config, world, rounds, steps, folder)
        mp.spawn(_process, args, nprocs=world)  # type: ignore[no-untyped-call]
        clock, cpu = json.loads((Path(folder) / "times.json").read_text())
    return clock, cpu


def _process(
    rank: int, contestants: dict[str, Contestant], config: Any, world: int, rounds: int, steps: int, folder: str
) -> None:
    settle(rank, world, folder)
    built = {name: make(config, rank, world) for name, make in contestants.items()}
    for step in built.values():
        step(), step()  # compile and warm up
    clock: Times = {name: [] for name in built}
    cpu: Times = {name: [] for name in built}
    for _ in range(rounds):
        for name, step in built.items():
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            clock[name].append((time.perf_counter() - start) / steps)
            cpu[name].append((time.process_time() - busy) / steps)
    dist.barrier()
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps([clock, cpu]))
    dist.destroy_process_group()


def settle(rank: int, world: int, folder: str) -> None:
    """One core for this process, which joins the others."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)


def ratio(times: Times, a: str, b: str) -> float:
    """Median over rounds of time(a) / time(b)."""
    return statistics.median(x / y for x, y in zip(times[a], times[b]))


def report(
    name: str,
    clock: Times,
    ratios: Mapping[str, float],
    bounds: Mapping[str, float],
    cpu: Times | None = None,
    memory: Mapping[str, float] | None = None,
) -> None:
    """Print medians, peak memory, and ratios beside their bounds."""
    what = ", of CPU time" * (cpu is not None) + ", and peak memory beyond imports, MiB" * (memory is not None)
    print(f"\n{name}: median seconds{what}")
    for who, t in clock.items():
        busy = f"{statistics.median(cpu[who]):8.4f}" if cpu and who in cpu else ""
        peak = f"{memory[who]:8.1f}" if memory and who in memory else ""
        print(f"  {who:28} {statistics.median(t):8.4f} {busy:8} {peak}".rstrip())
    print("ratios (median over rounds)")
    for what, r in ratios.items():
        bound = f"   aim: at most {bounds[what]}" if what in bounds else ""
        print(f"  {what:40} {r:6.3f}{bound}")


def publish(rows: Mapping[tuple[str, str], float], memory: Mapping[tuple[str, str], tuple[float, float]]) -> None:
    """Keep ratios of step times by (what, against), and the peak memory of both, for the table in the README."""
    known = json.loads(RESULTS.read_text())["ratios"] if RESULTS.exists() else []
    others = [r for r in known if (r["what"], r["against"]) not in rows]
    fresh = [
        {"what": what, "against": against, "ratio": round(r, 3)}
        | ({"memory": [round(m) for m in memory[what, against]]} if (what, against) in memory else {})
        for (what, against), r in rows.items()
    ]
    results = {"where": "gloo on CPU, one core a process", "ratios": others + fresh}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
