"""The core promise: pjit(f) equals f, for random programs, meshes and specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import program_tasks as tasks
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from programs import Coverage, Program, check, programs
from worker_pool import Pool


class Kind(NamedTuple):
    """Programs of up to `most` statements, differentiated `order` times: how many in a normal run, and how many pieces
    of 500 in a deep one."""

    order: int
    most: int
    dtype: str
    examples: int
    pieces: int = 0
    mesh: dict[str, int] | None = None


KINDS = {
    "short": Kind(0, 2, "float64", 150, 11),
    "long": Kind(0, 7, "float64", 120, 8),
    "gradient, short": Kind(1, 2, "float64", 120, 10),
    "gradient, long": Kind(1, 5, "float64", 70, 4),
    "gradient of gradient": Kind(2, 2, "float64", 60, 4),
    "float32": Kind(1, 3, "float32", 30, 2),
    "bfloat16": Kind(0, 3, "bfloat16", 30, 1),
}
PIECES = [(name, piece) for name, kind in KINDS.items() for piece in range(kind.pieces)]


def run(kind: Kind, examples: int, number: int, test: Callable[[Program], None]) -> None:
    """Run the test on so many programs. What fails is printed as a program that is as small as can be."""

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(order=kind.order, most=kind.most, dtype=kind.dtype, mesh=kind.mesh))
    def each(program: Program) -> None:
        test(program)

    torch.set_num_threads(1)
    each()


@pytest.mark.parametrize("name", KINDS)
def test_pjit_equals_the_function(name: str) -> None:
    run(KINDS[name], KINDS[name].examples, 0, check)


@pytest.mark.deep
@pytest.mark.parametrize(("name", "piece"), PIECES)
def test_pjit_equals_the_function_20000_times(name: str, piece: int, record_property: Any) -> None:
    coverage = Coverage()
    try:
        run(KINDS[name], 500, 1 + piece, lambda program: check(program, coverage.add))
    finally:
        record_property("coverage", coverage.to_json())


@pytest.mark.parametrize(
    "kind",
    [Kind(0, 4, "float64", 12, mesh={"x": 2}), Kind(1, 3, "float32", 12, mesh={"x": 2, "y": 3})],
    ids=["forward", "gradient"],
)
def test_two_processes_equal_virtual_ranks_bitwise(pool: Pool, kind: Kind) -> None:
    def test(program: Program) -> None:
        here = tasks.shards(program)
        there = [rank for process in pool.run(tasks.shards_of_process, program) for rank in process]
        for rank, (a, b) in enumerate(zip(here, there, strict=True)):
            for x, y in zip(a, b, strict=True):
                assert torch.equal(x.nan_to_num(), y.nan_to_num()), f"rank {rank} has {x} here and {y} there"

    run(kind, kind.examples, 0, test)


def test_a_program_is_printed_as_a_script() -> None:
    printed: list[str] = []
    run(Kind(1, 3, "float64", 5), 5, 0, lambda program: printed.append(repr(program)))
    for script in printed:
        exec(script, {})
