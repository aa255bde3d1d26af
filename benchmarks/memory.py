"""Peak resident memory of contestants, each alone in processes of its own.

Counted is what a process holds at most while it steps, beyond what it held before its contestant was built: parameters,
state, activations, communication buffers, and what was compiled. Imports are not counted.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from race import Contestant, settle

Peaks = dict[str, float]


def peaks(contestants: Mapping[str, Contestant], config: Any, world: int = 2, steps: int = 3) -> Peaks:
    """MiB on rank 0 for each contestant."""
    found: Peaks = {}
    for name, make in contestants.items():
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_process, (make, config, world, steps, folder), nprocs=world)  # type: ignore[no-untyped-call]
            found[name] = json.loads((Path(folder) / "peak.json").read_text())
    return found


def _process(rank: int, make: Contestant, config: Any, world: int, steps: int, folder: str) -> None:
    settle(rank, world, folder)
    before = resident("VmRSS")
    step = make(config, rank, world)
    step(), step()  # compile and warm up
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    for _ in range(steps):
        step()
    if rank == 0:
        (Path(folder) / "peak.json").write_text(json.dumps(resident("VmHWM") - before))
    dist.barrier()
    dist.destroy_process_group()


def resident(what: str) -> float:
    """MiB of this process: "VmRSS" now, "VmHWM" at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{what}:"))
    return int(kib) / 2**10
