"""The core promise: pjit(f) equals f, for random programs, meshes and specs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from programs import Program, programs

import vescale_fn as vf


def check(program: Program) -> None:
    """pjit of the program's function equals the function, in float64."""
    f = program.function()
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=torch.float64) for s in program.inputs]
    want: Any = f(*inputs)
    mesh = vf.make_mesh(**program.mesh)
    arrays = [vf.device_put(x, s, mesh) for x, s in zip(inputs, program.specs)]
    got = vf.pjit(f)(*arrays)
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g.full(), w, rtol=1e-10, atol=1e-12, equal_nan=True)


def examples(n: int) -> Any:
    return settings(
        max_examples=n, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
    )


@pytest.mark.parametrize("part", range(2))
def test_forward(part: int) -> None:
    @examples(110)
    @given(programs(order=0, most=8 + part))
    def run(program: Program) -> None:
        check(program)

    run()


@pytest.mark.parametrize("part", range(2))
def test_gradient(part: int) -> None:
    @examples(110)
    @given(programs(order=1, most=5 + part))
    def run(program: Program) -> None:
        check(program)

    run()


def test_gradient_of_gradient() -> None:
    @examples(70)
    @given(programs(order=1, most=3))
    def run(program: Program) -> None:
        check(Program(program.source, program.inputs, 2, program.mesh, program.specs))

    run()
