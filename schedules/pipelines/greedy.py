"""Tables by list scheduling: whenever a rank is free it runs the best action that is ready and fits in memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vescale_fn.schedules.pipelines.costs import Costs, fits
from vescale_fn.schedules.pipelines.table import Action

Order = Callable[[str, int, int], float | tuple[float, ...]]  # (kind, stage, microbatch) -> smaller runs first


@dataclass
class _State:
    """A rank in the run: when it is free, what it holds, and what could run on it: (kind, stage) -> (since, k)."""

    free: float
    held: float
    ready: dict[tuple[str, int], list[float]]


def greedy(
    placement: Sequence[int],
    microbatches: int,
    costs: Costs,
    limits: Sequence[float],
    first: Order,
    *,
    split: bool = True,
) -> list[list[Action]]:
    """The rows of a run in which every free rank takes, of the actions that are ready and fit, the one that `first`
    puts first. `split`: backward in halves.

    A forward runs only if what the rank must still hold for the later chunks of one microbatch fits, too; so the
    oldest microbatch can always go on, and the run ends if each limit has room for one microbatch.
    """
    last, ranks = len(placement) - 1, max(placement) + 1
    durations, growth = costs.durations(), costs.growth()
    backward = "I" if split else "B"
    held_most = [max(a, k) if split else a for a, k in zip(costs.activation, costs.kept)]
    reserve = [
        sum(held_most[t] for t in range(s + 1, last + 1) if placement[t] == placement[s]) for s in range(last + 1)
    ]
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    states = [_State(0, 0, {}) for _ in range(ranks)]
    done: dict[tuple[str, int], int] = {}
    events: list[tuple[float, int]] = [(0, r) for r in range(ranks)]

    def offer(kind: str, stage: int, at: float) -> None:
        states[placement[stage]].ready.setdefault((kind, stage), []).append(at)
        heapq.heappush(events, (at, placement[stage]))

    def has_room(rank: int, kind: str, stage: int) -> bool:
        return kind != "F" or fits(states[rank].held + held_most[stage] + reserve[stage], limits[rank])

    for _ in range(microbatches):
        offer("F", 0, 0)
    while events:
        now, rank = heapq.heappop(events)
        state = states[rank]
        if state.free > now:
            continue
        able = [
            (first(kind, s, done.get((kind, s), 0)), kind, s)
            for (kind, s), since in state.ready.items()
            if (n := done.get((kind, s), 0)) < len(since) and since[n] <= now and has_room(rank, kind, s)
        ]
        if not able:
            continue
        _, kind, s = min(able)
        k = done.get((kind, s), 0)
        done[kind, s] = k + 1
        rows[rank].append(Action(kind, s, k))
        state.held += growth[kind][s]
        state.free = end = now + durations[kind][s]
        heapq.heappush(events, (end, rank))
        if kind == "F":
            if s < last:
                offer("F", s + 1, end + (costs.transfer[s] if placement[s + 1] != rank else 0))
            else:
                offer(backward, s, end)
        elif kind != "W":
            if s:
                offer(backward, s - 1, end + (costs.transfer[s - 1] if placement[s - 1] != rank else 0))
            if split:
                offer("W", s, end)
    return rows
