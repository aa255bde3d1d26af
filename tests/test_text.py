"""Programs as text."""

from __future__ import annotations

import pytest
import torch
from hand import Hand, aten
from process_tasks import looped

from vescale_fn.program import AxisIndex, LocalDim, Owned
from vescale_fn.sharding.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Permute,
    PPermute,
    RaggedAllToAll,
    ReduceScatter,
    Slice,
    ToPartial,
)
from vescale_fn.sharding.graph import Source
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Ragged, Shard
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.text import comm_text, layout_text, program_text

MESH = MeshShape(("dp", "tp"), (2, 4))


def test_a_program_as_text() -> None:
    hand = Hand(MESH)
    line = Source("/home/me/step.py", 6, "x @ w")
    f32 = torch.float32
    x = hand.input("x", (8, 6), {"dp": Shard(0), "tp": Shard(1)}, f32)
    w, lr = hand.input("w", (6, 4), {"tp": Shard(0)}, f32), hand.input("lr", dtype=float)
    y = hand.op(aten.mm.default, (x, w), hand.var("y", (8, 4), {"dp": Shard(0), "tp": Partial()}, f32), source=line)
    z = hand.op(AllReduce(("tp",)), (y,), hand.like(y, "z", tp=WHOLE), source=line)
    size = LocalDim(hand.layouts[z], 0)
    v = hand.op(aten.view.default, (z, [size, 2, 2]), hand.var("v", (8, 2, 2), {"dp": Shard(0)}, f32))
    assert program_text(hand.program(v, lr, donated=[1])).splitlines() == [
        "program on mesh dp=2,tp=4",
        "   x  : f32[8/dp, 6/tp]",
        "   w  : f32[6/tp, 4]  donated",
        "   lr : float",
        "-- forward",
        "   y : f32[8/dp, 4] {sum: tp} = aten.mm(x, w)                      # step.py:6",
        ">> z : f32[8/dp, 4]           = all_reduce sum tp (y)  sends 96 B  # step.py:6",
        "   v : f32[8/dp, 2, 2]        = aten.view(z, [8/dp, 2, 2])",
        "   return v, lr",
    ]


def test_sub_programs_are_indented() -> None:
    assert program_text(looped(MeshShape(("x",), (2,)))).splitlines()[3:] == [
        "-- forward",
        "   end : f32[4, 4] = scan x3(h0, ws)",
        "      body h : f32[4, 4], w : f32[4/x, 4]",
        "      -- forward",
        "      >> full : f32[4, 4] = all_gather dim 0 x (w)  sends 32 B",
        "         h2 : f32[4, 4]   = aten.mm(h, full)",
        "         return h2",
        "   return end",
    ]


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ({}, "[24, 5]"),
        ({"tp": Shard(0, 3)}, "[(3 8/tp), 5]"),
        ({"dp": Shard(0), "tp": Shard(0, 2)}, "[24/(dp tp), 5]"),
        ({"tp": Shard(0), "dp": Shard(0, 4)}, "[24/(tp dp), 5]"),
        ({"dp": Shard(0), "tp": Shard(0, 6)}, "[(6/dp 4/tp), 5]"),
        ({"dp": Shard(1, 1, 5)}, "[24, 5~/dp]"),
        ({"tp": Ragged(0, (1, 0, 3, 2))}, "[24~[1, 0, 3, 2]/tp, 5]"),
        ({"dp": Ragged(0, (1, 3), last=1)}, "[120~[1, 3]/dp]"),
        ({"dp": Partial(), "tp": Partial("max")}, "[24, 5] {sum: dp, max: tp}"),
        ({"tp": Shard(0, 1, uneven=6)}, "[(6~/tp 4), 5]"),
    ],
)
def test_layouts(states: dict[str, object], text: str) -> None:
    assert layout_text(Layout.of(MESH, (24, 5), states)) == text  # type: ignore[arg-type]


def test_collectives() -> None:
    layout = Layout.of(MESH, (8,))
    comms = [
        AllReduce(("dp",), "max"),
        AllGather(("dp", "tp"), 1),
        ReduceScatter(("tp",), 0),
        AllToAll(("tp",), 0, 1),
        Permute(("dp", "tp"), ("tp", "dp")),
        Exchange(("dp",), layout, layout),
        Slice(("tp",), 0),
        ToPartial(("tp",)),
        PPermute(("tp",), ((0, 1), (1, 2), (2, 3), (3, 0))),
        PPermute(("dp", "tp"), ((6, 0), (0, 7), (2, 1), (1, 2), (3, 3))),
        PPermute(("tp",), ()),
        Broadcast(("tp", "dp"), 5),
        RaggedAllToAll(("tp",)),
    ]
    assert list(map(comm_text, comms)) == [
        "all_reduce max dp",
        "all_gather dim 1 (dp tp)",
        "reduce_scatter dim 0 sum tp",
        "all_to_all dim 1 -> 0 tp",
        "permute (dp tp) -> (tp dp)",
        "exchange dp",
        "slice dim 0 tp",
        "to_partial sum tp",
        "ppermute 0->1->2->3->0 tp",
        "ppermute 6->0->7 1->2->1 3->3 (dp tp)",
        "ppermute nothing tp",
        "broadcast from 5 (tp dp)",
        "ragged_all_to_all tp",
    ]


def test_constants_of_a_rank_say_what_they_mean() -> None:
    hand = Hand(MESH)
    x = hand.input("x", (8,), {"dp": Shard(0)})
    constants = (AxisIndex(("dp", "tp")), Owned(hand.layouts[x], 0))
    y = hand.op(max, (x, *constants, torch.float32, "a"), hand.like(x, "y"))
    assert "= max(x, index((dp tp)), owned(8/dp), float32, 'a')" in program_text(hand.program(y))
