"""Ragged shards: units, owners and flat groups against slices of the flattened tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fn.sharding.bind import bind, spec_of
from vescale_fn.sharding.layout import Layout, Ragged, Shard
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.ragged import chunked, offsets, owner, state_of_units

UNITS = st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(any)


def mesh_of(units: list[int]) -> MeshShape:
    return MeshShape(("dp", "tp"), (len(units), 2))


@given(UNITS, st.integers(0, 3), st.integers(1, 2))
def test_a_dim_cut_in_units(units: list[int], unit: int, half: int) -> None:
    mesh, rows = mesh_of(units), sum(units) * unit
    spec = f"d~[{' '.join(map(str, units))}]/dp f/tp"
    layout = bind(spec, (rows, 2 * half), mesh)
    cuts = np.split(np.arange(rows), np.cumsum(np.array(units) * unit)[:-1])
    for coords in mesh.all_coords():
        held = [i for a, b in layout.intervals(0, coords) for i in range(a, b)]
        if rows:
            assert held == cuts[coords["dp"]].tolist()
            assert layout.local_shape(coords) == (len(held), half)
    assert bind(spec_of(layout), layout.shape, mesh) == layout


@given(UNITS, st.integers(1, 3), st.integers(1, 3))
def test_a_flat_group_is_one_flat_local_dim(units: list[int], d: int, f: int) -> None:
    mesh, shape = mesh_of(units), (2, d * sum(units), f, 4)
    layout = bind(f"b (d f)~[{' '.join(map(str, units))}]/dp k/tp", shape, mesh)
    step = d * f
    flat = np.arange(math.prod(shape)).reshape(2, -1, 4)
    assert layout.flat.shape == flat.shape
    for coords in mesh.all_coords():
        start = step * sum(units[: coords["dp"]])
        part = flat[:, start : start + step * units[coords["dp"]], 2 * coords["tp"] : 2 * coords["tp"] + 2]
        assert layout.local_shape(coords) == part.shape
        assert layout.flat.intervals(1, coords) == ((start, start + part.shape[1]),)
    assert layout.max_local_shape == (2, step * max(units), 2)
    assert bind(spec_of(layout), shape, mesh) == layout


@given(UNITS, UNITS, st.integers(1, 3))
def test_states_are_equal_exactly_when_offsets_are(a: list[int], b: list[int], k: int) -> None:
    b = (b + b)[: len(a)] if any((b + b)[: len(a)]) and len(b) * 2 >= len(a) else a
    size = math.lcm(sum(a), sum(b)) * k
    states = [state_of_units(0, u, size) for u in (a, b)]
    cuts = [offsets(Layout.of(MeshShape(("x",), (len(a),)), (size,), {"x": s}), "x") for s in states]
    assert (states[0] == states[1]) == (cuts[0] == cuts[1])
    assert cuts[0] == (0, *np.cumsum(np.array(a) * (size // sum(a))).tolist())


@pytest.mark.parametrize("text", ["d~[1 1]/dp", "d~[2 2]/dp", "d~[7 7]/dp", "d~/dp", "d/dp"])
def test_equal_units_are_an_even_shard(text: str) -> None:
    assert bind(text, (28,), MeshShape(("dp",), (2,)))["dp"] == Shard(0)


def test_units_in_the_order_of_chunk_are_uneven_shards() -> None:
    mesh = MeshShape(("dp",), (4,))
    assert bind("d~[2 2 1 0]/dp", (5,), mesh) == bind("d~/dp", (5,), mesh)
    assert bind("d~[1 1 1 0]/dp", (6,), mesh) == bind("d~/dp", (6,), mesh)
    assert bind("d~[2 2 1 0]/dp", (10,), mesh) == bind("(5~/dp k)", (10,), mesh)


def test_owner() -> None:
    mesh = MeshShape(("pp", "tp"), (3, 2))
    layout = bind("d~@1/pp f/tp", (5, 4), mesh)
    assert owner(layout["pp"]) == 1
    assert [layout.local_shape({"pp": i, "tp": 0}) for i in range(3)] == [(0, 2), (5, 2), (0, 2)]
    assert layout == bind("d f/tp {at: pp@1}", (5, 4), mesh)
    assert str(spec_of(layout)) == "a~@1/pp b/tp"
    assert owner(Ragged(0, (1, 2))) is None
    assert owner(Shard(0)) is None


def test_all_units_on_the_first_rank_are_an_owner_not_a_chunk_of_one() -> None:
    layout = bind("d~[1 0]/dp", (2,), MeshShape(("dp",), (2,)))
    assert layout["dp"] == Ragged(0, (1, 0))
    assert str(spec_of(layout)) == "a~@0/dp"


def test_a_group_in_chunk_order_and_an_owned_group() -> None:
    mesh = MeshShape(("dp",), (2,))
    layout = bind("(d f)~/dp", (3, 5), mesh)
    assert [layout.local_shape({"dp": i}) for i in range(2)] == [(8,), (7,)]
    assert bind("(d f)~@1/dp", (3, 5), mesh).local_shape({"dp": 1}) == (15,)
    assert bind("(d f)~/dp", (0, 5), mesh).local_shape({"dp": 1}) == (0,)


def test_a_flat_group_with_equal_units_stays_flat() -> None:
    mesh = MeshShape(("dp",), (2,))
    assert bind("(d f)~[1 1]/dp", (4, 3), mesh) == bind("(d f)~[2 2]/dp", (4, 3), mesh)
    assert bind("(d f)~[1 1]/dp", (4, 3), mesh).local_shape({"dp": 0}) == (6,)


def test_offsets_are_those_of_one_run_each() -> None:
    mesh = MeshShape(("dp", "tp"), (2, 2))
    assert offsets(bind("b~/dp t/tp", (5, 4), mesh), "dp") == (0, 3, 5)
    with pytest.raises(ValueError, match="Each rank along axis 'tp' holds several runs of dim 0"):
        offsets(bind("(3 h/tp)", (12,), mesh), "tp")
    with pytest.raises(ValueError, match="Axis 'dp' does not shard a dim of"):
        offsets(bind("(3 h/tp)", (12,), mesh), "dp")
    with pytest.raises(ValueError, match=r"5 is not a multiple of the 3 units of \[1, 2\]\."):
        state_of_units(0, [1, 2], 5)
    assert chunked(0, 3) == (0, 0, 0)
