"""The order in which a table can run: what each action waits for, when it starts, and who waits for whom forever."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from vescale_fn.schedules.pipelines.costs import Costs
from vescale_fn.schedules.pipelines.table import Action, Table

Ends = list[float | None]  # when each microbatch is done, or None


@dataclass(frozen=True)
class Source:
    """Something that an action waits for: when it is done, by microbatch, how much later it is here, and what it is."""

    ends: Ends
    lag: float
    kind: str
    stage: int


@dataclass(frozen=True)
class Walk:
    """When every action starts, if each begins as early as it can, and the ranks that never reach their end: rank ->
    what it waits for (the kind B stands for I, too)."""

    starts: tuple[tuple[float, ...], ...]
    stuck: dict[int, Action]


def walk(table: Table, costs: Costs) -> Walk:
    """Run the table's computations, every rank in its order, an action as soon as its inputs are on its rank.

    Time and memory are linear in the number of actions. The actions must be of stages and microbatches that exist.
    """
    sources, results = _edges(table, costs)
    durations = costs.durations()
    starts: list[list[float]] = [[] for _ in table.rows]
    free = [0.0 if isinstance(costs.forward[0], float) else 0] * table.ranks
    waiting: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    stuck: dict[int, Action] = {}
    todo = deque(range(table.ranks))
    while todo:
        rank = todo.popleft()
        stuck.pop(rank, None)
        row, begun, now = table.rows[rank], starts[rank], free[rank]
        for at in range(len(begun), len(row)):
            kind, stage, k = row[at]
            start = now
            for source in sources[kind][stage]:
                end = source.ends[k]
                if end is None:
                    stuck[rank] = Action(source.kind, source.stage, k)
                    waiting[stuck[rank]].append(rank)
                    break
                start = max(start, end + source.lag)
            else:
                begun.append(start)
                now = start + durations[kind][stage]
                if kind != "W":
                    results[kind][stage][k] = now
                    todo.extend(waiting.pop(("F" if kind == "F" else "B", stage, k), ()))
                continue
            break
        free[rank] = now
    return Walk(tuple(map(tuple, starts)), stuck)


def _edges(table: Table, costs: Costs) -> tuple[dict[str, list[list[Source]]], dict[str, list[Ends]]]:
    """By kind and stage: what an action waits for, and where it notes that it is done."""
    place, last = table.placement, table.stages - 1
    forward: list[Ends] = [[None] * table.microbatches for _ in place]
    gradient: list[Ends] = [[None] * table.microbatches for _ in place]

    def lag(stage: int) -> float:
        return costs.transfer[stage] if place[stage] != place[stage + 1] else 0

    before = [[Source(forward[s - 1], lag(s - 1), "F", s - 1)] if s else [] for s in range(last + 1)]
    own = [[Source(forward[s], 0, "F", s)] for s in range(last + 1)]
    after = [[Source(gradient[s + 1], lag(s), "B", s + 1)] if s < last else [] for s in range(last + 1)]
    backward = [a + b for a, b in zip(own, after)]
    half = [[Source(gradient[s], 0, "B", s)] for s in range(last + 1)]
    sources = {"F": before, "B": backward, "I": backward, "W": half}
    return sources, {"F": forward, "B": gradient, "I": gradient}
