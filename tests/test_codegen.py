"""The generated text, and what it means when it runs."""

from __future__ import annotations

import operator
import traceback
import weakref
from typing import Any

import pytest
import torch
from hand import Hand, assemble, aten, parts

from vescale_fn import fused, local_ops
from vescale_fn.codegen import generate
from vescale_fn.engines.virtual import VirtualEngine
from vescale_fn.liveness import may_alias, may_write
from vescale_fn.program import AxisIndex, LocalDim, Owned, Program
from vescale_fn.sharding.comm import AllGather, AllReduce, Slice, ToPartial
from vescale_fn.sharding.graph import Call, Graph, Scan, Source, Var
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Shard
from vescale_fn.sharding.mesh import Mesh, MeshShape

MESH = MeshShape(("dp", "tp"), (2, 2))


def run(program: Program, values: list[list[Any]]) -> list[list[Any]]:
    """Results [rank][leaf] for values [input][rank]."""
    return VirtualEngine(Mesh(program.mesh)).load(program)([list(rank) for rank in zip(*values)])


def test_the_whole_text_of_a_step() -> None:
    hand = Hand(MESH)
    line = Source("/home/me/step.py", 6, "x @ w")
    x, w = hand.input("x", (8, 6), {"dp": Shard(0), "tp": Shard(1)}), hand.input("w", (6, 4), {"tp": Shard(0)})
    lr = hand.input("lr", dtype=float)
    y = hand.op(aten.mm.default, (x, w), hand.var("y", (8, 4), {"dp": Shard(0), "tp": Partial()}), source=line)
    z = hand.op(AllReduce(("tp",)), (y,), hand.like(y, "z", tp=WHOLE), source=line)
    s = hand.op(aten.mul.Tensor, (z, lr), hand.like(z, "s"))
    code = generate(hand.program(s, lr, None))
    assert code.source == (
        "def step(args, k):\n"
        "    x, w, lr = args; args.clear()\n"
        "    y = aten_mm(x, w); del x, w                                                   # step.py:6\n"
        "    z, = yield all_reduce_0, (y,); del y                                          # step.py:6\n"
        "    s = aten_mul_Tensor(z, lr); del z\n"
        "    return [s, lr, None]\n"
    )
    assert code.communicates
    assert code.constants == ()
    assert str(code.sites[0]) == "all_reduce_0 = AllReduce(axes=('tp',), kind='sum') (/home/me/step.py:6: x @ w)"


def test_a_step_without_collectives_is_a_plain_function() -> None:
    hand = Hand(MESH)
    x = hand.input("x", (4,))
    code = generate(hand.program(hand.op(aten.neg.default, (x,), hand.like(x, "y"))))
    assert not code.communicates
    assert code.function([torch.ones(4)], ())[0].tolist() == [-1.0] * 4


def test_what_ranks_share_is_literal_and_what_differs_is_bound() -> None:
    hand = Hand(MESH)
    states = {"dp": Shard(0, uneven=5)}
    even, uneven = hand.input("even", (8,), {"dp": Shard(0)}), hand.input("uneven", (5,), states)
    sizes = [LocalDim(hand.layouts[v], 0) for v in (even, uneven)]
    a = hand.op(aten.view.default, (even, [sizes[0], 1]), hand.var("a", (8, 1), {"dp": Shard(0)}))
    b = hand.op(aten.view.default, (uneven, [sizes[1], 1]), hand.var("b", (5, 1), states))
    code = generate(hand.program(a, b, AxisIndex(("tp",)), Owned(hand.layouts[even], 0), AxisIndex(())))
    assert "a = aten_view(even, [4, 1])" in code.source
    assert "b = aten_view(uneven, [k[0], 1])" in code.source
    assert "return [a, b, k[1], k[2], 0]" in code.source
    assert code.bind({"dp": 1, "tp": 0}) == (2, 0, ((4, 8),))
    assert code.bind({"dp": 0, "tp": 1}) == (3, 1, ((0, 4),))


def test_devices_are_those_of_the_rank() -> None:
    hand = Hand(MESH)
    y = hand.op(aten.zeros.default, ([2],), hand.var("y", (2,)), device=torch.device("cpu"), dtype=torch.float64)
    code = generate(hand.program(y))
    assert "y = aten_zeros([2], device=k[0], dtype=torch.float64)" in code.source
    assert code.bind({"dp": 0, "tp": 0}, "cpu") == (torch.device("cpu"),)


