"""The virtual engine: every collective against the definition of layouts in NumPy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hand import Hand, assemble, parts
from hypothesis import given, settings
from hypothesis import strategies as st
from process_tasks import every_collective, inputs

from vescale_fn.codegen import generate
from vescale_fn.engines import engine_for
from vescale_fn.engines.virtual import VirtualExecutable
from vescale_fn.sharding.comm import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter, Slice, ToPartial
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Ragged, Shard
from vescale_fn.sharding.mesh import Mesh, MeshShape


def run(program: Any, values: list[list[Any]]) -> list[list[Any]]:
    """Results [rank][leaf] on virtual ranks, for values [input][rank]."""
    return engine_for(Mesh(program.mesh)).load(program)([list(rank) for rank in zip(*values)])


def check_move(comm: Any, start: Layout, to: Layout) -> None:
    """The collective takes layout `start` to layout `to` and keeps the global value, bit for bit."""
    hand = Hand(start.mesh)
    x, y = hand.input("x", start.shape, start), hand.var("y", start.shape, to)
    hand.op(comm, (x,), y)
    value = torch.arange(math.prod(start.shape), dtype=torch.float64).reshape(start.shape)
    shards = [row[0] for row in run(hand.program(y), [parts(value, start)])]
    assert np.array_equal(assemble(shards, to), value.numpy())
    assert all(s.is_contiguous() for s in shards)


@st.composite
def moves(draw: Any) -> tuple[Any, Layout, Layout]:
    """A collective along one axis of a mesh of three, and the layouts before and after; other axes vary too."""
    mesh = MeshShape(("a", "b", "c"), tuple(draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))))
    axis = draw(st.sampled_from([n for n in mesh.names if mesh[n] > 1] or ["a"]))
    n = mesh[axis]
    pre, rest = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    other = draw(st.sampled_from([x for x in mesh.names if x != axis]))
    sharded = pre * n * rest
    shape = (sharded, 2 * mesh[other], n * draw(st.integers(0, 2)))
    rest_states = {other: draw(st.sampled_from([WHOLE, Shard(1)]))}
    whole = Layout.of(mesh, shape, rest_states)
    shard, moved = whole.with_state(axis, Shard(0, pre)), whole.with_state(axis, Shard(2))
    kind = draw(st.sampled_from(["sum", "max", "min"]))
    pending = whole.with_state(axis, Partial(kind))
    axes = (axis,)
    return draw(
        st.sampled_from(
            [
                (AllReduce(axes, kind), pending, whole),
                (AllGather(axes, 0, pre), shard, whole),
                (ReduceScatter(axes, 0, pre, kind), pending, shard),
                (AllToAll(axes, 2, 0, 1, pre), shard, moved),
                (AllToAll(axes, 0, 2, pre, 1), moved, shard),
                (Slice(axes, 0, pre), whole, shard),
                (ToPartial(axes, kind), whole, pending),
            ]
        )
    )


@settings(max_examples=200)
@given(moves())
def test_collectives_keep_the_global_value(move: tuple[Any, Layout, Layout]) -> None:
    check_move(*move)


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 3), st.data())
def test_uneven_and_empty_pieces(n: int, size: int, unit: int, data: Any) -> None:
    mesh = MeshShape(("x",), (n,))
    whole = Layout.of(mesh, (size * unit, n))
    shard = whole.with_state("x", Shard(0, 1, uneven=size))
    moved, pending = whole.with_state("x", Shard(1)), whole.with_state("x", Partial())
    check_move(
        *data.draw(
            st.sampled_from(
                [
                    (AllGather(("x",), 0, uneven=size), shard, whole),
                    (Slice(("x",), 0, uneven=size), whole, shard),
                    (ReduceScatter(("x",), 0, uneven=size), pending, shard),
                    (AllToAll(("x",), 1, 0, concat_uneven=size), shard, moved),
                    (AllToAll(("x",), 0, 1, split_uneven=size), moved, shard),
                ]
            )
        )
    )


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(any), st.sampled_from(["gather", "slice", "scatter"]))
def test_ragged_pieces(units: list[int], move: str) -> None:
    mesh = MeshShape(("x",), (len(units),))
    whole = Layout.of(mesh, (2 * sum(units), 3))
    ragged = whole.with_state("x", Ragged(0, tuple(units)))
    cases = {
        "gather": (AllGather(("x",), 0, units=tuple(units)), ragged, whole),
        "slice": (Slice(("x",), 0, units=tuple(units)), whole, ragged),
        "scatter": (ReduceScatter(("x",), 0, units=tuple(units)), whole.with_state("x", Partial()), ragged),
    }
    check_move(*cases[move])


@pytest.mark.parametrize("move", ["gather", "slice", "scatter"])
def test_ragged_pieces_of_flattened_dims(move: str) -> None:
    """(d f)~[1 3 2]/x k: dims 0 and 1 are cut as one."""
    mesh, units, flat = MeshShape(("x",), (3,)), (1, 3, 2), (4, 3)
    whole = Layout.of(mesh, (*flat, 2))
    pending, ragged = whole.with_state("x", Partial()), whole.with_state("x", Ragged(0, units, last=1))
    value = torch.arange(24, dtype=torch.float64).reshape(whole.shape)
    pieces = list(value.reshape(12, 2).split([2, 6, 4]))
    shares = [value / 4, value / 4, value / 2]
    comm, start, to, held, expected = {
        "gather": (AllGather(("x",), 0, units=units, flat=flat), ragged, whole, pieces, [value] * 3),
        "slice": (Slice(("x",), 0, units=units, flat=flat), whole, ragged, [value] * 3, pieces),
        "scatter": (ReduceScatter(("x",), 0, units=units, flat=flat), pending, ragged, shares, pieces),
    }[move]
    hand = Hand(mesh)
    y = hand.op(comm, (hand.input("x", whole.shape, start),), hand.var("y", whole.shape, to))
    got = [row[0] for row in run(hand.program(y), [held])]
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2)])
def test_permute_changes_the_order_of_axes(sizes: tuple[int, int]) -> None:
    mesh = MeshShape(("x", "y"), sizes)
    n, m = sizes
    start = Layout.of(mesh, (n * m * 2,), {"x": Shard(0, 1), "y": Shard(0, n)})
    to = Layout.of(mesh, (n * m * 2,), {"x": Shard(0, m), "y": Shard(0, 1)})
    check_move(Permute(("x", "y"), ("y", "x")), start, to)


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")])
def test_several_axes_at_once(axes: tuple[str, str]) -> None:
    """Axes are taken major to minor, whatever their order in the mesh; the second nests inside the first."""
    mesh = MeshShape(("x", "y"), (2, 3))
    major, minor = axes
    whole = Layout.of(mesh, (12, 6))
    shard = whole.with_states({major: Shard(0, 1), minor: Shard(0, mesh[major])})
    pending = whole.with_states({"x": Partial(), "y": Partial()})
    moved = whole.with_states({major: Shard(1, 1), minor: Shard(1, mesh[major])})
    check_move(AllReduce(axes), pending, whole)
    check_move(AllGather(axes, 0), shard, whole)
    check_move(ReduceScatter(axes, 0), pending, shard)
    check_move(Slice(axes, 0), whole, shard)
    check_move(AllToAll(axes, 1, 0), shard, moved)
    check_move(ToPartial(axes), whole, pending)


def test_nested_uneven_axes() -> None:
    """5 rows over two axes of two: [2, 1, 1, 1]."""
    mesh = MeshShape(("x", "y"), (2, 2))
    whole = Layout.of(mesh, (5, 2))
    outer = whole.with_state("x", Shard(0, 1, uneven=5))
    inner = outer.with_state("y", Shard(0, 2, uneven=5))
    assert [inner.local_size(0, c) for c in mesh.all_coords()] == [2, 1, 1, 1]
    check_move(Slice(("y",), 0, uneven=5), outer, inner)
    check_move(AllGather(("y",), 0, uneven=5), inner, outer)
    check_move(AllGather(("x", "y"), 0, uneven=5), inner, whole)
    check_move(ReduceScatter(("x", "y"), 0, uneven=5), whole.with_states({"x": Partial(), "y": Partial()}), inner)


@pytest.mark.parametrize(
    ("axes", "before", "after"),
    [
        (("x",), {"x": Shard(0, 1)}, {"x": Shard(0, 3)}),
        (("x", "y"), {"x": Shard(0, 1), "y": Shard(0, 2)}, {"x": Shard(0, 3), "y": Shard(1)}),
        (("x",), {"x": Ragged(0, (1, 3)), "y": Shard(1)}, {"x": Ragged(0, (4, 0)), "y": Shard(1)}),
        ((), {"y": Shard(1)}, {"x": Shard(0, 6), "y": Shard(1)}),
    ],
)
def test_exchange_of_irregular_blocks(axes: Any, before: Any, after: Any) -> None:
    mesh = MeshShape(("x", "y"), (2, 2))
    start, to = Layout.of(mesh, (12, 4), before), Layout.of(mesh, (12, 4), after)
    check_move(Exchange(axes, start, to), start, to)


def test_a_bucket_reduces_each_operand() -> None:
    mesh = MeshShape(("x",), (3,))
    hand = Hand(mesh)
    pending = {"x": Partial()}
    a, b = hand.input("a", (2,), pending), hand.input("b", (), pending, torch.float32)
    outs = hand.op(AllReduce(("x",)), (a, b), hand.var("a2", (2,)), hand.var("b2", (), dtype=torch.float32))
    got = run(hand.program(*outs), [[torch.full((2,), float(r)) for r in range(3)], [torch.tensor(1.5)] * 3])
    for first, second in got:
        assert first.tolist() == [3.0, 3.0]
        assert second.item() == 4.5


def test_sums_add_in_rank_order() -> None:
    """1e16 + 1 - 1e16 is 0 only in this order."""
    hand = Hand(MeshShape(("x",), (3,)))
    x = hand.input("x", (), {"x": Partial()})
    y = hand.op(AllReduce(("x",)), (x,), hand.var("y", ()))
    got = run(hand.program(y), [[torch.tensor(v, dtype=torch.float64) for v in (1e16, 1.0, -1e16)]])
    assert [row[0].item() for row in got] == [0.0] * 3


def test_results_of_ranks_share_no_memory() -> None:
    hand = Hand(MeshShape(("x",), (2,)))
    x = hand.input("x", (4,), {"x": Partial()})
    y = hand.op(AllReduce(("x",)), (x,), hand.var("y", (4,)))
    (first,), (second,) = run(hand.program(y), [[torch.ones(4), torch.ones(4)]])
    first.zero_()
    assert second.tolist() == [2.0] * 4


def test_an_error_names_the_rank_and_the_line() -> None:
    hand = Hand(MeshShape(("dp", "tp"), (2, 1)))
    x = hand.input("x", (4,), {"dp": Shard(0)})
    y = hand.op(torch.ops.aten.view.default, (x, [3]), hand.var("y", (3,)))
    with pytest.raises(RuntimeError, match="shape") as caught:
        run(hand.program(y), [[torch.ones(2), torch.ones(2)]])
    assert caught.value.__notes__ == ["on rank 0 (dp=0, tp=0) of mesh dp=2,tp=1"]


def test_ranks_that_disagree_are_an_error() -> None:
    """Cannot happen with code of ours; a number that differs between ranks could do it."""
    hand = Hand(MeshShape(("x",), (2,)))
    x = hand.input("x", (2,), {"x": Partial()})
    y = hand.op(AllReduce(("x",)), (x,), hand.var("y", (2,)))
    program = hand.program(y, hand.op(AllReduce(("x",), "max"), (x,), hand.var("z", (2,))))
    first, second = generate(program).sites

    def step(args: list[Any], k: tuple[Any, ...]) -> Any:
        yield (first, second)[k[0]], (args.pop(),)

    code: Any = SimpleNamespace(function=step, communicates=True, program=program, plans=())
    expected = (
        r"Ranks do not agree on the next collective: all_reduce_0 .* \| all_reduce_1 .*\. All ranks of a mesh must"
    )
    with pytest.raises(RuntimeError, match=expected):
        VirtualExecutable(code, range(2), [(0,), (1,)])([[torch.ones(2)], [torch.ones(2)]])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_four_ranks_on_one_gpu() -> None:
    program = every_collective(MeshShape(("x", "y"), (2, 2)))
    expected = engine_for(Mesh(program.mesh)).load(program)(inputs(program))
    on_gpu = [[x.cuda() for x in rank] for rank in inputs(program)]
    got = engine_for(Mesh(program.mesh, device="cuda")).load(program)(on_gpu)
    for a, b in zip(got, expected):
        assert all(torch.equal(x.cpu(), y) for x, y in zip(a, b, strict=True))


def test_a_process_without_devices_cannot_run() -> None:
    with pytest.raises(ValueError, match=r"Mesh dp=2 is abstract: .* Use vf.make_mesh."):
        engine_for(Mesh(MeshShape(("dp",), (2,)), "abstract"))
