"""Every pipeline schedule on one model: bubble by formula and simulated, memory, and all Gantt charts in one picture.

    python examples/pipeline_schedules.py --ranks 4 --microbatches 8 --picture schedules.svg

Stages cost the same here: f, b and w are the times of a rank's forward, and of the input and weight halves of its
backward. A rank with two stages has two halves of this work. ZB-V and DualPipeV are made for f = b = w; `auto`
searches for the times given, with the memory of 1F1B.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from vescale_fn.schedules.pipelines import Costs, Table, Timeline, auto, check, plot, schedule, simulate


@dataclass(frozen=True)
class Case:
    """A schedule, how many stages it has on a rank, and the time that it says a rank is idle."""

    name: str
    chunks: int
    says: str
    idle: Callable[[int, float, float, float], float]


CASES = (
    Case("gpipe", 1, "(p-1)(f+b+w)", lambda p, f, b, w: (p - 1) * (f + b + w)),
    Case("1f1b", 1, "(p-1)(f+b+w)", lambda p, f, b, w: (p - 1) * (f + b + w)),
    Case("interleaved", 2, "(p-1)(f+b+w)/2", lambda p, f, b, w: (p - 1) * (f + b + w) / 2),
    Case("looped_bfs", 2, "(p-1)(f+b+w)/2", lambda p, f, b, w: (p - 1) * (f + b + w) / 2),
    Case("zb_h1", 1, "(p-1)(f+b-w)", lambda p, f, b, w: (p - 1) * (f + b - w)),
    Case("zb_h2", 1, "(p-1)f", lambda p, f, b, w: (p - 1) * f),
    Case("zbv", 2, "(p-1)f/2", lambda p, f, b, w: (p - 1) * f / 2),
    Case("dualpipev", 2, "(p-1)f/2", lambda p, f, b, w: (p - 1) * f / 2),
    Case("forward_only", 1, "(p-1)f", lambda p, f, b, w: (p - 1) * f),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--times", type=float, nargs=3, default=[1, 1, 1], metavar=("F", "B", "W"))
    parser.add_argument("--picture", default="pipeline_schedules.svg", help="a path that ends in .svg or .png")
    parser.add_argument("--width", type=int, default=1200, help="of the picture, in pixels")
    return parser.parse_args()


def costs_of_chunks(p: int, chunks: int, times: list[float]) -> Costs:
    """The rank's times and memory divided over its stages."""
    f, b, w = (t / chunks for t in times)
    return Costs.of(p * chunks, forward=f, backward_input=b, backward_weight=w, activation=1 / chunks)


def line_of(table: Table, says: str, formula: float | None, line: Timeline) -> str:
    shown = "" if formula is None else f"{formula:.1%}"
    held = f"{max(line.peaks):g}"
    return f"{table.name:12} {says:>15} {shown:>8} {line.bubble:>9.1%} {line.makespan:>9g} {line.period:>8g} {held:>7}"


def main() -> None:
    a = arguments()
    p, m = a.ranks, a.microbatches
    print(f"{p} ranks, {m} microbatches; a rank computes for {m * sum(a.times):g}, and is idle by the formula:")
    print(f"{'schedule':12} {'idle':>15} {'bubble':>8} {'simulated':>9} {'makespan':>9} {'period':>8} {'memory':>7}")
    lines = []
    for case in CASES:
        table = check(schedule(case.name, p, m, chunks=case.chunks))
        line = simulate(table, costs_of_chunks(p, case.chunks, a.times))
        idle = case.idle(p, *a.times)
        print(line_of(table, case.says, idle / (line.busy[0] + idle), line))
        lines.append(line)
    for chunks in (1, 2):
        found = auto(p, m, costs=costs_of_chunks(p, chunks, a.times), memory=p)
        which = "shortest" if found.optimal else "best found"
        print(line_of(found.table, f"{which}, {chunks} a rank", None, found.timeline))
        lines.append(found.timeline)
    print(
        "period: a step's time when steps follow each other without a barrier; memory: microbatches in the fullest rank"
    )
    plot(lines, a.picture, a.width)
    print(f"all charts: {a.picture}")


if __name__ == "__main__":
    main()
