"""Collectives on values of every rank's own, as regions write them, in both engines against NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import manual_tasks as tasks
import pytest
import torch
from hand import Hand
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worker_pool import Pool

from vescale_fn.codegen import generate
from vescale_fn.cost_report import collectives_of, cost_analysis
from vescale_fn.engines import engine_for
from vescale_fn.memory import measure_memory, peak_bytes
from vescale_fn.passes import optimize
from vescale_fn.program import Program
from vescale_fn.sharding import comm as c
from vescale_fn.sharding.layout import Shard
from vescale_fn.sharding.mesh import Mesh, MeshShape
from vescale_fn.text import program_text

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64]


def check(program: Program, seed: int = 0) -> None:
    """The program gives on virtual ranks what NumPy says."""
    values = tasks.inputs(program, seed)
    got = engine_for(Mesh(program.mesh)).load(program)([list(row) for row in values])
    tasks.assert_equal(got, tasks.expected(program, values), program)


def check_on_processes(pool: Pool, processes: int, task: Any, name: str, sizes: tuple[int, int], *args: Any) -> None:
    program = tasks.PROGRAMS[name](MeshShape(("x", "y"), sizes), *args)
    got = [rank for process in pool.run(task, name, sizes, *args, processes=processes) for rank in process]
    tasks.assert_equal(got, tasks.expected(program, tasks.inputs(program)), program)


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("y",)], ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_on_virtual_ranks(dtype: torch.dtype, axes: tuple[str, ...]) -> None:
    program = tasks.every_local(MeshShape(("x", "y"), (2, 3)), dtype, axes)
    check(program)
    check(optimize(program))


@pytest.mark.parametrize("task", [tasks.run, tasks.run_in_order])
@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("x",)], ids="-".join)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_collective_on_processes(pool: Pool, processes: int, axes: tuple[str, ...], task: Any) -> None:
    check_on_processes(pool, processes, task, "every_local", (2, 2), torch.float32, axes)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_dtype_travels(pool: Pool, dtype: torch.dtype) -> None:
    """On three ranks a process."""
    check_on_processes(pool, 2, tasks.run, "every_local", (3, 2), dtype)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_lazy_views_travel_as_what_they_mean(pool: Pool, processes: int) -> None:
    """Each with work to do before somebody reads what arrives."""
    program = tasks.lazy(MeshShape(("x", "y"), (2, 2)))
    assert sum(name.startswith("wait_") for name in generate(program).names) == 10
    check(program)
    check_on_processes(pool, processes, tasks.run, "lazy", (2, 2))


@st.composite
def local_programs(draw: Any) -> Program:
    """One collective along some axes of a mesh, in some order, on local blocks; another axis may cut them unevenly."""
    mesh = MeshShape(("a", "b", "c"), tuple(draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))))
    axes = tuple(draw(st.permutations(mesh.names)))[: draw(st.integers(1, 3))]
    n, dtype, hand = mesh.extent(axes), draw(st.sampled_from(DTYPES)), Hand(mesh)
    other = draw(st.sampled_from([None, *(a for a in mesh.names if a not in axes)]))
    rows = draw(st.integers(0, 5))
    states = {other: Shard(0, 1, uneven=rows)} if other else {}
    kind = draw(st.sampled_from(["pairs", "source", "rows"]))
    if kind == "rows":
        return hand.program(tasks.ragged(hand, axes, dtype, rows, states))
    x = hand.input("x", (rows, draw(st.integers(0, 2))), states, dtype)
    if kind == "pairs":
        sources, destinations = draw(st.permutations(range(n))), draw(st.permutations(range(n)))
        comm: Any = c.PPermute(axes, tuple(zip(sources, destinations))[: draw(st.integers(0, n))])
    else:
        comm = c.Broadcast(axes, draw(st.integers(0, n - 1)))
    return hand.program(hand.op(comm, (x,), hand.like(x, "y")))


@settings(max_examples=200)
@given(local_programs(), st.integers(0, 99))
def test_any_blocks_along_any_axes(program: Program, seed: int) -> None:
    check(program, seed)


def test_one_tensor_may_say_several_things() -> None:
    """Equal sizes at equal places: input and output offsets are one value, as are the sizes."""
    hand = Hand(MeshShape(("x",), (2,)))
    x, out = hand.input("x", (4, 1)), hand.input("out", (4, 1))
    at, sizes = hand.input("at", (2,), None, torch.int64), hand.input("sizes", (2,), None, torch.int64)
    y = hand.op(c.RaggedAllToAll(("x",)), (x, out, at, sizes, at, sizes), hand.like(out, "y"))
    program = hand.program(y)
    places = [[torch.tensor([2 * r, 2 * r]), torch.tensor([2, 2])] for r in range(2)]
    held = [[torch.arange(4.0)[:, None] + 10 * r, torch.zeros(4, 1), *places[r]] for r in range(2)]
    got = engine_for(Mesh(program.mesh)).load(program)(held)
    assert [row[0].flatten().tolist() for row in got] == [[0, 1, 12, 13], [0, 1, 12, 13]]


def test_results_share_no_memory(pool: Pool) -> None:
    """Not with operands, and not between ranks."""
    assert tasks.shared_memory(-1, 1) == 0
    for processes in (1, 2, 4):
        assert pool.run(tasks.shared_memory, processes=processes) == [0] * processes


# NaN


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [40, 40_000])
def test_nan_wins_as_in_amax(pool: Pool, dtype: torch.dtype, size: int) -> None:
    held = torch.stack(tasks.with_nan(dtype, 4, size))
    whole = [held.amax(0), held.amin(0)]
    for processes in (-1, 1, 2, 4):
        args = (dtype, 4, size)
        runs = (
            [tasks.run_with_nan(-1, 1, *args)]
            if processes < 0
            else pool.run(tasks.run_with_nan, *args, processes=processes)
        )
        for r, row in enumerate([rank for process in runs for rank in process]):
            want = [*whole, *(x.chunk(4)[r] for x in whole)]
            assert all(torch.equal(x.isnan(), y.isnan()) for x, y in zip(row, want, strict=True))
            assert all(torch.equal(x.nan_to_num(9), y.nan_to_num(9)) for x, y in zip(row, want, strict=True))


# What programs say


def test_the_text_the_table_and_the_cost() -> None:
    hand = Hand(MeshShape(("x", "y"), (2, 2)))
    x = hand.input("x", (4, 8), None, torch.float32)
    moved = hand.op(c.PPermute(("x", "y"), tasks.ring(4)), (x,), hand.like(x, "moved"))
    spread = hand.op(c.Broadcast(("y",), 1), (moved,), hand.like(x, "spread"))
    program = hand.program(spread, tasks.ragged(hand, ("y",), torch.float32, 6))
    words = " ".join(program_text(program).partition("-- forward")[2].split())
    assert words == (
        ">> moved : f32[4, 8] = ppermute 0->1->2->3->0 (x y) (x) sends 128 B "
        ">> spread : f32[4, 8] = broadcast from 1 y (moved) sends 128 B "
        ">> rows : f32[15, 3] = ragged_all_to_all y (operand, output, input_offsets, send_sizes, output_offsets, "
        "recv_sizes) sends up to 72 B return spread, rows"
    )
    assert str(collectives_of(program)).splitlines() == [
        "ppermute             (x y)  f32[4, 8]  128 B  forward",
        "broadcast            y      f32[4, 8]  128 B  forward",
        "ragged_all_to_all    y      f32[6, 3]   72 B  forward",
    ]
    assert cost_analysis(program).bytes_sent == {("x", "y"): 128, ("y",): 128 + 72}


def test_memory_is_counted() -> None:
    program = tasks.every_local(MeshShape(("x", "y"), (2, 2)))
    measured = measure_memory(program, tasks.inputs(program))
    assert measured == [peak_bytes(program, k) for k in program.mesh.all_coords()]


# Errors


@pytest.mark.parametrize(
    ("comm", "what", "n"),
    [
        (c.PPermute(("x", "y"), ((0, 4),)), "ppermute along (x y) names index 4", 4),
        (c.PPermute(("y",), ((-1, 0),)), "ppermute along y names index -1", 2),
        (c.Broadcast(("x",), 2), "broadcast along x names index 2", 2),
    ],
)
def test_an_index_that_no_rank_has(comm: Any, what: str, n: int) -> None:
    hand = Hand(MeshShape(("x", "y"), (2, 2)))
    x = hand.input("x", (4,))
    message = f"{what}, but there are {n} ranks, with indices 0 to {n - 1}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        generate(hand.program(hand.op(comm, (x,), hand.like(x, "y"))))


@pytest.mark.parametrize(
    ("pairs", "what"),
    [
        (((0, 1), (0, 2)), "index 0 is the source in (0, 1), (0, 2)"),
        (((2, 1), (0, 0), (1, 1)), "index 1 is the destination in (2, 1), (1, 1)"),
    ],
)
def test_a_rank_in_two_pairs(pairs: tasks.Pairs, what: str) -> None:
    message = f"ppermute along (x y): {what}, and may be in one pair only. Send the rest with another ppermute."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        c.PPermute(("x", "y"), pairs)


Change = Callable[[list[Tensor]], None]


def say(operand: int, index: int, number: int) -> Change:
    """One number of one rank's operand, changed."""
    return lambda row: row[operand][index : index + 1].fill_(number)  # type: ignore[func-returns-value]


