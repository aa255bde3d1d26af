"""Chains of collectives between layouts: they keep the value, and nothing cheaper was left out."""

from __future__ import annotations

import math
import timeit
from itertools import permutations, product

import numpy as np
import pytest
import simulate
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vescale_fn.sharding.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Comm,
    Exchange,
    Permute,
    ReduceScatter,
    Runs,
    Slice,
    ToPartial,
)
from vescale_fn.sharding.cost import chain_bytes, peak_bytes
from vescale_fn.sharding.digits import exists
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Ragged, Shard, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.reshard import plan

F64 = np.dtype(np.float64)
MESHES = [
    MeshShape(tuple("xyz"[: len(s)]), s) for s in [(2,), (3,), (2, 2), (2, 3), (3, 2), (1, 2), (2, 2, 2), (2, 3, 2)]
]
SHAPES = [(12,), (4, 6), (5, 3), (3, 2, 4), (0, 4), (1,), ()]


def states(mesh: MeshShape, shape: tuple[int, ...], axis: str) -> list[State]:
    """Every state that an axis can have, whatever the others have."""
    n = mesh[axis]
    if n == 1:
        return [WHOLE]
    found: list[State] = [WHOLE, Partial("sum"), Partial("max"), Partial("min")]
    others = [mesh.extent(c) for k in (0, 1, 2) for c in _choices([a for a in mesh.names if a != axis], k)]
    for dim, size in enumerate(shape):
        found += [Shard(dim, pre) for pre in range(1, size + 1) if size % (pre * n) == 0]
        found += [
            Shard(dim, pre, f) for f in range(1, size + 1) if size % f == 0 for pre in set(others) if f % (pre * n)
        ]
        for last in range(dim, len(shape)):
            total = math.prod(shape[dim : last + 1])
            found += [Ragged(dim, u, last if last > dim else -1) for u in _units(n) if total and total % sum(u) == 0]
    return found


def _choices(axes: list[str], k: int) -> list[tuple[str, ...]]:
    return [c for c in product(axes, repeat=k) if len(set(c)) == k]


def _units(n: int) -> list[tuple[int, ...]]:
    return [(0, 1, 3)[:n], (2, 1, 0)[:n]]


@st.composite
def chains(draw: st.DrawFn, length: int) -> tuple[Layout, ...]:
    """Layouts of one shape on one mesh."""
    mesh, shape = draw(st.sampled_from(MESHES)), draw(st.sampled_from(SHAPES))

    def layout() -> Layout:
        given = {a: draw(st.sampled_from(states(mesh, shape, a))) for a in mesh.names}
        out = Layout.of(mesh, shape, given)
        for axis in reversed(mesh.names):  # drop states until the rest go together
            if not exists(out):
                out = out.with_state(axis, WHOLE)
        return out

    return tuple(layout() for _ in range(length))


def numbers(layout: Layout) -> simulate.Array:
    return np.random.default_rng(0).integers(-50, 50, layout.shape).astype(np.float64)


@settings(max_examples=600)
@given(chains(2))
def test_plan_keeps_the_value(pair: tuple[Layout, ...]) -> None:
    src, dst = pair
    x = numbers(src)
    parts = simulate.run(plan(src, dst), simulate.distribute(x, src), src.mesh)
    assert np.array_equal(simulate.assemble(parts, dst), x)


@settings(max_examples=300)
@given(chains(3))
def test_a_detour_makes_no_difference(layouts: tuple[Layout, ...]) -> None:
    a, b, c = layouts
    x = numbers(a)
    parts = simulate.run(plan(a, b) + plan(b, c), simulate.distribute(x, a), a.mesh)
    assert np.array_equal(simulate.assemble(parts, c), x)
    if not c.partial:
        direct = simulate.run(plan(a, c), simulate.distribute(x, a, seed=1), a.mesh)
        for part, other, expected in zip(parts, direct, simulate.distribute(x, c), strict=True):
            assert np.array_equal(part, expected)
            assert np.array_equal(other, expected)


