"""Static and measured memory agree to the byte, and say what one expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hand import Hand, aten, parts

from vescale_fn.memory import MemoryStats, measure_memory, peak_bytes
from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllReduce
from vescale_fn.sharding.graph import Call, Graph, Scan
from vescale_fn.sharding.layout import Partial, Shard
from vescale_fn.sharding.mesh import MeshShape

MESH = MeshShape(("x",), (2,))


def measured(program: Program) -> list[MemoryStats]:
    values = [parts(torch.ones(v.shape, dtype=v.dtype), program.layouts[v]) for v in program.graph.inputs]
    inputs = [list(rank) for rank in zip(*values)]
    values.clear()
    return measure_memory(program, inputs)


def chain(hand: Hand, x: Any, n: int) -> Any:
    for i in range(n):
        x = hand.op(aten.add.Tensor, (x, 1.0), hand.like(x, f"t{i}"))
    return x


def loop(hand: Hand) -> Program:
    """A loop of three iterations with a collective in its body, then a sub-program."""
    layout = {"x": Shard(0)}
    c, w = hand.input("c", (8,), layout), hand.input("w", (8,), layout)
    s = hand.op(aten.mul.Tensor, (c, w), hand.like(c, "s"))
    t = hand.op(aten.view.default, (s, [4]), hand.like(c, "t"))
    body = hand.graph(t, t)
    h = hand.input("h", (8,), layout)
    inner = hand.graph(chain(hand, h, 2))
    c0, ws = hand.input("c0", (8,), layout), hand.input("ws", (3, 8), {"x": Shard(1)})
    c1, ys = hand.op(Scan(body, 0, 1, 3), (c0, ws), hand.like(c0, "c1"), hand.like(ws, "ys"))
    out = hand.op(Call(inner), (c1,), hand.like(c0, "out"))
    total = hand.op(aten.sum.default, (ys,), hand.var("part", (), {"x": Partial()}))
    return hand.program(out, hand.op(AllReduce(("x",)), (total,), hand.var("total", ())))


def straight(hand: Hand, donated: tuple[int, ...] = ()) -> Program:
    x = hand.input("x", (8,), {"x": Shard(0)})
    return hand.program(chain(hand, x, 3), donated=donated)


def uneven(hand: Hand) -> Program:
    x = hand.input("x", (5,), {"x": Shard(0, uneven=5)})
    return hand.program(chain(hand, x, 2))


@pytest.mark.parametrize("build", [loop, straight, uneven, lambda hand: straight(hand, (0,))])
def test_static_equals_measured_on_every_rank(build: Any) -> None:
    program = build(Hand(MESH))
    assert [peak_bytes(program, c) for c in MESH.all_coords()] == measured(program)


def test_a_chain_holds_argument_operand_and_result() -> None:
    stats = peak_bytes(straight(Hand(MESH)), {"x": 0})
    assert stats == MemoryStats(argument=32, output=32, temp=64, peak=96)


def test_a_donated_argument_is_freed_at_its_last_use() -> None:
    assert peak_bytes(straight(Hand(MESH), (0,)), {"x": 0}).peak == 64


def test_views_cost_nothing() -> None:
    hand = Hand(MESH)
    x = hand.input("x", (8, 2))
    y = hand.op(aten.t.default, (x,), hand.var("y", (2, 8)))
    assert peak_bytes(hand.program(y), {"x": 0}) == MemoryStats(argument=128, output=0, temp=0, peak=128)


def test_programs_for_other_devices_are_counted_here() -> None:
    hand = Hand(MESH)
    x = hand.input("x", (4,))
    ones = hand.op(aten.ones.default, ([4],), hand.like(x, "ones"), device=torch.device("cuda"), dtype=torch.float64)
    y = hand.op(aten.add.Tensor, (x, ones), hand.like(x, "y"))
    assert peak_bytes(hand.program(y), {"x": 0}).peak == 96


def test_stats_print_as_a_table() -> None:
    assert str(MemoryStats(1024, 0, 0, 2**20)).splitlines()[3].split() == ["peak", "1,048,576", "B", "1.00", "MiB"]


def test_an_empty_program_holds_nothing() -> None:
    assert peak_bytes(Program(MESH, Graph((), (), (3,)), {}), {"x": 0}) == MemoryStats(0, 0, 0, 0)
