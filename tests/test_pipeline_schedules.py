"""Named pipeline schedules: makespan, bubble and memory equal their closed forms, and none is worse than the table
that torch.distributed.pipelining has for the same case."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections.abc import Callable
from fractions import Fraction

import pytest
from pipeline_tables import runs_right

from vescale_fn.schedules.pipelines import Action, Costs, Table, check, schedule, simulate, with_transfers
from vescale_fn.schedules.pipelines.transfers import transfer_fault

RANKS = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 17, 24, 40)
CHUNKS = {"interleaved": (1, 2, 3), "looped_bfs": (1, 2, 3), "zbv": (2,), "dualpipev": (2,), "forward_only": (1, 2)}
NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zbv", "dualpipev", "forward_only")


def possible(name: str, p: int, m: int) -> bool:
    return name != "dualpipev" or m >= 2 * p


def cases(name: str) -> list[tuple[int, int, int]]:
    return [(p, m, v) for p in RANKS for m in MICROBATCHES for v in CHUNKS.get(name, (1,)) if possible(name, p, m)]


@pytest.mark.parametrize("name", NAMES)
def test_named_tables_pass_the_checker(name: str) -> None:
    for p, m, v in cases(name):
        table = check(schedule(name, p, m, chunks=v))
        assert (table.ranks, table.stages, table.microbatches, table.name) == (p, p * v, m, name)
        assert table.trains == (name != "forward_only")


@pytest.mark.parametrize("name", NAMES)
def test_their_transfers_run_on_both_engines(name: str) -> None:
    for p, m, v in [(1, 2, 2), (2, 4, 2), (3, 7, 2), (4, 9, 2)]:
        table = with_transfers(schedule(name, p, m, chunks=v if name in CHUNKS else None))
        for engine in ("blocking", "buffered"):
            assert transfer_fault(table, engine) is None
            assert runs_right(table, engine)


# ---- closed forms, for equal costs f = b = w = 1 of a stage


def makespan(name: str, p: int, m: int, v: int) -> int | None:
    """Of p ranks, m microbatches and v chunks; None where no closed form is claimed (fewer microbatches than ranks)."""
    match name:
        case "gpipe" | "1f1b":
            return 3 * (m + p - 1)
        case "interleaved" | "looped_bfs":
            return 3 * max(v * m + p - 1, v * p + m - 1)
        case "zb_h1":
            return max(3 * m + p - 1, 2 * (m + p) - 1)
        case "zb_h2":
            return 3 * m + p - 1 if m >= p else None
        case "zbv" | "dualpipev":
            return 6 * m + p - 1 if m >= 2 * p else None
        case _:
            return max(v * m + p - 1, v * p + m - 1)


def peaks(name: str, p: int, m: int, v: int) -> list[int] | None:
    """Activations that each rank holds, of one stage and microbatch each."""
    match name:
        case "gpipe" | "looped_bfs" | "forward_only":
            return [v * m] * p
        case "1f1b":
            return [min(m, p - r) for r in range(p)]
        case "interleaved":
            ahead = min(v, 2)
            return [min(v * m, (v - 1) * p + ahead * (p - 1 - r) + 1) for r in range(p)] if m % p == 0 else None
        case "zb_h1":
            return [p] * p if m >= p else None
        case "zb_h2":
            return [2 * p - 1] * p if m >= 2 * p - 1 else None
        case "zbv":
            return [2 * p] * p if m >= 2 * p else None
        case _:
            return [2 * p + 1 if p > 1 else 3] * p if m > 2 * p else None


@pytest.mark.parametrize("name", NAMES)
def test_makespan_bubble_and_memory_equal_the_closed_forms(name: str) -> None:
    claimed = 0
    for p, m, v in cases(name):
        line = simulate(schedule(name, p, m, chunks=v))
        work = m * v * (1 if name == "forward_only" else 3)
        assert line.busy == (work,) * p
        if (expected := makespan(name, p, m, v)) is not None:
            assert line.makespan == expected, (p, m, v)
            assert line.bubble == pytest.approx(float(1 - Fraction(work, expected)), rel=1e-15)
            claimed += 1
        if (held := peaks(name, p, m, v)) is not None:
            assert list(line.peaks) == held, (p, m, v)
    assert claimed > len(cases(name)) / 3


UNEQUAL = ((2, 3, 1), (1, 2, 1), (3, 3, 2), (2, 2, 2))  # times of forward and of both halves of backward


@pytest.mark.parametrize(("f", "b", "w"), UNEQUAL)
def test_bubbles_for_times_that_differ(f: int, b: int, w: int) -> None:
    """Idle time of a rank: (p-1)(f+b+w), with interleaving of chunks; (p-1)(f+b-w) for ZB-H1; and for ZB-H2, from a
    rank's first action on, (p-1)(f+b-2w), where that is positive (Qi et al., 2023, table 1)."""
    for p in (2, 3, 4, 6):
        m = 4 * p
        costs = Costs.of(p, forward=f, backward_input=b, backward_weight=w)
        for name in ("gpipe", "1f1b"):
            assert simulate(schedule(name, p, m), costs).idle == ((p - 1) * (f + b + w),) * p
        chunked = Costs.of(3 * p, forward=f, backward_input=b, backward_weight=w)
        assert simulate(schedule("interleaved", p, m, chunks=3), chunked).idle == ((p - 1) * (f + b + w),) * p
        h1 = simulate(schedule("zb_h1", p, m), costs)
        assert h1.makespan == m * (f + b + w) + (p - 1) * (f + b - w)
        h2 = simulate(schedule("zb_h2", p, m), costs)
        assert h2.period <= m * (f + b + w) + max(0, (p - 1) * (f + b - 2 * w))