def test_arguments_of_every_kind_survive() -> None:
    seen: list[Any] = []

    def probe(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        return x

    args: tuple[Any, ...] = (float("inf"), -0.0, 1e-300, True, None, "a'b", slice(1, None), (1,), (), [[2]], {"k": 3})
    hand = Hand(MeshShape(("x",), (1,)))
    x = hand.input("x", (2,))
    y = hand.op(probe, (x, *args), hand.like(x, "y"), layout=torch.strided, memory=torch.preserve_format, z=2j)
    run(hand.program(y), [[torch.ones(2)]])
    assert seen == [(args, {"layout": torch.strided, "memory": torch.preserve_format, "z": 2j})]


def test_lists_of_results_are_unpacked() -> None:
    hand = Hand(MeshShape(("x",), (1,)))
    x = hand.input("x", (4,))
    one = hand.op(aten.split.Tensor, (x, 4), hand.like(x, "one"))
    a, b = hand.op(aten.split.Tensor, (x, 2), hand.var("a", (2,)), hand.var("b", (2,)))
    total = hand.op(aten.cat.default, ([a, b, one],), hand.var("c", (8,)))
    assert run(hand.program(total), [[torch.arange(4.0)]])[0][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_an_update_of_one_parameter_is_a_list_too() -> None:
    hand = Hand(MeshShape(("x",), (1,)))
    p, g, n = hand.input("p", (2,)), hand.input("g", (2,)), hand.input("n", (), dtype=torch.float32)
    settings = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    new = hand.op(fused.sgd_, ([p], [g], [], n, 0.5, None), hand.like(p, "new"), **settings)
    values = [[torch.ones(2, dtype=torch.float64)], [torch.ones(2, dtype=torch.float64)], [torch.tensor(1.0)]]
    assert run(hand.program(new), values)[0][0].tolist() == [0.5, 0.5]


def test_long_lines_are_broken() -> None:
    hand = Hand(MESH)
    long = [hand.input(f"a_rather_long_name_of_an_input_{i}", (2,), {"dp": Partial()}) for i in range(6)]
    body = Graph(tuple(long), (), tuple(long))
    stacked = [hand.like(v, f"{v.name}_again", dp=WHOLE) for v in long]
    hand.op(AllReduce(("dp",)), long, *stacked)
    joined = hand.op(aten.cat.default, (stacked,), hand.var("joined", (12,)))
    code = generate(
        hand.program(hand.op(Call(body), stacked, *[hand.like(v, f"{v.name}_s") for v in stacked])[0], joined)
    )
    assert max(map(len, code.source.splitlines())) <= 120
    got = run(code.program, [[torch.full((2,), float(i))] * 4 for i in range(6)])
    assert got[0][1].tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]


def test_values_die_after_their_last_use() -> None:
    """When an operation runs, its operand is all that is alive; after a collective, its result."""
    alive: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def add(x: torch.Tensor) -> torch.Tensor:
        held.append(sum(r() is not None for r in alive))
        y = x + 1
        alive.append(weakref.ref(y))
        return y

    hand = Hand(MeshShape(("x",), (1,)))
    v = hand.input("x", (4,))
    for i in range(2):
        v = hand.op(add, (v,), hand.like(v, f"a{i}"))
    v = hand.op(AllReduce(("x",)), (v,), hand.like(v, "r"))
    v = hand.op(add, (v,), hand.like(v, "b"))
    run(hand.program(v), [[torch.ones(4)]])
    assert held == [0, 1, 0]


def test_inputs_are_taken_out_of_the_callers_lists() -> None:
    hand = Hand(MESH)
    x = hand.input("x", (4,))
    inputs = [[torch.ones(4)] for _ in range(4)]
    VirtualEngine(Mesh(MESH)).load(hand.program(x))(inputs)
    assert inputs == [[]] * 4


def test_own_slices_and_partials_need_no_collective() -> None:
    hand = Hand(MESH)
    x = hand.input("x", (6,))
    y = hand.op(Slice(("dp",), 0, 3), (x,), hand.like(x, "y", dp=Shard(0, 3)))
    z = hand.op(ToPartial(("tp",)), (y,), hand.like(y, "z", tp=Partial()))
    program = hand.program(z)
    assert not generate(program).communicates
    got = run(program, [[torch.arange(6.0)] * 4])
    assert [row[0].tolist() for row in got] == [[0, 2, 4], [0, 0, 0], [1, 3, 5], [0, 0, 0]]


def scan(length: int, reverse: bool = False) -> Program:
    """Sums of prefixes: carry + slice, stacked."""
    hand = Hand(MESH)
    c, x, k = hand.input("c", (2,)), hand.input("x", (2,)), hand.input("k", (2,))
    s = hand.op(aten.add.Tensor, (hand.op(aten.mul.Tensor, (c, k), hand.like(c, "ck")), x), hand.like(c, "s"))
    body = Graph((k, c, x), tuple(hand.eqns), (s, s))
    hand.graph()
    k0, c0, xs = hand.input("k0", (2,)), hand.input("c0", (2,)), hand.input("xs", (length, 2))
    end, ys = hand.op(Scan(body, 1, 1, length, reverse), (k0, c0, xs), hand.like(c0, "end"), hand.like(xs, "ys"))
    return hand.program(end, ys)


@pytest.mark.parametrize(
    ("length", "reverse", "end", "ys"),
    [
        (3, False, [11, 11], [[1, 1], [4, 4], [11, 11]]),
        (3, True, [17, 17], [[17, 17], [8, 8], [3, 3]]),
        (0, False, [0, 0], []),
    ],
)
def test_loops(length: int, reverse: bool, end: list[float], ys: list[Any]) -> None:
    xs = torch.arange(1.0, length + 1).reshape(-1, 1).expand(length, 2)
    got = run(scan(length, reverse), [[torch.full((2,), 2.0)] * 4, [torch.zeros(2)] * 4, [xs] * 4])
    assert got[3][0].tolist() == end
    assert got[3][1].tolist() == ys


def test_a_loop_stays_a_loop() -> None:
    short, long = (generate(scan(n)).source for n in (2, 96))
    assert long.count("\n") == short.count("\n")
    assert "    for i in range(96):\n" in long


def test_a_body_used_twice_is_written_once() -> None:
    hand = Hand(MESH)
    h = hand.input("h", (4,), {"dp": Partial()})
    body = hand.graph(hand.op(AllReduce(("dp",)), (h,), hand.like(h, "r", dp=WHOLE)))
    x, y = hand.input("x", (4,), {"dp": Partial()}), hand.input("y", (4,), {"dp": Partial()})
    a = hand.op(Call(body, "layer"), (x,), hand.like(x, "a", dp=WHOLE))
    b = hand.op(Call(body, "layer"), (y,), hand.like(y, "b", dp=WHOLE))
    program = hand.program(a, b)
    assert generate(program).source.count("def layer(args, k):") == 1
    got = run(program, [[torch.full((4,), float(r)) for r in range(4)]] * 2)
    assert got[0][1].tolist() == [2.0] * 4


def test_numbers_are_computed_too() -> None:
    hand = Hand(MESH)
    lr, twice = hand.input("lr", dtype=float), Var("twice", (), float)
    hand.op(operator.mul, (lr, 2), twice)
    assert run(hand.program(twice), [[0.5] * 4]) == [[1.0]] * 4


def test_names_never_collide() -> None:
    hand = Hand(MESH)
    x = hand.input("aten_neg", (2,))
    y = hand.op(aten.neg.default, (x,), hand.like(x, "torch"))
    z = hand.op(aten.neg.default, (y,), hand.like(x, "aten_neg"))
    w = hand.op(aten.neg.default, (z,), hand.like(x, "step.1"))
    assert run(hand.program(w), [[torch.ones(2)] * 4])[0][0].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("name", ["a.b", "lambda", "1x", "k", "args", "torch", "step"])
def test_values_may_have_any_name(name: str) -> None:
    hand = Hand(MESH)
    x = hand.input("x", (2,))
    y = hand.op(aten.neg.default, (x,), hand.like(x, name))
    z = hand.op(aten.neg.default, (y,), hand.like(x, "z"))
    assert run(hand.program(z), [[torch.ones(2)] * 4])[0][0].tolist() == [1.0, 1.0]


def test_tracebacks_show_the_generated_line() -> None:
    hand = Hand(MESH)
    x = hand.input("x", (4,))
    y = hand.op(aten.view.default, (x, [3]), hand.var("y", (3,)), source=Source("train.py", 12, "x.view(3)"))
    with pytest.raises(RuntimeError) as caught:
        run(hand.program(y), [[torch.ones(4)] * 4])
    text = "".join(traceback.format_exception(caught.value))
    assert "y = aten_view(x, [3]); del x" in text
    assert "# train.py:12" in text


def overwritten(*outputs: str, donated: tuple[int, ...] = ()) -> tuple[bool, ...]:
    """Whether the sums of an input, of a fresh value, and of a value with a view may overwrite their operands."""
    hand = Hand(MESH)
    x = hand.input("x", (4,), {"dp": Partial()})
    fresh = hand.op(aten.neg.default, (x,), hand.like(x, "fresh"))
    base = hand.op(aten.neg.default, (x,), hand.like(x, "base"))
    view = hand.op(aten.view.default, (base, [4]), hand.like(x, "view"))
    sums = [hand.op(AllReduce(("dp",)), (v,), hand.like(v, f"sum_{v.name}", dp=WHOLE)) for v in (fresh, base, x)]
    used = hand.op(aten.neg.default, (view,), hand.like(x, "used"))
    named = {"fresh": fresh, "view": view}
    program = hand.program(*sums, used, *(named[n] for n in outputs), donated=donated)
    return tuple(s.overwritable[0] for s in generate(program).sites)


def test_only_memory_that_nobody_reads_is_overwritten() -> None:
    assert overwritten() == (True, False, False)
    assert overwritten("fresh") == (False, False, False)
    assert overwritten(donated=(0,)) == (True, False, True)


def late(*ops: Any, read: bool = True) -> list[str]:
    """The lines of a step in which a collective on x is followed by operations on x and by one on its result."""
    hand = Hand(MESH)
    x, y = hand.input("x", (4,), {"dp": Partial()}), hand.input("y", (4,))
    z = hand.op(AllReduce(("dp",)), (x,), hand.like(x, "z", dp=WHOLE))
    for i, (op, operand) in enumerate(ops):
        hand.op(op, ({"x": x, "y": y}[operand],), hand.like(y, f"w{i}"))
    if read:
        z = hand.op(aten.neg.default, (z,), hand.like(z, "n"))
    return [line.strip() for line in generate(hand.program(z)).source.splitlines()[2:-1]]


def test_a_collective_ends_when_its_result_is_needed() -> None:
    assert late((aten.neg.default, "y")) == [
        "pending_0, = yield start_all_reduce_0, (x,); del x",
        "w0 = aten_neg(y); del y, w0",
        "z, = yield wait_all_reduce_0, (pending_0,); del pending_0",
        "n = aten_neg(z); del z",
    ]
    assert late((aten.neg.default, "y"), read=False)[-1] == "z, = yield wait_all_reduce_0, (pending_0,); del pending_0"
    assert late()[0] == "z, = yield all_reduce_0, (x,); del x"


def test_a_collective_ends_before_its_operand_is_written() -> None:
    before, after = (aten.neg.default, "y"), (aten.neg.default, "y")
    assert late(before, (aten.neg_.default, "x"), after)[2].startswith("z, = yield wait")
    assert late(before, (bool, "x"), after)[2].startswith("z, = yield wait")  # a function may do anything
    assert late(before, (aten.neg.default, "x"), after)[3].startswith("w2 = ")


def test_late_collectives_give_the_same_values() -> None:
    hand = Hand(MESH)
    x = hand.input("x", (4,), {"dp": Partial()})
    z = hand.op(AllReduce(("dp",)), (x,), hand.like(x, "z", dp=WHOLE))
    w = hand.op(aten.neg.default, (x,), hand.like(x, "w"))
    s = hand.op(aten.add.Tensor, (z, w), hand.like(x, "s"))
    got = run(hand.program(s), [[torch.full((4,), float(r)) for r in range(4)]])
    assert [row[0][0].item() for row in got] == [2.0, 3.0, 0.0, 1.0]


def test_the_ambient_context_changes_nothing() -> None:
    """Gradients are part of the program, and so are the casts of autocast."""
    hand = Hand(MESH)
    x = hand.input("x", (4, 4), dtype=torch.float32)
    program = hand.program(hand.op(aten.mm.default, (x, x), hand.like(x, "y")))
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        ((y,), *_) = run(program, [[torch.ones(4, 4, requires_grad=True)] * 4])
    assert y.dtype == torch.float32
    assert not y.requires_grad


def test_functions_for_shards_share_no_memory() -> None:
    assert [may_alias(f) for f in (local_ops.embedding_shard, operator.neg)] == [False, True]
    assert [may_write(f) for f in (local_ops.embedding_shard, operator.neg)] == [False, True]
    assert [may_write(op) for op in (aten.neg_.default, aten.neg.default)] == [True, False]


def test_equal_programs_have_equal_fingerprints() -> None:
    assert generate(scan(3)).fingerprint == generate(scan(3)).fingerprint
    assert generate(scan(3)).fingerprint != generate(scan(4)).fingerprint


def test_one_text_for_all_mesh_sizes_up_to_sizes() -> None:
    def text(n: int) -> str:
        mesh = MeshShape(("dp",), (n,))
        hand = Hand(mesh)
        x = hand.input("x", (4 * n,), {"dp": Shard(0)})
        return generate(hand.program(hand.op(AllGather(("dp",), 0), (x,), hand.like(x, "y", dp=WHOLE)))).source

    assert text(2) == text(16384)


def test_parts_of_values_are_what_layouts_say() -> None:
    """The tests' own definition: a pending sum adds up, exactly."""
    layout = Layout.of(MESH, (4,), {"dp": Partial(), "tp": Shard(0)})
    pieces = parts(torch.arange(4.0, dtype=torch.float64), layout)
    assert (pieces[0] + pieces[2]).tolist() == [0.0, 1.0]
    assert assemble(pieces, layout).tolist() == [0.0, 1.0, 2.0, 3.0]
