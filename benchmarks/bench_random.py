"""What random numbers cost against torch's own: 2**24 of them, one thread, CPU time.

python benchmarks/bench_random.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from race import Times, ratio, report

import vescale_fn as vf
from vescale_fn.random.philox import random_bits

N = 1 << 24


def ambient(draw: Callable[[], Any], key: torch.Tensor) -> Callable[[], Any]:
    def run() -> Any:
        with vf.random.scope(key):
            return draw()

    return run


def main(rounds: int = 9) -> None:
    torch.set_num_threads(1)
    key, x = vf.random.key(0), torch.ones(N)
    half = [((0, N // 64),), ((3, 34),)]  # of each line of 64, 31 that begin and end within a block of four
    contestants: dict[str, Callable[[], Any]] = {
        "torch.rand": lambda: torch.rand(N),
        "bits": lambda: vf.random.bits(key, N),
        "uniform": lambda: vf.random.uniform(key, N),
        "torch.randn": lambda: torch.randn(N),
        "normal": lambda: vf.random.normal(key, N),
        "F.dropout": lambda: F.dropout(x, 0.1),
        "F.dropout in a scope": ambient(lambda: F.dropout(x, 0.1), key),
        "torch.rand of half": lambda: torch.rand(N // 64, 31),
        "bits of a shard": lambda: random_bits(key, 0, (N // 64, 64), "draw", half),
    }
    times: Times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    pairs = [
        ("bits", "torch.rand"),
        ("uniform", "torch.rand"),
        ("normal", "torch.randn"),
        ("F.dropout in a scope", "F.dropout"),
        ("bits of a shard", "torch.rand of half"),
    ]
    report("random", times, {f"{a} / {b}": ratio(times, a, b) for a, b in pairs}, {"bits / torch.rand": 4.0})


if __name__ == "__main__":
    main()
