"""The promise of regions, for random bodies, meshes and specs: what NumPy says that the ranks do, at once, lowered, and
under every transform.

After the scheme of JAX's shard_map_test.py (a pool of functions with provable replication, and a simple simulator as
the reference), widened to bodies with collectives, the states U and R, two regions in a row, and regions over some of
the axes with others nested in them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from region_programs import Program, programs
from torch import Tensor
from torch.func import jvp, vjp, vmap

import vescale_fn as vf


def equal(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def at_once(program: Program) -> None:
    """At once, types checked or not, a region is what NumPy says."""
    args = program.arguments()
    expected = program.reference(*args)
    for checked in program.modes:
        equal(program(*args, checked=checked), expected)


def derivatives(program: Program) -> None:
    """Forward and backward derivatives are the slope of the reference, types checked or not."""
    args = program.arguments()
    along = tuple(torch.sin(3 * a + i) for i, a in enumerate(args))
    up, down = ([a + s * v for a, v in zip(args, along)] for s in (1e-5, -1e-5))
    slope = (program.reference(*up) - program.reference(*down)) / 2e-5
    scale = float(slope.abs().max().clamp(min=1))
    for checked in program.modes:

        def f(*xs: Tensor, checked: bool = checked) -> Tensor:
            return program(*xs, checked=checked)

        equal(jvp(f, tuple(args), along)[1] / scale, slope / scale, 1e-6)
        y, back = vjp(f, *args)
        ct = torch.cos(y)
        found = sum((g * v).sum() for g, v in zip(back(ct), along))
        equal(torch.as_tensor(found) / scale, (ct * slope).sum() / scale, 1e-6 * max(1, y.numel()))


def mapped(program: Program) -> None:
    """vmap over a dim of each argument."""
    args = program.arguments()
    dims = tuple(i % (a.ndim + 1) for i, a in enumerate(args, len(program.shape)))
    several = [torch.stack([a, a.sin(), 1 - a], d) for a, d in zip(args, dims)]
    each = [program.reference(*(s.select(d, i) for s, d in zip(several, dims))) for i in range(3)]
    equal(vmap(program, dims)(*several), torch.stack(each))


def lowered(program: Program) -> None:
    """Lowered gives the same bits as at once, values and gradients, and no collective that nobody wrote. Along an axis
    that is not manual the solver may cut a sum in parts, which rounds otherwise."""
    args = program.arguments()

    def step(*xs: Tensor) -> tuple[Tensor, ...]:
        y, back = vjp(program, *xs)
        return (y, *back(torch.cos(y)))

    given, manual = given_specs(program), all(set(r.names) == set(program.sizes) for r in program.regions)
    last = program.regions[-1]
    placed = (last.spec(last.leaves), *given)
    run = vf.pjit(step, mesh=program.mesh, in_shardings=given, out_shardings=placed)
    for ours, theirs in zip(run(*args), step(*args), strict=True):
        equal(ours.full(), theirs, 0 if manual else 1e-12)
    inside = [c for c in run.lower(*args).collectives if c.phase == "forward"]
    if len(program.regions) == 1:
        assert len(inside) == program.collectives


def given_specs(program: Program) -> tuple[str, ...]:
    region = program.regions[0]
    weights = [region.spec(w) for r in program.regions for w, _, _ in r.weights.values()]
    return (region.spec(region.enters), *weights)


KINDS: dict[str, tuple[Callable[[Program], None], int, int]] = {  # test, examples in a normal run, deep pieces of 500
    "at once": (at_once, 300, 24),
    "derivatives": (derivatives, 100, 8),
    "vmap": (mapped, 80, 6),
    "lowered": (lowered, 25, 2),
}


def run(test: Callable[[Program], None], examples: int, number: int) -> None:
    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def each(program: Program) -> None:
        test(program)

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "vf.psum: the operand is the same")
        each()


@pytest.mark.parametrize("name", KINDS)
def test_regions(name: str) -> None:
    test, examples, _ = KINDS[name]
    run(test, examples, 0)


@pytest.mark.deep
@pytest.mark.parametrize(("name", "piece"), [(n, p) for n, (*_, pieces) in KINDS.items() for p in range(pieces)])
def test_regions_20000_times(name: str, piece: int) -> None:
    run(KINDS[name][0], 500, 1 + piece)
