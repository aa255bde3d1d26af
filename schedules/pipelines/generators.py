"""The tables that have names, each as a function (p ranks, m microbatches, v stages on a rank) -> rows.

Sources: GPipe (Huang et al., 2019); 1F1B (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2020);
interleaved (Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021); looped BFS
(Lamy-Poirier, "Breadth-first pipeline parallelism", 2022); ZB-H1 and ZB-H2 (Qi et al., "Zero bubble pipeline
parallelism", 2023); ZB-V (Qi et al., "Pipeline parallelism with controllable memory", 2024); DualPipeV (DeepSeek-AI,
2025). Below, f, b and w are the times of a forward and of the two halves of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise

from vescale_fn.schedules.pipelines.costs import Costs
from vescale_fn.schedules.pipelines.greedy import greedy
from vescale_fn.schedules.pipelines.simulate import simulate
from vescale_fn.schedules.pipelines.table import Action, Table

Rows = list[list[Action]]


def loop(p: int, v: int) -> tuple[int, ...]:
    """The rank of each stage: 0 1 2 0 1 2 ..."""
    return tuple(range(p)) * v


def vee(p: int) -> tuple[int, ...]:
    """The rank of each stage, two on each: 0 1 2 2 1 0."""
    return (*range(p), *reversed(range(p)))


def gpipe(p: int, m: int, v: int) -> Rows:
    """All forwards, then all backwards: a bubble of (p-1)(f+b+w), and m microbatches in memory."""
    return looped_bfs(p, m, 1)


def looped_bfs(p: int, m: int, v: int) -> Rows:
    """Every chunk runs all microbatches before the next one does: a bubble of (p-1)(f+b+w) for m >= p."""
    return [
        [Action("F", s, k) for s in range(r, p * v, p) for k in range(m)]
        + [Action("B", s, k) for s in reversed(range(r, p * v, p)) for k in range(m)]
        for r in range(p)
    ]


def forward_only(p: int, m: int, v: int) -> Rows:
    """Inference: every chunk runs all microbatches."""
    return [[Action("F", s, k) for s in range(r, p * v, p) for k in range(m)] for r in range(p)]


def one_f_one_b(p: int, m: int, v: int) -> Rows:
    """Forwards until the first backward can arrive, then one of each: GPipe's bubble, but p - r microbatches in the
    memory of rank r."""
    return interleaved(p, m, 1)


def interleaved(p: int, m: int, v: int) -> Rows:
    """1F1B over v chunks: microbatches pass through all chunks in groups of p (or of nearly equal size, if p does not
    divide m). A bubble of (p-1)(f+b+w), of chunks, which are v times smaller."""
    rounds = max(1, m // p)
    edges = [m * i // rounds for i in range(rounds + 1)]
    groups = [range(a, b) for a, b in pairwise(edges)]
    longest = max(map(len, groups))
    rows = []
    for r in range(p):
        chunks = range(r, p * v, p)
        forwards = [Action("F", s, k) for group in groups for s in chunks for k in group]
        backwards = [Action("B", s, k) for group in groups for s in reversed(chunks) for k in group]
        rows.append(_alternate(forwards, backwards, first=(v - 1) * longest + (p - 1 - r) * min(v, 2) + 1))
    return rows


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], first: int) -> list[Action]:
    """`first` forwards, then a backward and a forward in turn."""
    row = list(forwards[:first])
    for at, b in zip(count(first), backwards):
        row += [b, *forwards[at : at + 1]]
    return row


class _Row:
    """A row under construction: `run("F0 I1")` appends the next forward of chunk 0, then the next I of chunk 1. What
    has run for all microbatches is passed over."""

    def __init__(self, m: int, *stages: int) -> None:
        self.m, self.stages = m, stages
        self.done = {(kind, chunk): 0 for kind in "FIW" for chunk in range(len(stages))}
        self.actions: list[Action] = []

    def left(self, kind: str, chunk: int) -> int:
        return self.m - self.done[kind, chunk]

    def run(self, what: str, times: int = 1) -> None:
        for action in times * what.split():
            kind, chunk = action[0], int(action[1])
            parts = "IW" if kind == "B" else kind
            if self.left(parts[0], chunk):
                self.actions.append(Action(kind, self.stages[chunk], self.done[parts[0], chunk]))
                for part in parts:
                    self.done[part, chunk] += 1


def zb_h1(p: int, m: int, v: int) -> Rows:
    """1F1B with split backward: rank r runs its weight halves r late, and holds p microbatches as 1F1B's rank 0 does.
    A bubble of (p-1)(f+b-w)."""
    return [_late_weights(r, m, first=p - r, late=r) for r in range(p)]


def zb_h2(p: int, m: int, v: int) -> Rows:
    """ZB-H1 with more forwards in place of the first bubble, and weight halves in place of the last: of a rank's own
    time, from its first action on, (p-1)(f+b-2w) is lost, with 2p - 1 microbatches in memory."""
    more = min(max(m - p, 0), p - 1)  # with fewer microbatches there is less to fill bubbles with
    return [_late_weights(r, m, p - r + min(p - 1 - r, more), r + min(r, more)) for r in range(p)]


def _late_weights(stage: int, m: int, first: int, late: int) -> list[Action]:
    row = _Row(m, stage)
    row.run("F0", first)
    row.run("I0 F0", late)
    row.run("I0 W0 F0", m - late)
    row.run("W0", late)
    return row.actions


def zbv(p: int, m: int, v: int) -> Rows:
    """Two chunks on a rank, down and up again: the rank that runs the first stage runs the last one, too, and starts
    backward as soon as a microbatch has gone round. At equal costs and m >= 2p no rank waits after its first action,
    with the memory of 1F1B. For fewer microbatches, the shortest of: the same rows, those of 2p - 1 microbatches
    without the ones that are not there, and list scheduling."""
    if m >= 2 * p:
        return [_zbv_row(p, m, r) for r in range(p)]
    return shortest(
        vee(p),
        m,
        *([[a for a in _zbv_row(p, n, r) if a.microbatch < m] for r in range(p)] for n in (m, 2 * p - 1)),
        greedy(vee(p), m, Costs.of(2 * p), [2 * p] * p, lambda kind, s, k: ("IFW".index(kind), k, -s)),
    )


def shortest(placement: tuple[int, ...], m: int, *candidates: Rows) -> Rows:
    """The rows with the shortest makespan, then period, at equal costs."""

    def length(rows: Rows) -> tuple[float, float]:
        line = simulate(Table("", placement, m, tuple(map(tuple, rows))))
        return line.makespan, line.period

    return min(candidates, key=length)


def _zbv_row(p: int, m: int, r: int) -> list[Action]:
    row = _Row(m, r, 2 * p - 1 - r)
    row.run("F0", 2 * (p - r) - 1)
    row.run("F1 F0", r)
    row.run("F1 I1 W1", p - r)
    while row.left("F", 0) or row.left("F", 1):
        row.run("F0 I0 W0 F1 I1 W1")
    row.run("I0 I1", r)
    row.run("I0 W0", p - r)
    row.run("I0 I1 W1 W0", m)
    return row.actions


def dualpipev(p: int, m: int, v: int) -> Rows:
    """ZB-V's stages, with whole backwards in the middle, each beside a forward of the other chunk, so that an engine
    can overlap the transfers of one with the work of the other. ZB-V's bubble at equal costs; m >= 2p; memory of
    2p + 1 chunks."""
    return [_dualpipev_row(p, m, r) for r in range(p)]


def _dualpipev_row(p: int, m: int, r: int) -> list[Action]:
    row, after = _Row(m, r, 2 * p - 1 - r), p - 1 - r
    row.run("F0", 2 * after)
    row.run("F0 F1", r + 1)
    row.run("I1 W1 F1", after)
    row.run("F0 B1 F1 B0", m - 2 * p + r + 1)
    row.run("B1 F1 B0", after)
    ends = [chunk for _ in range(r + 1) for chunk in "10"]  # the last backwards of both chunks in turn
    for chunk in ends[: r + 1]:
        row.run(f"B{chunk}")
    for chunk in ends[r + 1 :]:
        row.run(f"I{chunk}")
    for chunk in (ends[r + 1 :] + ["0"] * after)[:after]:
        row.run(f"W{chunk} I0")
    row.run("W1 W0", m)
    return row.actions