@settings(max_examples=600)
@given(chains(2))
def test_nothing_in_between_is_larger_than_source_and_target(pair: tuple[Layout, ...]) -> None:
    src, dst = pair
    sizes = src.max_local_numel, dst.max_local_numel
    steps = plan(src, dst)
    assume(src.flat.shape == dst.flat.shape)  # else it may go through the whole tensor
    assert all(s.layout.max_local_numel <= max(sizes) for s in steps)
    assert peak_bytes(src, steps, F64) <= 8 * (sum(sizes) + max(sizes))


@settings(max_examples=300)
@given(chains(2))
def test_steps_end_at_the_target_and_are_the_same_each_time(pair: tuple[Layout, ...]) -> None:
    src, dst = pair
    steps = plan(src, dst)
    assert [src, *(s.layout for s in steps)][-1] == dst
    assert all(exists(s.layout) for s in steps)
    assert not plan(dst, dst)
    plan.cache_clear()
    assert plan(src, dst) == steps


@settings(max_examples=600)
@given(chains(2))
def test_blocks_that_only_change_ranks_take_one_permute(pair: tuple[Layout, ...]) -> None:
    src, dst = (even(x) for x in pair)
    if src != dst and blocks(src) == blocks(dst):
        assert [type(s.comm) for s in plan(src, dst)] == [Permute]


def even(layout: Layout) -> Layout:
    """`layout` without partial, ragged and uneven states."""
    plain = [s if isinstance(s, Shard) and not s.uneven else WHOLE for s in layout.states]
    return Layout(layout.mesh, layout.shape, tuple(plain))


def blocks(layout: Layout) -> list[tuple[Runs, ...]]:
    return sorted(tuple(layout.intervals(d, k) for d in range(layout.ndim)) for k in layout.mesh.all_coords())


@settings(max_examples=300)
@given(chains(1))
def test_intervals_are_the_indices_of_the_definition(layouts: tuple[Layout]) -> None:
    layout = layouts[0].flat
    for coords in layout.mesh.all_coords():
        for dim in range(layout.ndim):
            runs = layout.intervals(dim, coords)
            assert [i for a, b in runs for i in range(a, b)] == simulate.held(layout, dim, coords).tolist()
            assert layout.local_size(dim, coords) <= layout.max_local_shape[dim]


X2 = MeshShape(("x",), (2,))
X3 = MeshShape(("x",), (3,))
XY = MeshShape(("x", "y"), (2, 3))
SQUARE = MeshShape(("x", "y"), (4, 4))


def comms(mesh: MeshShape, shape: tuple[int, ...], src: dict[str, State], dst: dict[str, State]) -> list[Comm]:
    return [s.comm for s in plan(Layout.of(mesh, shape, src), Layout.of(mesh, shape, dst))]


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (WHOLE, Shard(0), [Slice(("x",), 0)]),
        (WHOLE, Shard(0, 3), [Slice(("x",), 0, pre=3)]),
        (WHOLE, Partial(), [ToPartial(("x",))]),
        (Partial(), WHOLE, [AllReduce(("x",))]),
        (Partial("max"), WHOLE, [AllReduce(("x",), "max")]),
        (Partial(), Shard(1, 2), [ReduceScatter(("x",), 1, pre=2)]),
        (Partial("min"), Shard(0), [ReduceScatter(("x",), 0, kind="min")]),
        (Partial(), Ragged(0, (1, 2)), [ReduceScatter(("x",), 0, units=(1, 2))]),
        (Partial(), Partial("max"), [AllReduce(("x",)), ToPartial(("x",), "max")]),
        (Shard(1, 2), WHOLE, [AllGather(("x",), 1, pre=2)]),
        (Shard(2, uneven=5), WHOLE, [AllGather(("x",), 2, uneven=5)]),
        (Ragged(0, (1, 2)), WHOLE, [AllGather(("x",), 0, units=(1, 2))]),
        (Shard(0), Shard(1), [AllToAll(("x",), 1, 0)]),
        (Shard(0, 3), Shard(2, uneven=5), [AllToAll(("x",), 2, 0, concat_pre=3, split_uneven=5)]),
        (Shard(0), Shard(0, 2), [AllToAll(("x",), 0, 0)]),
        (Shard(0, 2), Shard(0), [AllToAll(("x",), 0, 0)]),
    ],
)
def test_one_axis(src: State, dst: State, expected: list[Comm]) -> None:
    assert comms(X2, (12, 8, 5), {"x": src}, {"x": dst}) == expected


