"""`auto` finds the shortest table wherever an exact solver can say what that is, and never loses to a named one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from pipeline_optimum import shortest_makespan

from vescale_fn.schedules.pipelines import Costs, Table, auto, check, find_fault, schedule, simulate
from vescale_fn.schedules.pipelines.generators import loop, vee

CHUNKS = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_h2": 1, "interleaved": 2, "looped_bfs": 2, "zbv": 2, "dualpipev": 2}


def random_costs(rng: random.Random, stages: int) -> Costs:
    def some(low: int, high: int) -> list[int]:
        return [rng.randint(low, high) for _ in range(stages)]

    transfer = rng.choice([0, 1, 3, some(0, 4)])
    activation = some(1, 3)
    kept = [rng.randint(0, a) for a in activation] if rng.random() < 0.5 else None
    return Costs.of(
        stages,
        forward=some(1, 9),
        backward_input=some(1, 9),
        backward_weight=some(0, 9),
        transfer=transfer,
        activation=activation,
        kept=kept,
    )


def random_limits(rng: random.Random, placements: list[tuple[int, ...]], costs: Costs) -> list[float]:
    """Room for at least one microbatch on every rank, in any of the placements."""
    limits = []
    for rank in range(1 + max(placements[0])):
        one = max(sum(a for a, r in zip(costs.activation, pl) if r == rank) for pl in placements)
        limits.append(rng.choice([1, 1.5, 2, 3, 1000]) * one)
    return limits


def total(costs: Costs, m: int) -> float:
    return m * sum(map(sum, (costs.forward, costs.backward_input, costs.backward_weight, costs.transfer * 2)))


def optimum_cases(n: int) -> Iterator[tuple[int, int, int, int]]:
    for seed in range(n):
        rng = random.Random(seed)
        yield seed, rng.choice([1, 2, 3, 3]), rng.choice([1, 2, 3, 4, 4]), 1
    for seed in range(n, n + n // 5):
        yield seed, 2, 2, 2


def one_is_optimal(seed: int, p: int, m: int, v: int) -> bool:
    """Whether integer programming finished, and so compared."""
    rng = random.Random(1000 + seed)
    placements = [loop(p, v), vee(p)] if v == 2 else [loop(p, v)]
    costs = random_costs(rng, p * v)
    limits = random_limits(rng, placements, costs)
    found = auto(p, m, costs=costs, memory=limits)
    assert found.optimal
    assert found.timeline.makespan == simulate(found.table, costs).makespan
    check(found.table, memory=limits, costs=costs)
    exact = [shortest_makespan(pl, m, costs, limits, total(costs, m)) for pl in placements]
    if None not in exact:
        assert found.timeline.makespan == min(e for e in exact if e is not None)
    return None not in exact


@pytest.mark.parametrize(("seed", "p", "m", "v"), optimum_cases(20))
def test_optimal_where_integer_programming_finishes(seed: int, p: int, m: int, v: int) -> None:
    assert one_is_optimal(seed, p, m, v)


def test_optimal_where_a_half_takes_no_time() -> None:
    """A last stage without weights: what takes no time starts and ends at once, and is a choice all the same."""
    costs = Costs.of(
        3, forward=[3, 8, 9], backward_input=[9, 7, 9], backward_weight=[2, 8, 0], transfer=1, activation=[3, 3, 1],
        kept=[2, 0, 1],
    )  # fmt: skip
    found = auto(3, 4, costs=costs, memory=[1000, 6, 1000])
    assert found.optimal
    assert found.timeline.makespan == shortest_makespan(loop(3, 1), 4, costs, [1000, 6, 1000], 1000) == 111


@pytest.mark.deep
def test_optimal_where_integer_programming_finishes_many_times() -> None:
    finished = [one_is_optimal(*case) for case in optimum_cases(400)]
    assert sum(finished) >= 0.95 * len(finished)


def every_order(ops: list[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    """All orders in which each microbatch runs F, I and W of a stage in turn."""
    if not ops:
        yield []
    for op in ops:
        kind, s, k = op
        if not any(t == s and j == k and "FIW".index(other) < "FIW".index(kind) for other, t, j in ops):
            yield from ([op, *rest] for rest in every_order([o for o in ops if o != op]))


@pytest.mark.parametrize("seed", range(6))
def test_optimal_among_all_tables_even_those_that_swap_microbatches(seed: int) -> None:
    """No claim that microbatches are alike: every order of two microbatches on two ranks is simulated."""
    rng = random.Random(seed)
    p, m = 2, 2
    costs = random_costs(rng, p)
    limits = random_limits(rng, [loop(p, 1)], costs)
    orders = [list(every_order([(kind, s, k) for kind in "FIW" for k in range(m)])) for s in range(p)]
    best = float("inf")
    for rows in itertools.product(*orders):
        table = Table.of([[f"{s}{kind}{k}" for kind, s, k in row] for row in rows])
        if find_fault(table, memory=limits, costs=costs) is None:
            best = min(best, simulate(table, costs).makespan)
    assert auto(p, m, costs=costs, memory=limits).timeline.makespan == best


@pytest.mark.parametrize("seed", range(12))
def test_never_longer_than_a_named_table_under_the_same_limit(seed: int) -> None:
    rng = random.Random(seed)
    p, v = rng.choice([2, 3, 4, 6]), rng.choice([1, 2])
    m = rng.choice([p, 2 * p, 2 * p + 3])
    placements = [loop(p, v), vee(p)] if v == 2 else [loop(p, v)]
    costs = random_costs(rng, p * v)
    limits = random_limits(rng, placements, costs)
    found = auto(p, m, costs=costs, memory=limits, nodes=500)
    check(found.table, memory=limits, costs=costs)
    for name, chunks in CHUNKS.items():
        if chunks == v and (name != "dualpipev" or m >= 2 * p):
            table = schedule(name, p, m)
            if find_fault(table, memory=limits, costs=costs) is None:
                assert found.timeline.makespan <= simulate(table, costs).makespan, name


def test_equal_costs_need_no_search() -> None:
    """The bound of the first node proves that ZB-H1 and ZB-V are as short as any."""
    for p, m, v in ((2, 8, 1), (4, 12, 1), (8, 32, 1), (4, 16, 2)):
        found = auto(p, m, chunks=v, nodes=1)
        assert found.optimal
        assert found.timeline.makespan == 3 * m * v + p - 1


def test_a_half_that_keeps_more_than_the_whole_makes_room_for_whole_backwards() -> None:
    costs = Costs.of(2, kept=3)
    found = auto(2, 3, costs=costs, memory=2)
    assert {a.kind for _, a in found.table.actions()} == {"F", "B"}
    check(found.table, memory=2, costs=costs)


def test_the_search_is_the_same_each_time_and_says_when_it_gave_up() -> None:
    costs = Costs.of(6, forward=[3, 1, 4, 1, 5, 9], backward_input=[2, 6, 5, 3, 5, 8], transfer=1)
    first, second = (auto(3, 4, costs=costs, memory=5, nodes=200) for _ in range(2))
    assert first.table == second.table
    assert not first.optimal


def test_schedule_auto_is_the_table_of_the_search() -> None:
    costs = Costs.of(3, forward=[1, 2, 3])
    assert schedule("auto", 3, 4, costs=costs, memory=2) == auto(3, 4, costs=costs, memory=2).table


REFUSED = [
    (
        lambda: auto(3, 4, costs=Costs.of(4)),
        "schedule 'auto': the costs are of 4 stages, which 3 ranks cannot share evenly. "
        "Give costs of ranks * chunks stages, Costs.of(ranks * chunks, ...).",
    ),
    (
        lambda: auto(2, 4, costs=Costs.of(4), chunks=3),
        "schedule 'auto': the costs are of 4 stages, which 2 ranks with 3 chunks each cannot share evenly. "
        "Give costs of ranks * chunks stages, Costs.of(ranks * chunks, ...).",
    ),
    (
        lambda: auto(2, 4, costs=Costs.of(2, activation=[1, 5]), memory=4),
        "schedule 'auto': rank 1 holds 5 of activations for one microbatch, and its limit is 4. "
        "Raise memory, or use more microbatches, which are then smaller.",
    ),
    (lambda: auto(0, 4), "ranks is 0. A pipeline has at least one: pass ranks=1 or more."),
    (
        lambda: auto(2, 4, memory=[1, 2, 3]),
        "memory has 3 limits for 2 ranks. Give one per rank, or one number for all.",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_what_a_refusal_says(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError) as e:
        make()
    assert str(e.value) == text
