"""A few cases of a large matrix that contain every pair of values of two of its axes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]], admits: Callable[[Case], bool] = lambda c: True) -> list[Case]:
    """Cases (a value for each axis) such that every pair of values that any case can have is in one of them. Greedy,
    from a seed: the same cases each time."""
    rng = random.Random(0)
    cases = [c for c in whole(axes) if admits(c)]
    rng.shuffle(cases)
    missing = set().union(*map(_pairs, cases))
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda c: len(_pairs(c) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def whole(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """The whole matrix."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def _pairs(case: Case) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))
