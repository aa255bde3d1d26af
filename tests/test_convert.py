"""Conversions, proven against the shards that DTensor's own placements cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial as PartialPlacement
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from vescale_fn.sharding.bind import bind, spec_of
from vescale_fn.sharding.convert import from_partition_spec, from_placements, to_partition_spec, to_placements
from vescale_fn.sharding.forms import P
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import MeshShape

MESH = MeshShape(("dp", "tp"), (2, 4))


def dtensor_rows(placements: Sequence[Placement], size: int, mesh: MeshShape, coords: Mapping[str, int]) -> list[int]:
    """Rows of a one-dimensional tensor that DTensor gives to a rank, by its own splitting code."""
    rows = torch.arange(size)
    for axis, placement in zip(mesh.names, placements):
        if isinstance(placement, (ShardPlacement, _StridedShard)):
            parts, _ = placement._split_tensor(rows, mesh[axis], with_padding=False, contiguous=False)
            rows = parts[coords[axis]]
    return rows.tolist()  # type: ignore[no-any-return]


def rows_of(layout: Layout, coords: Mapping[str, int]) -> list[int]:
    return [i for a, b in layout.intervals(0, coords) for i in range(a, b)]


@st.composite
def mesh_and_dim(draw: st.DrawFn) -> tuple[MeshShape, str, int]:
    """A mesh, and a spec and size of one dim, cut by its axes in any order, with whole factors between them."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    mesh = MeshShape(("x", "y", "z")[: len(sizes)], sizes)
    words, size = [], 1
    for axis in draw(st.permutations(mesh.names))[: draw(st.integers(0, 3))]:
        gap, n = draw(st.integers(1, 3)), mesh[axis] * draw(st.integers(1, 2))
        words += [str(gap), f"{n}/{axis}" if n > 1 else "1"]
        size *= gap * n
    rest = draw(st.integers(1, 2))
    return mesh, f"({' '.join([*words, str(rest)])})", size * rest


@given(mesh_and_dim())
def test_placements_cut_the_same_rows(case: tuple[MeshShape, str, int]) -> None:
    mesh, text, size = case
    layout = bind(text, (size,), mesh)
    placements = to_placements(layout)
    for coords in mesh.all_coords():
        assert rows_of(layout, coords) == dtensor_rows(placements, size, mesh, coords)
    assert from_placements(placements, (size,), mesh) == layout


@pytest.mark.parametrize(
    "text", ["a/dp b/tp", "a/tp b/dp", "a b~/(dp tp)", "a~/tp b~/dp", "a (3 b/dp)", "a/(tp dp) b", "a b"]
)
def test_local_shapes_and_offsets_are_those_that_dtensor_computes(text: str) -> None:
    layout = bind(text, (8, 12), MESH)
    for coords in MESH.all_coords():
        shape, offset = _compute_local_shape_and_global_offset(
            layout.shape, MESH.sizes, list(coords.values()), to_placements(layout)
        )
        assert layout.local_shape(coords) == tuple(shape)
        if all(shape):  # where an empty shard starts means nothing
            assert tuple(layout.intervals(d, coords)[0][0] for d in range(2)) == tuple(offset)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 30))
def test_uneven_shards_in_mesh_order_are_those_of_dtensor(sizes: list[int], size: int) -> None:
    mesh = MeshShape(("x", "y", "z")[: len(sizes)], tuple(sizes))
    layout = bind(f"b~/({' '.join(mesh.names)})", (size,), mesh)
    placements = to_placements(layout)
    for coords in mesh.all_coords():
        assert rows_of(layout, coords) == dtensor_rows(placements, size, mesh, coords)
    assert from_placements(placements, (size,), mesh) == layout


@given(st.lists(st.sampled_from([None, 1, 1, 2, 3]), min_size=1, max_size=3), st.integers(0, 24), st.data())
def test_placements_read_as_layouts_of_the_same_rows(factors: list[int | None], size: int, data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.integers(1, 3)) for _ in factors)
    mesh = MeshShape(("x", "y", "z")[: len(factors)], sizes)
    placements: list[Placement] = [
        Replicate() if f is None else ShardPlacement(0) if f == 1 else _StridedShard(0, split_factor=f) for f in factors
    ]
    try:
        layout = from_placements(placements, (size,), mesh)
    except ValueError:
        assume(False)
    for coords in mesh.all_coords():
        assert rows_of(layout, coords) == dtensor_rows(placements, size, mesh, coords)


