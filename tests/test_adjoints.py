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
from region_moves import MESHES, MOVES, ROWS, Case, Place, mesh_of, places, whole_numbers
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
    return c["checked"] or ("cast" not in name and not set(states) & {"U", "R"})


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


# ---- rows, as many as data says


def ragged(at: Place, part: str, states: str) -> tuple[Any, Tensor]:
    """An exchange of rows as a function of the rows sent, of what they land in, or of both one after the other; and
    an input. states: of operand and output. Row 0 of the output, and those after the last, are nobody's."""
    table = torch.randint(0, 3, (at.n, at.n), generator=torch.Generator().manual_seed(at.n))  # [source, destination]
    rows, landing = int(table.sum(1).max()), int(table.sum(0).max()) + 3
    case = Case(at, "nothing", "V->V")

    def body(operand: Tensor, output: Tensor) -> Tensor:
        me = vf.axis_index(at.axes)
        starts, lands = (table.cumsum(d) - table for d in (1, 0))
        sizes = starts[me], table[me], 1 + lands[me], table[:, me]
        return vf.ragged_all_to_all(operand[0], output[0], *sizes, at.axes)[None]  # type: ignore[no-any-return]

    exchange = vf.shard_map(
        body, mesh=mesh_of(at.sizes), in_specs=tuple(map(case.spec, states)), out_specs=case.spec("V")
    )
    stacked = [at.extent(tuple(at.sizes) if s == "V" else at.others) for s in states]
    given, into = (whole_numbers((k, n, 2), 5) for k, n in zip(stacked, (rows, landing)))
    if part == "rows":
        return lambda x: exchange(x, 0 * into), given
    if part == "landing":
        return lambda x: exchange(0 * given, x), into
    return lambda x: exchange(x[:, :rows], x[:, rows:]), whole_numbers((stacked[0], rows + landing, 2), 5)


RAGGED = [("rows", "VV"), ("landing", "VV"), ("both", "VV"), ("rows", "IV"), ("rows", "RV"), ("landing", "VI")]


@pytest.mark.parametrize("at", places(), ids=str)
def test_rows_sent_come_back(at: Place, deep: bool) -> None:
    first = places().index(at)
    for part, states in RAGGED if deep else (RAGGED * 2)[first % 6 : first % 6 + 2]:
        adjoint(*ragged(at, part, states))


@pytest.mark.parametrize(("part", "states"), RAGGED)
def test_vmap_of_rows_that_are_sent(part: str, states: str) -> None:
    for number, at in enumerate(places(MESHES[:3])):
        mapped(*ragged(at, part, states), number)


@pytest.mark.filterwarnings("ignore:vf.psum. the operand is the same")
def test_vmap_of_a_gradient_is_one_program_for_any_number() -> None:
    """Nothing runs once per sample: as many operations for 2 as for 5, and the collectives of one gradient."""
    mesh = vf.make_mesh(a=2, b=2)
    at = Place((("a", 2), ("b", 2)), ("b", "a"))
    cases = [Case(at, name, states[0]) for name, (_, states) in MOVES.items()]
    exchange, rows = ragged(at, "rows", "VV")
    functions, inputs = [*(c.global_function(mesh) for c in cases), exchange], [*(c.input() for c in cases), rows]
    half_square = grad(lambda xs: sum((f(x) ** 2).sum() / 2 for f, x in zip(functions, xs)))

    def lowered(fn: Any, *batch: int) -> tuple[int, list[tuple[str, tuple[str, ...]]]]:
        xs = [vf.ShapeDtype((*batch, *x.shape), torch.float64) for x in inputs]
        program = vf.pjit(fn, mesh=mesh).lower(xs)
        return len(program.program.graph.eqns), sorted((c.kind, c.axes) for c in program.collectives)

    (two, moves), (five, same) = (lowered(vmap(half_square), n) for n in (2, 5))
    _, single = lowered(half_square)
    assert two == five
    assert moves == same == single
    assert len(single) > 12
