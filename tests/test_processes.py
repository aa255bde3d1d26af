"""Real gloo processes against virtual ranks, and what happens when a process fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import process_tasks as tasks
import pytest
import torch
from worker_pool import Pool

from vescale_fn.engines.virtual import VirtualEngine
from vescale_fn.sharding.mesh import Mesh, MeshShape


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the workers: the number of threads decides the order of sums inside a kernel."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def virtual(name: str, sizes: tuple[int, ...], *args: Any) -> list[list[Any]]:
    program = tasks.PROGRAMS[name](MeshShape(("x", "y")[: len(sizes)], sizes), *args)
    return VirtualEngine(Mesh(program.mesh)).load(program)(tasks.inputs(program))


def assert_same_bits(got: list[list[list[Any]]], expected: list[list[Any]]) -> None:
    ranks = [leaves for process in got for leaves in process]
    assert len(ranks) == len(expected)
    for rank, (a, b) in enumerate(zip(ranks, expected)):
        for leaf, (x, y) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(x, y), f"leaf {leaf} differs on rank {rank}: {x} and {y}"


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_eight_ranks_on_any_number_of_processes_give_the_same_bits(pool: Pool, processes: int) -> None:
    got = pool.run(tasks.run, "every_collective", (4, 2), processes=processes)
    assert_same_bits(got, virtual("every_collective", (4, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.int64])
def test_every_dtype_travels(pool: Pool, dtype: torch.dtype) -> None:
    got = pool.run(tasks.run, "every_collective", (2, 2), dtype, processes=4)
    assert_same_bits(got, virtual("every_collective", (2, 2), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_processes_equal_virtual_ranks_with_native_sums(pool: Pool, dtype: torch.dtype) -> None:
    got = pool.run(tasks.run_native, "every_collective", (2, 1), dtype)
    assert_same_bits(got, virtual("every_collective", (2, 1), dtype))


def test_large_sums_are_ordered_too(pool: Pool) -> None:
    got = pool.run(tasks.run, "rows", (4,), 100_003, processes=4)
    assert_same_bits(got, virtual("rows", (4,), 100_003))


def test_collectives_inside_loops(pool: Pool) -> None:
    assert_same_bits(pool.run(tasks.run, "looped", (2,)), virtual("looped", (2,)))


@pytest.mark.parametrize("processes", [2, 4])
def test_training_gives_the_same_losses(pool: Pool, processes: int) -> None:
    """To the bit: groups of two have only one order of adding. The loss, which four processes add up over both axes, is
    added in the order of ranks."""
    expected = tasks.train(-1, 1)
    assert pool.run(tasks.train, processes=processes) == [expected] * processes


def test_sums_in_place_while_others_work(pool: Pool) -> None:
    assert_same_bits(pool.run(tasks.run_native, "overwriting", (2,)), virtual("overwriting", (2,)))


def test_programs_outlive_a_world(pool: Pool) -> None:
    assert pool.run(tasks.run_in_a_new_world) == [([2.0, 2.0], [2.0, 2.0])] * 2


def test_a_process_that_ends_is_a_message(pool: Pool) -> None:
    message, _ = pool.run(tasks.run_and_leave)
    assert message.startswith(
        "Process 0, which holds rank 0 (x=0), lost the connection to another process, which ended without saying why."
    )


def test_different_programs_are_a_message(pool: Pool) -> None:
    got = pool.run(tasks.run_different, processes=3)
    assert all(seconds < 10 for _, seconds in got)
    assert any(
        "Processes of one mesh run different programs" in message and "aten_view(x, [4])" in message
        for message, _ in got
    )


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_failing_process_tells_the_others(pool: Pool, when: str) -> None:
    got = pool.run(tasks.run_with_failure, when, processes=3)
    for process, (message, seconds, again) in enumerate(got):
        assert seconds < 10
        if process == 1:
            assert message.startswith("shape '[4]' is invalid for input of size 3")
        else:
            assert message == (
                "Process 1, which holds rank 1 (x=1), failed with RuntimeError: shape '[4]' is invalid for input of "
                f"size 3. Process {process}, which holds rank {process} (x={process}), stopped with it."
            )
        assert again == [3.0] * 4
