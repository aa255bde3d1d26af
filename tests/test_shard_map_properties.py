"""The promise of regions, for random bodies, meshes and specs: what NumPy says that the ranks do, at once, lowered, and
under every transform, with the collectives that the table of transposes says.

After the scheme of JAX's shard_map_test.py (a pool of functions with provable replication, and a simple simulator as
the reference), widened to bodies with collectives, the states U and R in bodies and in specs, weights that are closed
over, two regions in a row, regions over some of the axes with others nested in them, and arguments that lie in unequal
parts along the axes of the solver.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, assume, given, seed, settings
from region_programs import Program, extent, programs
from torch import Tensor
from torch.func import jvp, vjp, vmap

import vescale_fn as vf
from vescale_fn.regions import ops
from vescale_fn.sharding.graph import op_name


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
    assume(program.smooth)
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
    """vmap over a dim of each argument, or of some."""
    args = program.arguments()
    dims = [(i % (a.ndim + 2)) for i, a in enumerate(args, len(program.shape) + len(program.regions[0].steps))]
    where = [None if d > a.ndim else d for a, d in zip(args, dims)]
    where = where if any(d is not None for d in where) else [0] * len(args)
    several = [a if d is None else torch.stack([a, a.sin(), 1 - a], d) for a, d in zip(args, where)]
    each = [[s if d is None else s.select(d, i) for s, d in zip(several, where)] for i in range(3)]
    equal(vmap(program, tuple(where))(*several), torch.stack([program.reference(*one) for one in each]))


def value_and_gradients(program: Program, *xs: Tensor) -> tuple[Tensor, ...]:
    y, back = vjp(program, *xs)
    return (y, *back(torch.cos(y)))


def lowered(program: Program) -> None:
    """Lowered gives the same bits as at once, values and gradients, and sends nothing that nobody wrote. Along an axis
    that is not manual the solver may cut a sum in parts, which rounds otherwise."""
    args = program.arguments()

    def step(*xs: Tensor) -> tuple[Tensor, ...]:
        return value_and_gradients(program, *xs)

    manual, last = all(set(r.names) == set(program.sizes) for r in program.regions), program.regions[-1]
    placed = tuple(e.spec(program.whole if program.uneven else ()) for e in program.edges)
    run = vf.pjit(step, mesh=program.mesh, in_shardings=placed, out_shardings=(last.leaves.spec(), *placed))
    for ours, theirs in zip(run(*args), step(*args), strict=True):
        equal(ours.full(), theirs, 0 if manual else 1e-12)
    inside = [c for c in run.lower(*args).collectives if c.phase == "forward"]
    plain = not last.leaves.sums and not (program.uneven and program.whole)
    if len(program.regions) == 1 and plain:
        assert len(inside) == program.moving


SENT = {
    *(ops.ALL_REDUCE, ops.ALL_GATHER, ops.REDUCE_SCATTER, ops.ALL_TO_ALL, ops.PPERMUTE, ops.BROADCAST),
}


def counted(program: Program) -> None:
    """Forward and backward, regions have the collectives of the table of transposes, and no others."""

    def step(*xs: Tensor) -> tuple[Tensor, ...]:
        return value_and_gradients(program, *xs)

    graph = vf.pjit(step, mesh=program.mesh).trace(*program.arguments()).graph
    found = Counter((op_name(e.op).rpartition(".")[2], e.phase) for e in graph.eqns if e.op in SENT)
    assert found == program.sends


def divides(program: Program) -> None:
    """A shape that the axes of a spec do not divide is refused, with the dim; others are taken."""
    edge, sizes = program.regions[0].enters, program.sizes
    x = torch.ones([n + 1 for n in program.shape])
    same = vf.shard_map(lambda x: x, mesh=program.mesh, in_specs=edge.text, out_specs=edge.text)
    wrong = [d for d, (pre, axes) in enumerate(edge.where) if x.shape[d] % (pre * extent(sizes, axes))]
    if not wrong:
        assert torch.equal(same(x), x)
        return
    with pytest.raises(ValueError, match=r"^shard_map\(<lambda>\): argument x: .*\n  ") as error:
        same(x)
    assert any(
        f"im {d} has size {x.shape[d]}, " in str(error.value) or f"of dim {d} has" in str(error.value) for d in wrong
    )


KINDS: dict[str, tuple[Callable[[Program], None], int, int]] = {  # test, examples in a normal run, deep pieces of 500
    "at once": (at_once, 250, 14),
    "derivatives": (derivatives, 100, 8),
    "vmap": (mapped, 80, 6),
    "counts": (counted, 80, 8),
    "lowered": (lowered, 25, 2),
    "divides": (divides, 50, 2),
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