def test_zero_bubble_schedules_lose_no_time_between_steps() -> None:
    for p in RANKS:
        for m in (2 * p, 2 * p + 1, 3 * p, 5 * p):
            for name, chunks in (("zb_h2", 1), ("zbv", 2)):
                assert simulate(schedule(name, p, m)).period == 3 * m * chunks


def test_fewer_microbatches_never_make_zb_h2_slower_than_zb_h1() -> None:
    for p, m, _ in cases("zb_h2"):
        h1, h2 = (simulate(schedule(name, p, m)) for name in ("zb_h1", "zb_h2"))
        assert h2.makespan <= h1.makespan
        assert h2.period <= h1.period
        assert max(h2.peaks) <= 2 * p - 1


# ---- against torch.distributed.pipelining


def torch_table(name: str, p: int, m: int, v: int) -> Table | None:
    """Its table, or None where it refuses."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            rows = get_schedule_ops(name, p, m, num_stages_per_rank=v)
    except ValueError:
        return None
    parts = [[part for a in row if a is not None for part in (a.sub_actions or [a])] for row in rows]
    return Table.of([[a for a in map(str, row) if a[-1].isdigit()] for row in parts], name)


RIVALS = {
    "gpipe": ("GPipe", (1,)),
    "interleaved": ("Interleaved1F1B", (2, 3)),
    "looped_bfs": ("LoopedBFS", (2, 3)),
    "zbv": ("ZBVZeroBubble", (2,)),
    "dualpipev": ("DualPipeV", (2,)),
}


def compare_with_torch(name: str, ranks: tuple[int, ...], microbatches: tuple[int, ...]) -> int:
    """How many cases were compared."""
    rival, chunks = RIVALS[name]
    compared = 0
    for p, m, v in itertools.product(ranks, microbatches, chunks):
        if possible(name, p, m) and (theirs := torch_table(rival, p, m, v)) is not None:
            ours, line = simulate(schedule(name, p, m, chunks=v)), simulate(check(theirs))
            assert ours.makespan <= line.makespan, f"{ours}\n{line}"
            assert max(ours.peaks) <= max(line.peaks), f"{ours}\n{line}"
            compared += 1
    return compared


@pytest.mark.parametrize("name", RIVALS)
def test_no_table_is_worse_than_that_of_torch(name: str) -> None:
    assert compare_with_torch(name, (2, 4), (1, 3, 4, 6, 8, 12, 17)) >= 7


@pytest.mark.deep
@pytest.mark.parametrize("name", RIVALS)
def test_no_table_is_worse_than_that_of_torch_in_many_cases(name: str) -> None:
    assert compare_with_torch(name, RANKS, MICROBATCHES) >= 40


def test_torch_1f1b_is_ours_but_for_its_last_rank_which_begins_with_the_second_microbatch() -> None:
    for p in (2, 3, 8):
        for m in (p, p + 1, 2 * p):
            if (theirs := torch_table("1F1B", p, m, 1)) is None:
                continue
            ours = schedule("1f1b", p, m)
            assert simulate(ours).makespan == 3 * (m + p - 1)
            off = theirs.rows[-1]
            assert off[0] in (Action("F", p - 1, 0), Action("F", p - 1, 1))
            fixed = [a._replace(microbatch=a.microbatch - 1) if a.kind == "F" else a for a in off] if off[0][2] else off
            assert (*theirs.rows[:-1], tuple(fixed)) == ours.rows


def test_zbv_is_no_longer_than_the_interleaved_zero_bubble_table_of_torch() -> None:
    for p in (2, 4):
        for m in (p, 2 * p, 3 * p):
            theirs = torch_table("InterleavedZeroBubble", p, m, 2)
            assert theirs is not None
            assert simulate(schedule("zbv", p, m)).makespan <= simulate(check(theirs)).makespan


# ---- size


def test_steps_of_making_and_checking_a_table_grow_with_its_actions_and_not_faster() -> None:
    """Calls of functions for each action, which no clock can disturb (seconds are in benchmarks/bench_pipeline.py)."""
    small, large = (
        calls(lambda p=p, m=m: check(schedule("interleaved", p, m, chunks=2))) / (p * m * 4)
        for p, m in ((8, 32), (32, 128))
    )
    assert large < 1.1 * small
    assert large < 35


def calls(run: Callable[[], object]) -> int:
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


# ---- bad input

REFUSED = [
    (
        lambda: schedule("2f2b", 2, 4),
        "There is no schedule '2f2b'. Known: gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_h2, zbv, dualpipev, "
        "forward_only, auto; or make a Table with Table.of or Table.from_csv.",
    ),
    (
        lambda: schedule("dualpipev", 4, 7),
        "schedule 'dualpipev' needs at least 8 microbatches on 4 ranks, and there are 7. Use microbatches=8 or more, "
        "or 'zbv', which has the same stages and takes any number.",
    ),
    (
        lambda: schedule("zbv", 4, 8, chunks=3),
        "schedule 'zbv' puts 2 stages on a rank, and chunks is 3. Leave chunks out, or use 'interleaved' or "
        "'looped_bfs', which take any number.",
    ),
    (lambda: schedule("gpipe", 0, 4), "ranks is 0. A pipeline has at least one: pass ranks=1 or more."),
    (lambda: schedule("gpipe", 4, 0), "microbatches is 0. A pipeline has at least one: pass microbatches=1 or more."),
    (
        lambda: schedule("interleaved", 4, 4, chunks=0),
        "chunks is 0. A pipeline has at least one: pass chunks=1 or more.",
    ),
    (
        lambda: schedule("1f1b", 4, 4, memory=3),
        "schedule '1f1b' does not depend on memory: its order is fixed by ranks, microbatches and chunks. "
        "Leave memory out, or use schedule 'auto', which searches with it.",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_what_a_refusal_says(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError) as e:
        make()
    assert str(e.value) == text