def test_axes_that_move_together_take_one_collective() -> None:
    both: dict[str, State] = {"x": Shard(0), "y": Shard(0, 2)}
    partial: dict[str, State] = {"x": Partial(), "y": Partial()}
    assert comms(XY, (12, 6), both, {}) == [AllGather(("x", "y"), 0)]
    assert comms(XY, (12, 6), {}, both) == [Slice(("x", "y"), 0)]
    assert comms(XY, (12, 6), partial, both) == [ReduceScatter(("x", "y"), 0)]
    assert comms(XY, (12, 6), partial, {}) == [AllReduce(("x", "y"))]
    assert comms(XY, (12, 6), both, {"x": Shard(1), "y": Shard(1, 2)}) == [AllToAll(("x", "y"), 1, 0)]
    assert comms(XY, (12, 6), {}, partial) == [ToPartial(("x", "y"))]


def test_axes_in_another_order_are_one_permute() -> None:
    for dims in [(0, 0), (1, 1)]:
        a, b = (Shard(d) for d in dims)
        src: dict[str, State] = {"x": a, "y": Shard(b.dim, 2)}
        dst: dict[str, State] = {"y": b, "x": Shard(a.dim, 3)}
        assert comms(XY, (6, 6), src, dst) == [Permute(("x", "y"), ("y", "x"))]
    mesh = MeshShape(("x", "y", "z"), (2, 3, 4))
    first = Layout.of(mesh, (24,), {"x": Shard(0), "y": Shard(0, 2), "z": Shard(0, 6)})
    for order in permutations("xyz"):
        pre = [mesh.extent(order[:i]) for i in range(3)]
        last = Layout.of(mesh, (24,), {a: Shard(0, p) for a, p in zip(order, pre)})
        moved = [a for a in "xyz" if first[a] != last[a]]
        expected = [Permute(tuple(moved), tuple(a for a in order if a in moved))] if moved else []
        assert [s.comm for s in plan(first, last)] == expected


def test_axes_of_one_size_swap_what_they_hold() -> None:
    swap = [Permute(("x", "y"), ("y", "x"))]
    states: list[State] = [Shard(0), Shard(1), Partial(), WHOLE]
    for a, b in permutations(states, 2):
        steps = comms(SQUARE, (16, 16), {"x": a, "y": b}, {"x": b, "y": a})
        assert steps in (swap, [Permute(("y", "x"), ("x", "y"))]), (a, b, steps)


def test_a_split_to_two_axes_goes_by_two_all_to_alls() -> None:
    """JAX issue 21562: P('y', None, 'x') -> P(None, ('x', 'y'), None) replicated the whole array."""
    src = Layout.of(SQUARE, (16, 16, 16), {"y": Shard(0), "x": Shard(2)})
    dst = Layout.of(SQUARE, (16, 16, 16), {"x": Shard(1), "y": Shard(1, 4)})
    steps = plan(src, dst)
    assert [type(s.comm) for s in steps] == [AllToAll, AllToAll]
    assert peak_bytes(src, steps, F64) == 2 * 8 * src.max_local_numel
    assert chain_bytes(steps, F64) == 1.5 * 8 * src.max_local_numel


