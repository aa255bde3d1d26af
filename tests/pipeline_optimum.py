"""The shortest table by integer programming: an independent answer for schedules of a few microbatches.

Variables: when each action starts, and for each two actions of one rank which comes first. Microbatches run in order
within a kind and stage (they are alike), so pairs that this decides have no variable.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from vescale_fn.schedules.pipelines import Costs

Op = tuple[str, int, int]


def shortest_makespan(
    placement: Sequence[int], m: int, costs: Costs, limits: Sequence[float], horizon: float
) -> int | None:
    """The optimum over tables with split backward, for costs that are integers; `horizon` is the makespan of some legal
    table. None where HiGHS reports numerical trouble."""
    last = len(placement) - 1
    durations, growth = costs.durations(), costs.growth()
    ops = [(kind, s, k) for kind in "FIW" for s in range(last + 1) for k in range(m)]
    at = {op: i for i, op in enumerate(ops)}
    end = len(ops)
    first: dict[tuple[Op, Op], int] = {}  # 1 if the left one comes first
    for a in ops:
        for b in ops:
            if at[a] < at[b] and placement[a[1]] == placement[b[1]] and not _decided(a, b):
                first[a, b] = end + 1 + len(first)
    width = end + 1 + len(first)
    rows: list[np.ndarray] = []
    least: list[float] = []

    def require(terms: dict[int, float], lower: float) -> None:
        row = np.zeros(width)
        for i, c in terms.items():
            row[i] += c
        rows.append(row)
        least.append(lower)

    def after(a: Op, b: Op, lag: float = 0) -> None:
        require({at[b]: 1, at[a]: -1}, durations[a[0]][a[1]] + lag)

    for kind, s, k in ops:
        op = (kind, s, k)
        require({end: 1, at[op]: -1}, durations[kind][s])
        if k + 1 < m:
            after(op, (kind, s, k + 1))
        if kind == "F" and s < last:
            after(op, ("F", s + 1, k), costs.transfer[s] if placement[s] != placement[s + 1] else 0)
        if kind == "I":
            after(("F", s, k), op)
            after(op, ("W", s, k))
            if s:
                after(op, ("I", s - 1, k), costs.transfer[s - 1] if placement[s] != placement[s - 1] else 0)
    for (a, b), y in first.items():
        require({at[b]: 1, at[a]: -1, y: -horizon}, durations[a[0]][a[1]] - horizon)
        require({at[a]: 1, at[b]: -1, y: horizon}, durations[b[0]][b[1]])
    for op in ops:  # what the rank holds once this action has run
        if growth[op[0]][op[1]] <= 0:
            continue
        terms: dict[int, float] = {}
        held = growth[op[0]][op[1]]
        for other in ops:
            if other == op or placement[other[1]] != placement[op[1]]:
                continue
            g = growth[other[0]][other[1]]
            if (other, op) in first:
                terms[first[other, op]] = terms.get(first[other, op], 0) - g
            elif (op, other) in first:
                held += g
                terms[first[op, other]] = terms.get(first[op, other], 0) + g
            elif _decided(other, op) > 0:
                held += g
        require(terms, held - limits[placement[op[1]]])
    objective = np.zeros(width)
    objective[end] = 1
    upper = np.full(width, horizon)
    upper[end + 1 :] = 1
    whole = np.zeros(width)
    whole[end + 1 :] = 1
    found = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), np.array(least), np.inf),
        bounds=Bounds(np.zeros(width), upper),
        integrality=whole,
        options={"mip_rel_gap": 0},
    )
    if found.status == 4:
        return None
    assert found.status == 0, found.message
    assert abs(found.fun - round(found.fun)) < 1e-4  # costs are integers
    return round(found.fun)


def _decided(a: Op, b: Op) -> int:
    """1 if a comes before b in any run, -1 if after, 0 if that is open."""
    (kind, s, k), (other, t, j) = a, b
    if s == t:
        x, y = ("FIW".index(kind), k), ("FIW".index(other), j)
        if x != y and x[0] <= y[0] and x[1] <= y[1]:
            return 1
        if x != y and x[0] >= y[0] and x[1] >= y[1]:
            return -1
    return 0
