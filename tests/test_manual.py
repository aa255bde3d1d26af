"""Collectives on values of every rank's own, as regions write them, in both engines against NumPy."""

from __future__ import annotations

from typing import Any

import manual_tasks as tasks
import pytest
import torch
from worker_pool import Pool

from vescale_fn.engines import engine_for
from vescale_fn.program import Program
from vescale_fn.sharding.mesh import Mesh, MeshShape

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64]


def virtual(program: Program, values: list[list[Any]]) -> list[list[Any]]:
    return engine_for(Mesh(program.mesh)).load(program)([list(row) for row in values])


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("y",)], ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_on_virtual_ranks(dtype: torch.dtype, axes: tuple[str, ...]) -> None:
    program = tasks.every_local(MeshShape(("x", "y"), (2, 3)), dtype, axes)
    values = tasks.inputs(program)
    tasks.assert_equal(virtual(program, values), tasks.expected(program, values), program)


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("x",)], ids="-".join)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_collective_on_processes(pool: Pool, processes: int, axes: tuple[str, ...]) -> None:
    program = tasks.every_local(MeshShape(("x", "y"), (2, 2)), torch.float32, axes)
    got = pool.run(tasks.run, (2, 2), torch.float32, axes, processes=processes)
    want = tasks.expected(program, tasks.inputs(program))
    tasks.assert_equal([rank for process in got for rank in process], want, program)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_dtype_travels(pool: Pool, dtype: torch.dtype) -> None:
    program = tasks.every_local(MeshShape(("x", "y"), (3, 2)), dtype)
    got = pool.run(tasks.run, (3, 2), dtype, processes=2)
    want = tasks.expected(program, tasks.inputs(program))
    tasks.assert_equal([rank for process in got for rank in process], want, program)