def test_gathering_the_major_axis_leaves_the_minor_one_strided() -> None:
    fsdp_major: dict[str, State] = {"x": Shard(0), "y": Shard(0, 2)}
    assert comms(XY, (12, 6), fsdp_major, {"y": Shard(0, 2)}) == [AllGather(("x",), 0)]
    assert comms(XY, (12, 6), fsdp_major, {"y": Shard(0)}) == [
        Permute(("x", "y"), ("y", "x")),
        AllGather(("x",), 0),
    ]
    assert comms(XY, (12, 6), fsdp_major, {"x": Shard(0)}) == [AllGather(("y",), 0)]


def test_axes_that_leave_a_dim_become_minor_and_go_together() -> None:
    mesh = MeshShape(("x", "y", "z"), (2, 3, 3))
    src: dict[str, State] = {"x": Shard(0), "y": Shard(0, 2), "z": Shard(0, 6)}
    assert comms(mesh, (18, 18), src, {"z": Shard(0)}) == [
        Permute(("x", "y", "z"), ("z", "x", "y")),
        AllGather(("x", "y"), 0),
    ]
    # after an all_to_all less is left to move than a permute of all would take
    assert comms(mesh, (18, 18), src, {"z": Shard(0), "x": Shard(1), "y": Shard(1, 2)}) == [
        AllToAll(("x", "y"), 1, 0),
        AllToAll(("z",), 0, 0, concat_pre=2),
    ]


def test_a_contiguous_shard_becomes_a_fused_one_without_a_gather() -> None:
    """Megatron's `(qkv h/tp k)` from `(qkv h k)/tp`: the blocks overlap irregularly."""
    src, dst = (Layout.of(X2, (12,), {"x": Shard(0, pre)}) for pre in (1, 3))
    assert [s.comm for s in plan(src, dst)] == [Exchange(("x",), src, dst)]


def test_slices_come_first_and_gathers_last() -> None:
    assert comms(XY, (12, 6), {"x": Partial()}, {"y": Shard(0)}) == [Slice(("y",), 0), AllReduce(("x",))]
    assert comms(XY, (12, 6), {"x": Shard(0)}, {"y": Shard(1)}) == [Slice(("y",), 1), AllGather(("x",), 0)]
    assert comms(XY, (12, 6), {"x": Shard(0), "y": Partial()}, {"y": Shard(1)}) == [
        ReduceScatter(("y",), 1),
        AllGather(("x",), 0),
    ]
    assert comms(XY, (12, 6), {"x": Partial(), "y": Partial()}, {"x": Shard(0)}) == [
        ReduceScatter(("x",), 0),
        AllReduce(("y",)),
    ]


def test_a_reduction_over_one_axis_is_not_spread_to_another() -> None:
    pending: dict[str, State] = {"x": Partial(), "y": Shard(0)}
    assert comms(XY, (12, 6), pending, {"x": Partial()}) == [AllGather(("y",), 0)]
    assert comms(XY, (12, 6), pending, {"x": Partial(), "y": Shard(1)}) == [AllToAll(("y",), 1, 0)]


def test_uneven_axes_nest() -> None:
    mesh = MeshShape(("x", "y"), (2, 2))
    nested: dict[str, State] = {"x": Shard(0, 1, 5), "y": Shard(0, 2, 5)}
    one: dict[str, State] = {"x": Shard(0, 1, 5)}
    assert comms(mesh, (5, 4), nested, {}) == [AllGather(("x", "y"), 0, uneven=5)]
    assert comms(mesh, (5, 4), nested, one) == [AllGather(("y",), 0, uneven=5)]
    assert comms(mesh, (5, 4), one, nested) == [Slice(("y",), 0, uneven=5)]
    assert comms(mesh, (5, 4), {**one, "y": Partial()}, nested) == [ReduceScatter(("y",), 0, uneven=5)]
    # 6 over (2, 2) is [[2, 1], [2, 1]]: x is even by itself, and stays so when y is gathered
    halves: dict[str, State] = {"x": Shard(0, 1, 6), "y": Shard(0, 2, 6)}
    assert comms(mesh, (6, 4), halves, {"x": Shard(0)}) == [AllGather(("y",), 0, uneven=6)]
    swapped: dict[str, State] = {"y": Shard(0, 1, 5), "x": Shard(0, 2, 5)}
    assert comms(mesh, (5, 4), nested, swapped) == [Permute(("x", "y"), ("y", "x"))]


