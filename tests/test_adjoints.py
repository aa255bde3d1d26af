"""The transpose of every collective, cast and edge of a region is its adjoint: <f(x), y> == <x, fT(y)>.

Inner products are those of global tensors: what all ranks hold alike counts once, parts of a sum by their sum. All
numbers are whole, so that only what divides by the number of ranks rounds.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from pairwise import pairwise, whole
from region_moves import MESHES, MOVES, ROWS, Case, Place, places, whole_numbers
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

import vescale_fn as vf

AXES: dict[str, list[Any]] = {
    "at": places(),
    "row": ROWS,
    "dim": [0, 1, 2, -1],
    "tiled": [False, True],
    "checked": [True, False],
}


def case_of(c: dict[str, Any]) -> Case:
    name, states = c["row"]
    return Case(c["at"], name, states, c["dim"], c["tiled"], c["checked"])


def admits(c: dict[str, Any]) -> bool:
    """Unchecked, values have no states."""
    name, states = c["row"]
    return c["checked"] or (not name.startswith("cast") and not set(states) & {"U", "R"})


def sampled(checked: bool) -> list[Case]:
    """Each row once, on a place, dim and tiling of its own."""
    rng = random.Random(0)
    chosen = ({k: row if k == "row" else rng.choice(values) for k, values in AXES.items()} for row in ROWS)
    cases = [{**c, "checked": checked} for c in chosen]
    return [case_of(c) for c in cases if admits(c)]


def equal(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-12)


def adjoint(f: Any, x: Tensor, seed: int = 1) -> None:
    """f is linear: its derivatives of all kinds are f and its transpose."""
    y, transpose = vjp(f, x)
    equal(y, f(x))
    ct, v = whole_numbers(y.shape, seed), whole_numbers(x.shape, seed + 1)
    (back,) = transpose(ct)
    equal((y * ct).sum(), (x * back).sum())
    equal(jvp(f, (x,), (v,))[1], f(v))
    equal(vjp(lambda t: vjp(f, x)[1](t)[0], ct)[1](v)[0], f(v))  # the transpose of the transpose
    second = jvp(grad(lambda t: (f(t) ** 2).sum() / 2), (x,), (v,))[1]
    equal(second, transpose(f(v))[0])


def mapped(f: Any, x: Tensor, number: int) -> None:
    """vmap, over any dim, is one call for each entry; its gradient too."""
    examples = [x, -2 * x, x * x]
    results = [f(x) for x in examples]
    for dim in range(x.ndim + 1):
        out = dim % results[0].ndim
        equal(vmap(f, dim, out)(torch.stack(examples, dim)), torch.stack(results, out))
    half_square, dim = grad(lambda t: (f(t) ** 2).sum() / 2), number % (x.ndim + 1)
    equal(vmap(half_square, dim)(torch.stack(examples, dim)), torch.stack([half_square(x) for x in examples]))


@pytest.mark.parametrize("case", sampled(True) + sampled(False), ids=str)
@pytest.mark.filterwarnings("ignore:vf.psum. the operand is the same")
def test_the_transpose_is_the_adjoint(case: Case) -> None:
    adjoint(case.global_function(), case.input())


@pytest.mark.deep
@pytest.mark.parametrize("at", places(), ids=str)
@pytest.mark.filterwarnings("ignore:vf.psum. the operand is the same")
def test_the_transpose_is_the_adjoint_everywhere(at: Place) -> None:
    for case in (case_of(c) for c in pairwise(AXES, admits) if c["at"] == at):
        adjoint(case.global_function(), case.input())


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
@pytest.mark.filterwarnings("ignore:vf.psum. the operand is the same")
def test_vmap_over_every_dim(row: tuple[str, str], deep: bool) -> None:
    number = ROWS.index(row)
    every = whole({"at": places(MESHES[:3]), "dim": [0, 1, 2], "tiled": [False, True]})
    for c in every if deep else every[number :: len(every)]:
        case = Case(c["at"], *row, c["dim"], c["tiled"])
        mapped(case.global_function(), case.input(), number)


@pytest.mark.filterwarnings("ignore:vf.psum. the operand is the same")
def test_vmap_of_a_gradient_is_one_program_for_any_number() -> None:
    """Nothing runs once per sample: as many operations for 2 as for 5, and the collectives of one gradient."""
    mesh = vf.make_mesh(a=2, b=2)
    first = [(name, states[0]) for name, (_, states) in MOVES.items()]
    cases = [Case(Place((("a", 2), ("b", 2)), ("b", "a")), *row) for row in first]
    functions = [case.global_function(mesh) for case in cases]
    half_square = grad(lambda xs: sum((f(x) ** 2).sum() / 2 for f, x in zip(functions, xs)))

    def lowered(fn: Any, *batch: int) -> tuple[int, list[tuple[str, tuple[str, ...]]]]:
        xs = [vf.ShapeDtype((*batch, *case.input().shape), torch.float64) for case in cases]
        program = vf.pjit(fn, mesh=mesh).lower(xs)
        return len(program.program.graph.eqns), sorted((c.kind, c.axes) for c in program.collectives)

    (two, moves), (five, same) = (lowered(vmap(half_square), n) for n in (2, 5))
    _, single = lowered(half_square)
    assert two == five
    assert moves == same == single
    assert len(single) > 12
