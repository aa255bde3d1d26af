"""What collectives cost: bytes as the ring algorithms send them, counted on the parts themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fn.sharding.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Comm,
    Exchange,
    Permute,
    PPermute,
    RaggedAllToAll,
    ReduceScatter,
    Slice,
    ToPartial,
)
from vescale_fn.sharding.cost import chain_bytes, conversion_cost, peak_bytes, sent
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Ragged, Shard, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.reshard import plan

F32 = np.dtype(np.float32)
MESH = MeshShape(("x", "y"), (4, 2))
SHAPE = (16, 32)
NUMEL = 512
UNITS = Ragged(0, (1, 5, 2, 0))


def layout(**states: State) -> Layout:
    return Layout.of(MESH, SHAPE, states)


@pytest.mark.parametrize(
    ("comm", "after", "elements"),
    [
        (AllReduce(("x",)), layout(), 2 * NUMEL * 3 / 4),
        (AllReduce(("x", "y")), layout(), 2 * NUMEL * 7 / 8),
        (AllGather(("x",), 0), layout(), NUMEL * 3 / 4),
        (AllGather(("x",), 0), layout(y=Shard(1)), NUMEL / 2 * 3 / 4),
        (ReduceScatter(("x",), 0), layout(x=Shard(0)), NUMEL * 3 / 4),
        (AllToAll(("x",), 1, 0), layout(x=Shard(1)), NUMEL / 4 * 3 / 4),
        (Permute(("x", "y"), ("y", "x")), layout(x=Shard(0, 2), y=Shard(0)), NUMEL / 8),
        (Exchange(("x",), layout(x=Shard(0)), layout(x=Shard(0, 2))), layout(x=Shard(0, 2)), NUMEL / 4),
        (Exchange((), layout(), layout(x=Shard(0))), layout(x=Shard(0)), 0),
        (Exchange(("x",), layout(x=UNITS), layout()), layout(), NUMEL * 5 / 8 * 3),  # as much as the gather below
        (AllGather(("x",), 0, units=(1, 5, 2, 0)), layout(), NUMEL * 5 / 8 * 3),
        (Exchange(("x", "y"), layout(x=UNITS, y=Shard(1)), layout(x=Shard(1))), layout(x=Shard(1)), NUMEL * 5 / 16 * 2),
        (ReduceScatter(("x",), 0), layout(x=UNITS), NUMEL),  # the rank that gets nothing sends all
        (PPermute(("x",), ((0, 1), (2, 2))), layout(y=Shard(1)), NUMEL / 2),
        (PPermute(("x",), ((0, 0), (2, 2))), layout(), 0),
        (Broadcast(("x", "y"), 3), layout(), NUMEL),
        (Broadcast((), 0), layout(), 0),
        (RaggedAllToAll(("x",)), layout(), NUMEL),
        (Slice(("x",), 0), layout(x=Shard(0)), 0),
        (ToPartial(("x",)), layout(x=Partial()), 0),
    ],
)
def test_elements_sent(comm: Comm, after: Layout, elements: float) -> None:
    assert sent(comm, after) == elements


STATES: list[State] = [WHOLE, Partial(), Shard(0), Shard(1), Shard(1, 2), Shard(1, 8)]


@given(st.sampled_from(STATES), st.sampled_from(STATES), st.sampled_from([2, 4]))
def test_a_conversion_costs_what_its_chain_sends(src: State, dst: State, n: int) -> None:
    mesh = MeshShape(("x",), (n,))
    a, b = (Layout.of(mesh, SHAPE, {"x": s}) for s in (src, dst))
    cost = conversion_cost(src, dst, NUMEL * 4, n)
    if isinstance(dst, Partial) and src != dst:
        assert cost == math.inf
    elif not any(isinstance(s.comm, Exchange) for s in plan(a, b)):
        assert cost == chain_bytes(plan(a, b), F32)


def test_an_axis_of_one_rank_costs_nothing() -> None:
    assert conversion_cost(Partial(), WHOLE, 100, 1) == 0


def test_peak_is_the_largest_operand_and_result_together() -> None:
    start = layout(x=Shard(0))
    assert peak_bytes(start, (), F32) == NUMEL // 4 * 4
    steps = plan(start, layout(x=Shard(0), y=Shard(1)))
    assert peak_bytes(start, steps, F32) == (NUMEL // 4 + NUMEL // 8) * 4
    steps = plan(layout(x=Partial(), y=Shard(1)), layout())
    assert [type(s.comm) for s in steps] == [AllReduce, AllGather]
    assert peak_bytes(layout(x=Partial(), y=Shard(1)), steps, F32) == (NUMEL // 2 + NUMEL) * 4