def test_dims_merged_by_a_ragged_cut() -> None:
    mesh, shape = MeshShape(("x", "y"), (2, 2)), (6, 4, 3, 8)
    cut = Ragged(1, (1, 2), last=2)
    merged: dict[str, State] = {"x": cut}
    assert comms(mesh, shape, {}, merged) == [Slice(("x",), 1, units=(1, 2), flat=(4, 3))]
    assert comms(mesh, shape, {"x": Partial()}, merged) == [ReduceScatter(("x",), 1, units=(1, 2), flat=(4, 3))]
    assert comms(mesh, shape, merged, {}) == [AllGather(("x",), 1, units=(1, 2), flat=(4, 3))]
    # dim 3 of the tensor is dim 2 of the parts
    assert comms(mesh, shape, {**merged, "y": Shard(3)}, merged) == [AllGather(("y",), 2)]
    assert comms(mesh, shape, {**merged, "y": Shard(3)}, {**merged, "y": Shard(0)}) == [AllToAll(("y",), 0, 2)]
    other = Ragged(1, (3, 1), last=2)
    (step,) = plan(Layout.of(mesh, shape, merged), Layout.of(mesh, shape, {"x": other}))
    assert isinstance(step.comm, Exchange)
    assert step.comm.src.shape == step.comm.dst.shape == (6, 12, 8)


def test_a_digit_that_no_gather_can_reach_leaves_before_dims_merge() -> None:
    """x holds a digit minor to the uneven factor that y keeps cut, and ends up cutting two merged dims."""
    mesh = MeshShape(("x", "y", "z"), (2, 3, 2))
    src = Layout.of(mesh, (3, 2, 4), {"x": Shard(2, 2), "y": Shard(2, 1, 1), "z": Shard(1)})
    dst = Layout.of(mesh, (3, 2, 4), {"x": Ragged(0, (2, 1), last=1), "y": Shard(2, 1, 1), "z": Shard(2, 2)})
    assert [type(s.comm) for s in plan(src, dst)] == [Exchange, Slice]


def test_planning_is_fast() -> None:
    src = Layout.of(XY, (60, 60), {"x": Partial(), "y": Shard(0)})
    dst = Layout.of(XY, (60, 60), {"x": Shard(0), "y": Shard(1)})
    assert min(timeit.repeat(lambda: plan.__wrapped__(src, dst), number=1, repeat=20)) < 2e-3


def test_errors() -> None:
    src = Layout.of(X2, (4,), {"x": Shard(0)})
    with pytest.raises(ValueError) as error:
        plan(src, Layout.of(X3, (6,)))
    assert str(error.value) == (
        "A reshard keeps mesh and global shape, but the source is [4] {x: shard 0} on mesh x=2 and the target is "
        "[6] {} on mesh x=3. Give the target the shape [4] and the mesh x=2."
    )
    with pytest.raises(ValueError) as error:
        plan(src, Layout.of(X2, (4,), {"x": Shard(0, 3)}))
    assert str(error.value) == (
        "The target of a reshard, [4] {x: shard 0 pre 3} on mesh x=2, is no layout: axes that cut one dim must cut "
        "different digits of it, of sizes that divide it, and all pending reductions must be of one kind. "
        "Change one of the states."
    )
