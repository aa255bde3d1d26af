"""What a program sends and computes."""

from __future__ import annotations

import pytest
import torch
from hand import Hand, aten
from process_tasks import looped

from vescale_fn.cost_report import collectives_of, cost_analysis, flops_of
from vescale_fn.sharding.comm import AllReduce
from vescale_fn.sharding.graph import Eqn, Source
from vescale_fn.sharding.layout import WHOLE, Partial, Shard
from vescale_fn.sharding.mesh import MeshShape

MESH = MeshShape(("dp", "tp"), (2, 4))
attention = aten._scaled_dot_product_flash_attention_for_cpu
attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


def two_sums() -> Hand:
    hand = Hand(MESH)
    f32, line = torch.float32, Source("/home/me/step.py", 6, 'torch.relu(x @ w["up"]) @ w["down"]')
    x = hand.input("x", (32, 16), {"dp": Shard(0), "tp": Shard(1)}, f32)
    w = hand.input("w", (16, 10), {"tp": Shard(0)}, f32)
    pending = {"dp": Shard(0), "tp": Partial()}
    y = hand.op(aten.mm.default, (x, w), hand.var("y", (32, 10), pending, f32), source=line)
    hand.op(AllReduce(("tp",)), (y,), hand.like(y, "z", tp=WHOLE), source=line)
    a, b = (hand.input(n, (3,), {"dp": Partial()}, f32) for n in "ab")
    outs = hand.like(a, "a2", dp=WHOLE), hand.like(b, "b2", dp=WHOLE)
    hand.eqns.append(Eqn(AllReduce(("dp",)), (a, b), {}, outs, line, "backward"))
    return hand


def test_the_table() -> None:
    table = collectives_of(two_sums().program())
    assert str(table).splitlines() == [
        'all_reduce  sum  tp  f32[16, 10]  960 B  forward   step.py:6    torch.relu(x @ w["up"]) @ w["down"]',
        'all_reduce  sum  dp  f32[6]        24 B  backward  bucket of 2  torch.relu(x @ w["up"]) @ w["down"]',
    ]
    assert [c.kind for c in table] == ["all_reduce"] * 2
    assert table[0].shape == (16, 10)
    assert [row.operands for row in table[1:]] == [2]
    assert table.nbytes == 984


def test_the_summary() -> None:
    hand = two_sums()
    a = hand.input("c", (3,), {"dp": Partial()}, torch.float32)
    hand.op(AllReduce(("dp",)), (a,), hand.like(a, "c2", dp=WHOLE), source=Source("/home/me/step.py", 7, "c"))
    assert collectives_of(hand.program()).summary().splitlines() == [
        "all_reduce  sum  tp  1 x  960 B  forward",
        "all_reduce  sum  dp  1 x   24 B  backward",
        "all_reduce  sum  dp  1 x   12 B  forward",
    ]
    loop = collectives_of(looped(MeshShape(("x",), (2,))))
    assert loop.summary() == "all_gather    x  3 x  96 B  forward"
    assert collectives_of(Hand(MESH).program()).summary() == "no collectives"


def test_loops_multiply() -> None:
    (row,) = collectives_of(looped(MeshShape(("x",), (2,))))
    assert (row.kind, row.axes, row.nbytes, row.count, row.total) == ("all_gather", ("x",), 32, 3, 96)
    assert "32 B x3" in str(collectives_of(looped(MeshShape(("x",), (2,)))))


def test_no_collectives() -> None:
    assert str(collectives_of(Hand(MESH).program())) == "no collectives"


def test_costs_of_a_program() -> None:
    cost = cost_analysis(two_sums().program())
    assert cost.flops == 2 * 16 * 4 * 10
    assert cost.bytes_accessed == 4 * (16 * 4 + 4 * 10 + 16 * 10)
    assert cost.bytes_sent == {("tp",): 960, ("dp",): 24}
    assert str(cost).splitlines()[0] == "flops           1,280"


@pytest.mark.parametrize(
    ("op", "shapes", "out", "flops"),
    [
        (aten.mm.default, [(4, 3), (3, 5)], (4, 5), 2 * 4 * 3 * 5),
        (aten.addmm.default, [(5,), (4, 3), (3, 5)], (4, 5), 2 * 4 * 3 * 5),
        (aten.bmm.default, [(2, 4, 3), (2, 3, 5)], (2, 4, 5), 2 * 2 * 4 * 3 * 5),
        (aten.dot.default, [(7,), (7,)], (), 14),
        (aten.convolution.default, [(2, 3, 8, 8), (6, 3, 3, 3)], (2, 6, 6, 6), 2 * 2 * 6 * 36 * 27),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            [(2, 4, 8, 16)] * 3,
            (2, 4, 8, 16),
            4 * 2 * 4 * 64 * 16,
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            [(2, 4, 8, 16)] * 5,
            (2, 4, 8, 16),
            10 * 2 * 4 * 64 * 16,
        ),
        (aten.relu.default, [(9,)], (9,), 0),
    ],
)
def test_flops(op: object, shapes: list[tuple[int, ...]], out: tuple[int, ...], flops: int) -> None:
    hand = Hand(MESH)
    operands = [hand.input(f"x{i}", s) for i, s in enumerate(shapes)]
    hand.op(op, operands, hand.var("y", out))
    assert flops_of(hand.eqns[0], hand.layouts) == flops
