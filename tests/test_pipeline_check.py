"""The checker of pipeline tables accepts exactly those that run to the right result, and says what is wrong."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_tables import legal_table, mutate, runs_right

from vescale_fn.schedules.pipelines import Costs, ScheduleError, Table, check, find_fault, schedule, with_transfers

NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zbv", "dualpipev", "forward_only")
ENGINES = ("blocking", "buffered")


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, random.Random]:
    """A legal table: a named one or any other, with transfers or without, and a source of mutations."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    m = draw(st.integers(1, 5))
    if draw(st.booleans()):
        table = schedule(draw(st.sampled_from(NAMES)), 2, max(m, 4))
    else:
        table = legal_table(rng, draw(st.integers(1, 4)), draw(st.integers(1, 3)), m, draw(st.booleans()))
    return with_transfers(table) if draw(st.booleans()) else table, rng


@given(tables(), st.sampled_from(ENGINES))
@settings(max_examples=150)
def test_legal_tables_run_and_are_accepted(case: tuple[Table, random.Random], engine: str) -> None:
    table, _ = case
    assert find_fault(table, engine=engine) is None
    assert runs_right(table, engine)


@given(tables(), st.integers(1, 3), st.sampled_from(ENGINES), st.one_of(st.none(), st.integers(1, 6)))
@settings(max_examples=400)
def test_mutated_tables_are_accepted_exactly_if_they_run(
    case: tuple[Table, random.Random], mutations: int, engine: str, memory: int | None
) -> None:
    table, rng = case
    for _ in range(mutations):
        if any(table.rows):
            table = mutate(rng, table)
    assert (find_fault(table, engine=engine, memory=memory) is None) == runs_right(table, engine, memory), str(table)


def test_every_kind_of_fault_is_met_and_names_its_action() -> None:
    rng = random.Random(0)
    outcomes: Counter[str] = Counter()
    for _ in range(1500):
        table = legal_table(rng, rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 4))
        if rng.random() < 0.6:
            table = with_transfers(table)
        table = mutate(rng, table)
        engine = rng.choice(ENGINES)
        fault = find_fault(table, engine=engine, memory=4)
        assert (fault is None) == runs_right(table, engine, 4), str(table)
        if fault is None:
            outcomes["accepted"] += 1
            continue
        outcomes[next(kind for kind, words in KINDS_OF_FAULTS.items() if words in fault.reason)] += 1
        assert str(fault).startswith(f"table: rank {fault.rank}, {fault.action}: ")
        there = fault.action in table.rows[fault.rank]
        assert there != ("it is missing" in fault.reason)
    assert set(outcomes) == {"accepted", *KINDS_OF_FAULTS}, outcomes
    assert outcomes["accepted"] > 100


KINDS_OF_FAULTS = {
    "doubled": "it stands twice",
    "missing": "it is missing",
    "elsewhere": "lives on rank",
    "no transfer": "nothing to transfer",
    "twice": "runs a part of it again",
    "early": "it stands before",
    "crossed": "messages between two ranks arrive in the order",
    "deadlock": "no rank can go on",
    "memory": "the limit is 4",
}


# ---- what is said


def rejected(table: Table, **options: object) -> str:
    with pytest.raises(ScheduleError) as e:
        check(table, **options)  # type: ignore[arg-type]
    assert str(e.value) == str(e.value.fault)
    return str(e.value)


def of(*rows: str, **fields: object) -> Table:
    return replace(Table.of([row.split() for row in rows]), **fields)  # type: ignore[arg-type]


