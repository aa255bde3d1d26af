"""Binding against a reference that reshapes an arange to the factors of the spec and slices it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fn.sharding.bind import bind, check_shape, spec_of
from vescale_fn.sharding.grammar import parse
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Ragged, Shard, chunk
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.spec import SpecError

MESH = MeshShape(("dp", "tp", "sp"), (2, 4, 3))
SMALL = MeshShape(("dp", "tp"), (2, 4))


@st.composite
def meshes(draw: st.DrawFn) -> MeshShape:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return MeshShape(("x", "y", "z")[: len(sizes)], tuple(sizes))


FactorCase = tuple[int, tuple[str, ...], bool]  # size, axes, cut like torch.chunk


@st.composite
def cases(draw: st.DrawFn) -> tuple[MeshShape, list[list[FactorCase]]]:
    """A mesh, and dims as lists of factors, each cut by axes evenly; leading ones perhaps unevenly."""
    mesh = draw(meshes())
    free = list(draw(st.permutations(mesh.names)))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        factors: list[FactorCase] = []
        for i in range(draw(st.integers(1, 3))):
            axes = tuple(free.pop() for _ in range(min(draw(st.integers(0, 2)), len(free))))
            chunked = i == 0 and bool(axes) and draw(st.booleans())
            size = draw(st.integers(2, 5)) if chunked else draw(st.integers(1, 2)) * mesh.extent(axes)
            factors.append((max(size, 2) if axes and size == 1 else size, axes, chunked))
        dims.append(factors)
    return mesh, [[(n if c or not n % mesh.extent(a) else n * mesh.extent(a), a, c) for n, a, c in f] for f in dims]


def text_of(dims: list[list[FactorCase]]) -> str:
    """The spec: all factors but the last of a dim have a size."""
    words = []
    for d, factors in enumerate(dims):
        parts = []
        for i, (size, axes, chunked) in enumerate(factors):
            name = f"n{d}{i}" if i == len(factors) - 1 and not chunked else f"n{d}{i}={size}"
            parts.append(name + "~" * chunked + (f"/({' '.join(axes)})" if axes else ""))
        words.append(parts[0] if len(parts) == 1 else f"({' '.join(parts)})")
    return " ".join(words)


def reference(dims: list[list[FactorCase]], mesh: MeshShape, coords: Mapping[str, int]) -> list[list[int]]:
    """The indices of each dim that a rank holds, by slicing an arange that is reshaped to the factors."""
    held = []
    for factors in dims:
        rows = np.arange(math.prod(n for n, _, _ in factors)).reshape([n for n, _, _ in factors])
        for i, (size, axes, _) in enumerate(factors):
            start, stop = 0, size
            for axis in axes:
                a, length = chunk(stop - start, mesh[axis], coords[axis])
                start, stop = start + a, start + a + length
            rows = rows[(slice(None),) * i + (slice(start, stop),)]
        held.append(rows.reshape(-1).tolist())
    return held


@given(cases())
def test_every_rank_holds_the_slices_of_the_factors(case: tuple[MeshShape, list[list[FactorCase]]]) -> None:
    mesh, dims = case
    shape = tuple(math.prod(n for n, _, _ in f) for f in dims)
    layout = bind(text_of(dims), shape, mesh)
    for coords in mesh.all_coords():
        want = reference(dims, mesh, coords)
        got = [[i for a, b in layout.intervals(d, coords) for i in range(a, b)] for d in range(len(shape))]
        assert got == want
        assert layout.local_shape(coords) == tuple(map(len, want))
        assert all(n <= most for n, most in zip(layout.local_shape(coords), layout.max_local_shape))


@given(cases(), st.sampled_from(["sum", "max", "min"]))
def test_a_layout_as_a_spec_gives_the_layout_back(case: tuple[MeshShape, list[list[FactorCase]]], kind: str) -> None:
    mesh, dims = case
    shape = tuple(math.prod(n for n, _, _ in f) for f in dims)
    unused = [a for a in mesh.names if a not in parse(text_of(dims)).axes]
    layout = bind(text_of(dims) + (f" {{{kind}: ({' '.join(unused)})}}" if unused else ""), shape, mesh)
    spec = spec_of(layout)
    assert bind(spec, shape, mesh) == layout
    assert spec_of(bind(spec, shape, mesh)) == spec


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "states"),
    [
        ("b/dp t", (8, 3), {}, {"dp": Shard(0)}),
        ("b/(tp dp)", (16,), {}, {"tp": Shard(0, 1), "dp": Shard(0, 4)}),
        ("(qkv h/tp k) d", (48, 8), {"qkv": 3, "h": 4}, {"tp": Shard(0, 3)}),
        ("(h k)/tp", (24,), {"h": 4}, {"tp": Shard(0)}),
        ("(h/tp k)", (24,), {"h": 4}, {"tp": Shard(0)}),
        ("(h/tp k)", (24,), {}, {"tp": Shard(0)}),  # a leading factor needs no size
        ("(3 h/tp k)", (24,), {}, {"tp": Shard(0, 3)}),
        ("... d/dp", (3, 5, 4), {}, {"dp": Shard(2)}),
        ("b/dp ...", (4,), {}, {"dp": Shard(0)}),
        ("b~/dp t", (5, 2), {}, {"dp": Shard(0, 1, 5)}),
        ("b~/dp t", (6, 2), {}, {"dp": Shard(0)}),
        ("b~/(dp tp)", (5,), {}, {"dp": Shard(0, 1, 5), "tp": Shard(0, 2, 5)}),
        ("(b~/dp t)", (15,), {"b": 5}, {"dp": Shard(0, 1, 5)}),
        ("(b~/dp h/tp)", (20,), {"b": 5}, {"dp": Shard(0, 1, 5), "tp": Shard(0, 5)}),
        ("a b {sum: (dp sp), max: tp}", (2, 2), {}, {"dp": Partial(), "sp": Partial(), "tp": Partial("max")}),
        ("", (), {}, {}),
        ("{min: tp}", (), {}, {"tp": Partial("min")}),
        ("b/dp", (0,), {}, {"dp": Shard(0)}),
        ("_ 3 b/dp", (9, 3, 4), {}, {"dp": Shard(2)}),
        ("d~@1/dp f", (5, 2), {}, {"dp": Ragged(0, (0, 1))}),
        ("d/dp f {at: tp@2}", (4, 2), {}, {"dp": Shard(0), "tp": Ragged(1, (0, 0, 1, 0))}),
        ("d~[3 7]/dp f", (20, 2), {}, {"dp": Ragged(0, (3, 7))}),
        ("d~u/dp f", (20, 2), {"u": [3, 7]}, {"dp": Ragged(0, (3, 7))}),
        ("(d f)~[1 5]/dp k", (4, 3, 2), {}, {"dp": Ragged(0, (1, 5), 1)}),
    ],
)
def test_states(text: str, shape: tuple[int, ...], sizes: dict[str, int], states: dict[str, object]) -> None:
    layout = bind(text, shape, MESH, **sizes)
    assert layout == Layout.of(MESH, shape, states)  # type: ignore[arg-type]
    assert bind(spec_of(layout), shape, MESH) == layout


def test_axes_of_size_1_are_whole() -> None:
    mesh = MeshShape(("dp", "tp"), (1, 2))
    for text in ("b/dp", "b~/dp", "b~@3/dp", "b~[1 2 3]/dp", "b {sum: dp}"):
        assert bind(text, (7,), mesh).states == (WHOLE, WHOLE)
    assert bind("b/(dp tp)", (4,), mesh)["tp"] == Shard(0)


def test_uneven_and_empty_shards_of_nested_axes() -> None:
    layout = bind("b~/(dp tp)", (5,), MeshShape(("dp", "tp"), (2, 2)))
    assert [layout.local_size(0, c) for c in layout.mesh.all_coords()] == [2, 1, 1, 1]
    layout = bind("(b~/dp t)", (15,), MeshShape(("dp",), (2,)), b=5)
    assert [layout.local_size(0, c) for c in layout.mesh.all_coords()] == [9, 6]


def test_names_of_dims_in_print() -> None:
    assert str(spec_of(bind("b/dp (3 h/tp)", (4, 24), SMALL), ["x", "y"])) == "x/dp (3 y/tp)"


def test_overlapping_cuts_have_no_spec() -> None:
    layout = Layout.of(SMALL, (24,), {"dp": Shard(0, 3), "tp": Shard(0, 1)})
    with pytest.raises(ValueError, match="the axes that cut dim 0 overlap"):
        spec_of(layout)


def test_shapes_are_checked_without_a_mesh() -> None:
    check_shape("b/anything (h k)", (4, 6), h=3)
    with pytest.raises(SpecError, match="Dim 1 has size 6, which is not a multiple of h=4"):
        check_shape("b/anything (h k)", (4, 6), h=4)


BAD = [
    ("b/tq", (8,), {}, 2, "There is no mesh axis 'tq': this mesh has dp=2, tp=4."),
    ("a b", (3,), {}, 0, "The spec has 2 dims, but the tensor of shape [3] has 1 dim."),
    ("a", (3, 4), {}, 0, "The spec has 1 dim, but the tensor of shape [3, 4] has 2 dims."),
    ("a ... b", (3,), {}, 0, "The spec has at least 2 dims, but the tensor of shape [3] has 1 dim."),
    (
        "a b/tp",
        (3, 6),
        {},
        4,
        "Dim 1 has size 6, which is not divisible by tp=4. Make it a multiple of 4, or write b~/tp for unequal shards.",
    ),
    (
        "b/(dp tp)",
        (4,),
        {},
        3,
        "Dim 0 has size 4, which is not divisible by dp=2*tp=4. Make it a multiple of 8, or write b~/(dp tp) for "
        "unequal shards.",
    ),
    (
        "(3 h/tp k)",
        (36,),
        {"h": 6},
        5,
        "Factor 'h' of dim 0 has size 6, which is not divisible by tp=4. Make it a multiple of 4.",
    ),
    ("(h k)/tp", (6,), {"h": 3}, 6, "Dim 0 has size 6, which is not divisible by tp=4. Make it a multiple of 4."),
    (
        "d (qkv h/tp k)",
        (8, 48),
        {},
        7,
        "Where 'h' is cut depends on the size of 'qkv', which is unknown: qkv=1 puts rows 0:12 on the first rank, "
        "qkv=2 puts rows 0:6, 24:30 on the first rank. Write qkv=SIZE in the spec, or pass it as a keyword.",
    ),
    ("(_ h/tp k)", (48,), {}, 3, "Where 'h' is cut depends on the size of '_': name that factor."),
    ("h/dp", (4,), {"h": 5}, 0, "Dim 0 has size 4, but 'h' is 5."),
    ("3 h", (4, 4), {}, 0, "Dim 0 has size 4, but the spec says 3."),
    ("(h=2 k)", (4,), {"h": 4}, 1, "'h' is 2 in the spec but 4 in the keyword sizes."),
    ("(h k)", (24,), {"h": 2.0}, 1, "The size of 'h' must be an int, not 2.0."),
    ("(h k)", (24,), {"h": 5}, 0, "Dim 0 has size 24, which is not a multiple of h=5."),
    ("(2 h k)", (24,), {"h": 5}, 0, "Dim 0 has size 24, which is not a multiple of 2*h=5 = 10."),
    ("(h k)", (24,), {"h": 4, "k": 5}, 0, "Dim 0 has size 24, which is not h=4*k=5 = 20."),
    ("b/dp", (4,), {"h": 3}, 0, "The size h=3 names no factor of the spec."),
    ("(a b~/dp)", (4,), {"a": 2}, 3, "Only the leading factor of a dim can be cut unevenly."),
    ("(b~/dp t u)", (12,), {}, 1, "Where '~' cuts 'b' depends on its size: write b=SIZE."),
    ("(b~[1 3]/dp h/tp)", (16,), {"b": 4}, 1, "A dim that is cut in units is not cut again by another factor."),
    (
        "b~[1 2]/dp",
        (5,),
        {},
        8,
        "'b' has 5 rows, which is not a multiple of the 3 units of ~[1 2]. Choose units whose sum divides it.",
    ),
    ("b~[1 2 3]/dp", (6,), {}, 10, "~[1 2 3] has 3 units, but dp=2 needs one for each rank."),
    ("b~u/dp", (6,), {}, 4, "The units 'u' need one int for each rank: u=[...]."),
    ("b~@2/dp", (6,), {}, 5, "There is no coordinate 2 on axis 'dp': use 0 to 1."),
    ("b {at: dp@2}", (6,), {}, 7, "There is no coordinate 2 on axis 'dp': use 0 to 1."),
    ("b/tp {at: dp@1}", (8,), {}, 10, "An owner needs a dim that no other axis cuts, and this tensor has none."),
    ("(a/tp b)~/dp", (8, 2), {}, None, "Either a group is sharded or its factors are, not both."),
    ("(a b)~/(dp tp)", (8, 2), {}, 8, "A group is cut flat by a single axis."),
    (
        "b/?",
        (4,),
        {},
        2,
        "'?' leaves a choice to the solver, and here there is none to make. Name the axes: this mesh has dp=2, tp=4.",
    ),
    (
        "b {ct: dp}",
        (4,),
        {},
        7,
        "'ct' says that the gradient of a value inside a vf.shard_map region arrives as partial sums, not where a "
        "tensor lives. Leave it out.",
    ),
]


@pytest.mark.parametrize(("text", "shape", "sizes", "at", "message"), BAD, ids=[f"{t} {s}" for t, s, _, _, _ in BAD])
def test_what_does_not_fit(
    text: str, shape: tuple[int, ...], sizes: dict[str, int], at: int | None, message: str
) -> None:
    with pytest.raises(SpecError) as e:
        bind(text, shape, SMALL, **sizes)
    assert e.value.message == message
    if at is not None:
        assert e.value.at == at