@pytest.mark.parametrize(
    ("text", "shape", "placements"),
    [
        ("b/dp t/tp", (8, 8), [ShardPlacement(0), ShardPlacement(1)]),
        ("b/(dp tp)", (16,), [ShardPlacement(0), ShardPlacement(0)]),
        ("b/(tp dp)", (16,), [_StridedShard(0, split_factor=4), ShardPlacement(0)]),
        ("d (3 h/tp)", (4, 24), [Replicate(), _StridedShard(1, split_factor=3)]),
        ("b~/dp", (5,), [ShardPlacement(0), Replicate()]),
        ("b~/(dp tp)", (9,), [ShardPlacement(0), ShardPlacement(0)]),
        ("b~/(dp tp)", (6,), [ShardPlacement(0), ShardPlacement(0)]),
        ("b {sum: dp, max: tp}", (3,), [PartialPlacement("sum"), PartialPlacement("max")]),
        ("", (), [Replicate(), Replicate()]),
    ],
)
def test_both_ways(text: str, shape: tuple[int, ...], placements: list[Placement]) -> None:
    layout = bind(text, shape, MESH)
    assert list(to_placements(layout)) == placements
    assert from_placements(placements, shape, MESH) == layout


def test_negative_dims_and_axes_of_size_1() -> None:
    assert from_placements([ShardPlacement(-1), Replicate()], (3, 4), MESH) == bind("a b/dp", (3, 4), MESH)
    one = MeshShape(("dp",), (1,))
    assert from_placements([ShardPlacement(0)], (3,), one) == bind("a", (3,), one)


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("d~[1 3]/dp", (8,), "Axis 'dp' of [8] {dp: ragged 0 [1, 3]}: DTensor has no placement for ragged 0 [1, 3]."),
        (
            "(5~/dp 2)",
            (10,),
            "Axis 'dp' of [10] {dp: shard 0~}: DTensor cuts unequal shards in mesh order and in single rows.",
        ),
        (
            "b~/(tp dp)",
            (9,),
            "Axis 'dp' of [9] {dp: shard 0 pre 4~, tp: shard 0~}: DTensor cuts unequal shards in mesh order "
            "and in single rows.",
        ),
        (
            "(5~/tp h/dp)",
            (20,),
            "Axis 'dp' of [20] {dp: shard 0 pre 5, tp: shard 0~}: DTensor cannot cut a factor below unequal shards of "
            "dim 0.",
        ),
    ],
)
def test_what_placements_cannot_say(text: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError) as e:
        to_placements(bind(text, shape, MESH))
    assert str(e.value) == message


class OtherPlacement(Placement):
    """A placement that layouts know nothing about."""


@pytest.mark.parametrize(
    ("placements", "size", "message"),
    [
        ([Replicate()], 8, "There are 1 placements for the 2 axes of mesh dp=2,tp=4."),
        (
            [PartialPlacement("avg"), Replicate()],
            8,
            "Axis 'dp': a layout has no pending reduction 'avg'. Reduce it first.",
        ),
        (
            [_StridedShard(0, split_factor=2), ShardPlacement(0)],
            8,
            "Axis 'tp': Shard(dim=0) cuts across the shards of earlier axes, which no layout says.",
        ),
        (
            [_StridedShard(0, split_factor=2), Replicate()],
            7,
            "Dim 0 of size 7 has strided shards that are not equal, which no layout says.",
        ),
    ],
)
def test_what_layouts_cannot_say(placements: list[Placement], size: int, message: str) -> None:
    with pytest.raises(ValueError) as e:
        from_placements(placements, (size,), MESH)
    assert str(e.value) == message


def test_unknown_placements_are_refused() -> None:
    with pytest.raises(ValueError, match="Axis 'dp': a layout cannot say the placement"):
        from_placements([OtherPlacement(), Replicate()], (8,), MESH)


@given(st.permutations(["dp", "tp", None]), st.booleans())
def test_partition_specs_and_positional_specs_agree(entries: list[str | None], both: bool) -> None:
    spec = P(("tp", "dp"), None) if both else P(*entries[:2])
    layout = bind(spec, (8, 8), MESH)
    said = to_partition_spec(layout)
    assert P(*said) == spec
    assert from_partition_spec(said, (8, 8), MESH) == layout
    assert bind(spec_of(layout), (8, 8), MESH) == layout
    assert math.prod(layout.max_local_shape) * MESH.extent(a for a in parse_axes(said)) == 64


def parse_axes(entries: Sequence[str | tuple[str, ...] | None]) -> list[str]:
    return [a for e in entries if e is not None for a in ((e,) if isinstance(e, str) else e)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b {sum: dp}", "Axis 'dp' of [24] {dp: partial sum}: a PartitionSpec cannot say a pending reduction."),
        (
            "(3 h/tp)",
            "Axis 'tp' of [24] {tp: shard 0 pre 3}: a PartitionSpec cannot shard a factor inside dim 0.",
        ),
        ("(3~/dp 8)", "Axis 'dp' of [24] {dp: shard 0~}: the shards of a PartitionSpec are equal."),
        ("b~[1 2]/dp", "Axis 'dp' of [24] {dp: ragged 0 [1, 2]}: the shards of a PartitionSpec are equal."),
    ],
)
def test_what_a_partition_spec_cannot_say(text: str, message: str) -> None:
    with pytest.raises(ValueError) as e:
        to_partition_spec(bind(text, (24,), MESH))
    assert str(e.value) == message