MESSAGES = [
    (
        of("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"),
        "table: rank 0, 0B1: it is missing: microbatch 1 never runs backward on stage 0. Add it to rank 0.",
    ),
    (
        of("0F0 0F1 0B0 0B1", "1F0 1B0 1B1", microbatches=2),
        "table: rank 1, 1F1: it is missing: microbatch 1 never runs forward on stage 1. Add it to rank 1.",
    ),
    (
        of("0F0 0F1 0I0 0I1 0W0", "1F0 1B0 1F1 1B1"),
        "table: rank 0, 0W1: it is missing: microbatch 1 never runs the weight half of backward on stage 0. "
        "Add it to rank 0.",
    ),
    (
        of("0F0 0F1 0B0 0W1", "1F0 1B0 1F1 1B1"),
        "table: rank 0, 0I1: it is missing: microbatch 1 never runs the input half of backward on stage 0. "
        "Add it to rank 0.",
    ),
    (
        of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1F0"),
        "table: rank 1, 1F0: it stands twice, at places 0 and 4 of the row. Leave one out.",
    ),
    (
        of("0F0 0F1 0B0 0I0 0W0 0B1", "1F0 1B0 1F1 1B1"),
        "table: rank 0, 0B0: 0B0 is the whole backward, and 0I0 runs a part of it again. Keep 0B0, or both halves I "
        "and W.",
    ),
    (
        of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", placement=(0, 0)),
        "table: rank 1, 1F0: stage 1 lives on rank 0. Move the action there.",
    ),
    (
        of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=1),
        "table: rank 0, 0F1: there is no microbatch 1: the table has 1, numbered from 0. "
        "Change the number, or leave the action out.",
    ),
    (
        of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", placement=(0,)),
        "table: rank 1, 1F0: there is no stage 1: the table has 1, numbered from 0. "
        "Change the number, or leave the action out.",
    ),
    (
        of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
        "table: rank 0, 0B0: no rank can go on: rank 0 waits at 0B0 for 1B0 of rank 1, rank 1 waits at 1F1 for 0F1 of "
        "rank 0. Move one of these actions after what it waits for.",
    ),
    (
        of("0B0 0F0", "1F0 1B0"),
        "table: rank 0, 0B0: it stands before 0F0, which it needs. Move it after 0F0.",
    ),
    (
        of("0F0 1F0 0I0 1I0 0W0 1W0"),
        "table: rank 0, 0I0: it stands before 1I0, which it needs. Move it after 1I0.",
    ),
    (
        of("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1F1 1RECV_F0 1F0"),
        "table: rank 1, 1RECV_F1: rank 0 sends 0SEND_F0 before 0SEND_F1, and messages between two ranks arrive in the "
        "order in which they are sent. Receive in that order, or move 0SEND_F1.",
    ),
    (
        of("0F0 0SEND_F0 0SEND_F1 0F1", "1RECV_F0 1F0 1RECV_F1 1F1"),
        "table: rank 0, 0SEND_F1: it stands before 0F1, which it needs. Move it after 0F1.",
    ),
    (
        of("0F0 0SEND_F0 0F1 0SEND_F1", "1F0 1RECV_F0 1RECV_F1 1F1"),
        "table: rank 1, 1F0: it stands before 1RECV_F0, which it needs. Move it after 1RECV_F0.",
    ),
    (
        of("0F0 0SEND_F0 0F1", "1RECV_F0 1F0 1RECV_F1 1F1"),
        "table: rank 0, 0SEND_F1: it is missing: stage 1 lives on another rank than stage 0. Add it to rank 0.",
    ),
    (
        of("0F0 1F0 0SEND_F0"),
        "table: rank 0, 0SEND_F0: stage 0 and stage 1 live on one rank, so there is nothing to transfer. "
        "Leave the action out.",
    ),
    (
        of("0F0 0RECV_F0"),
        "table: rank 0, 0RECV_F0: stage 0 is the first, so there is nothing to transfer. Leave the action out.",
    ),
]


@pytest.mark.parametrize(("table", "text"), MESSAGES)
def test_what_a_rejection_says(table: Table, text: str) -> None:
    assert rejected(table) == text


def test_a_blocking_engine_deadlocks_where_a_buffered_one_runs() -> None:
    """Two ranks that send to each other first: the reason why 1F1B needs its transfers in one common order."""
    table = of(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    check(table, engine="buffered")
    assert rejected(table) == (
        "table: rank 0, 0SEND_F1: no rank can go on: rank 0 waits at 0SEND_F1 for 1RECV_F1 of rank 1, rank 1 waits at "
        "1SEND_B0 for 0RECV_B0 of rank 0. Move one of these actions after what it waits for."
    )


def test_memory_is_limited_by_rank_and_in_the_unit_of_the_costs() -> None:
    table = schedule("1f1b", 3, 6)
    check(table, memory=3)
    check(table, memory=[3, 2, 1])
    assert rejected(table, memory=[3, 2, 0.5]) == (
        "1f1b: rank 2, 2F0: it would make the rank hold 1 of activations, and the limit is 0.5. "
        "Run a backward before it, or raise memory."
    )
    heavy = Costs.of(3, activation=[5, 1, 1])
    check(table, memory=15, costs=heavy)
    assert "0F2: it would make the rank hold 15 of activations" in rejected(table, memory=14, costs=heavy)
    with pytest.raises(ValueError) as e:
        check(table, memory=[1, 2])
    assert str(e.value) == "memory has 2 limits for 3 ranks. Give one per rank, or one number for all."
    with pytest.raises(ValueError) as e:
        check(table, costs=Costs.of(2))
    assert str(e.value) == "The costs are of 2 stages, and 1f1b has 3 stages. Pass Costs.of(3, ...)."


def test_what_the_weight_half_keeps_is_held_until_it_runs() -> None:
    table = of("0F0 0I0 0F1 0I1 0W0 0W1")
    check(table, memory=1.5, costs=Costs.of(1, kept=0.5))
    assert "0F1: it would make the rank hold 1.75" in rejected(table, memory=1.5, costs=Costs.of(1, kept=0.75))
    assert "0I0: it would make the rank hold 2 " in rejected(table, memory=1.5, costs=Costs.of(1, kept=2))


def test_limits_allow_for_the_rounding_of_sums() -> None:
    check(of("0F0 0F1 0F2 0B0 0B1 0B2"), memory=0.3, costs=Costs.of(1, activation=0.1))
