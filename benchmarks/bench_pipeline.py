"""Making, checking and simulating large pipeline tables.

python benchmarks/bench_pipeline.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vescale_fn.schedules.pipelines import check, schedule, simulate, with_transfers

RANKS, MICROBATCHES = 64, 1024


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    return act(), time.process_time() - start


def main() -> None:
    print(f"{RANKS} ranks, {MICROBATCHES} microbatches: seconds of CPU time")
    print(f"{'schedule':12} {'actions':>9} {'make':>7} {'check':>7} {'both':>7} {'simulate':>9} {'transfers':>10}")
    for name in ("1f1b", "interleaved", "zbv", "dualpipev"):
        table, made = timed(lambda name=name: schedule(name, RANKS, MICROBATCHES))
        _, checked = timed(lambda table=table: check(table))
        _, simulated = timed(lambda table=table: simulate(table))
        _, sent = timed(lambda table=table: with_transfers(table))
        n = len(list(table.actions()))
        print(f"{name:12} {n:>9,} {made:>7.2f} {checked:>7.2f} {made + checked:>7.2f} {simulated:>9.2f} {sent:>10.2f}")


if __name__ == "__main__":
    main()