def give(operand: int, x: Tensor) -> Change:
    return lambda row: row.__setitem__(operand, x)


ON = "ragged_all_to_all on the rank at index"
ABSENT = "name rows that an operand of 7 rows does not have."
PLACE = "output_offsets are positions in the receiver's output."
SIZES = "recv_sizes must be what the others' send_sizes say: exchange them with an all_to_all."
ROWS = "ragged_all_to_all moves rows (of dim 0) from operands into outputs of the same dtype and row shape, not from "
VECTOR = "ragged_all_to_all needs {} to be a vector of 2 integers, one for each rank, not a tensor of shape {}."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            say(2, 0, 6),
            f"{ON} 1: input_offsets[0] = 6 and send_sizes[0] = 2 {ABSENT}",
        ),
        (
            say(3, 1, -1),
            f"{ON} 1: input_offsets[1] = 2 and send_sizes[1] = -1 {ABSENT}",
        ),
        (
            say(5, 0, 4),
            f"{ON} 1: recv_sizes[0] is 4, but the rank at index 0 sends 2 rows here. {SIZES}",
        ),
        (
            say(4, 0, 16),
            f"{ON} 0: the rank at index 1 sends 2 rows to row 16, but the output has 17 rows. {PLACE}",
        ),
        (give(0, torch.zeros(7, 2)), f"{ROWS}torch.float32 of shape [7, 2] into torch.float32 of shape [17, 3]."),
        (
            give(1, torch.zeros(17, 3).char()),
            f"{ROWS}torch.float32 of shape [7, 3] into torch.int8 of shape [17, 3].",
        ),
        (give(0, torch.tensor(1.0)), f"{ROWS}torch.float32 of shape [] into torch.float32 of shape [17, 3]."),
        (give(3, torch.zeros(3, dtype=torch.int64)), VECTOR.format("send_sizes", "[3] and torch.int64")),
        (give(5, torch.zeros(2)), VECTOR.format("recv_sizes", "[2] and torch.float32")),
        (give(2, torch.zeros(2, dtype=torch.bool)), VECTOR.format("input_offsets", "[2] and torch.bool")),
    ],
)
def test_what_a_ragged_exchange_refuses(change: Change, message: str) -> None:
    """All ranks send two rows to each, from row 2 on; the last rank does one thing otherwise."""
    hand = Hand(MeshShape(("x",), (2,)))
    program = hand.program(tasks.ragged(hand, ("x",), torch.float32))
    values = tasks.inputs(program)
    for rank, row in enumerate(values):
        numbers = ([2, 2], [2, 2], [2 * rank, 2 * rank], [2, 2])
        row[2:] = [torch.tensor(x, dtype=torch.int32) for x in numbers]
    change(values[1])
    with pytest.raises(ValueError, match="ragged_all_to_all") as caught:
        engine_for(Mesh(program.mesh)).load(program)(values)
    assert str(caught.value) == message
    assert caught.value.__notes__ == ["in ragged_all_to_all_0 = RaggedAllToAll(axes=('x',))"]


def test_wrong_sizes_on_one_process_end_all(pool: Pool) -> None:
    hand = Hand(MeshShape(("x",), (3,)))
    program = hand.program(tasks.ragged(hand, ("x",), torch.float32))
    values = tasks.inputs(program)
    sent = int(values[0][3][-1])
    message = f"{ON} 2: recv_sizes[0] is {sent + 1}, but the rank at index 0 sends {sent} rows here. {SIZES}"
    got = pool.run(tasks.run_with_wrong_sizes, processes=3)
    assert got[2][0] == message
    for process, (text, seconds, _) in enumerate(got[:2]):
        assert text == (
            f"Process 2, which holds rank 2 (x=2), failed with ValueError: {message} Process {process}, which holds "
            f"rank {process} (x={process}), stopped with it."
        )
        assert seconds < 10
    tasks.assert_equal([rank for *_, again in got for rank in again], tasks.expected(program, values), program)
