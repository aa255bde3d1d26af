"""What the worker processes run, and the programs that they run."""

from __future__ import annotations

import time
from typing import Any

import torch
from gpt import MEGATRON, Sizes, make_step, on_mesh
from hand import Hand, aten, parts
from torch import Tensor

import vescale_fn as vf
from vescale_fn.engines.torchdist import TorchDistEngine
from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter, Slice, ToPartial
from vescale_fn.sharding.graph import Scan, Source
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Ragged, Shard
from vescale_fn.sharding.mesh import Mesh, MeshShape


def every_collective(mesh: MeshShape, dtype: torch.dtype = torch.float32) -> Program:
    """All collectives on axes x and y of a mesh: even, strided, uneven, empty, ragged, over both axes, in a bucket."""
    hand, (n, m) = Hand(mesh), (mesh["x"], mesh["y"])
    pending = {"x": Partial(), "y": Partial()}
    p = hand.input("p", (2 * n * m, 3 * n, 5), pending, dtype)
    q = hand.input("q", (7,), {"x": Partial()}, dtype)
    outs: list[Any] = []

    def step(comm: Any, v: Any, **states: Any) -> Any:
        outs.append(hand.op(comm, (v,), hand.like(v, f"v{len(outs)}", **states)))
        return outs[-1]

    scattered = step(ReduceScatter(("x",), 1, 3), p, x=Shard(1, 3))
    whole = step(AllReduce(("y",)), scattered, y=WHOLE)
    moved = step(AllToAll(("x",), 0, 1, 1, 3), whole, x=Shard(0))
    both = step(Slice(("y",), 0), moved, y=Shard(0, n))
    step(Permute(("x", "y"), ("y", "x")), both, x=Shard(0, m), y=Shard(0, 1))
    step(AllGather(("x", "y"), 0), both, x=WHOLE, y=WHOLE)
    uneven = step(ReduceScatter(("x",), 0, uneven=7), q, x=Shard(0, 1, 7))
    step(AllGather(("x",), 0, uneven=7), uneven, x=WHOLE)
    units = tuple([0, 7] + [0] * (n - 2))
    step(ReduceScatter(("x",), 0, units=units), q, x=Ragged(0, units))
    step(AllReduce(("y",)), step(ToPartial(("y",)), q, y=Partial()), y=WHOLE)
    total = step(AllReduce(("x", "y")), p, x=WHOLE, y=WHOLE)
    to = hand.layouts[total].with_state("x", Shard(0, 2 * m))
    start = hand.layouts[total].with_state("x", Shard(0))
    step(Exchange(("x",), start, to), step(Slice(("x",), 0), total, x=Shard(0)), x=Shard(0, 2 * m))
    top = step(ToPartial(("x",), "max"), total, x=Partial("max"))
    step(AllReduce(("x",), "max"), top, x=WHOLE)
    a, b = hand.like(p, "a", x=WHOLE), hand.like(q, "b", x=WHOLE)
    outs += hand.op(AllReduce(("x",)), (p, q), a, b)
    return hand.program(*outs)


def looped(mesh: MeshShape) -> Program:
    """A collective in the body of a loop."""
    hand = Hand(mesh)
    h, w = hand.input("h", (4, 4), None, torch.float32), hand.input("w", (4, 4), {"x": Shard(0)}, torch.float32)
    full = hand.op(AllGather(("x",), 0), (w,), hand.like(w, "full", x=WHOLE))
    body = hand.graph(hand.op(aten.mm.default, (h, full), hand.like(h, "h2")))
    h0, ws = hand.input("h0", (4, 4), None, torch.float32), hand.input("ws", (3, 4, 4), {"x": Shard(1)}, torch.float32)
    return hand.program(hand.op(Scan(body, 0, 1, 3), (h0, ws), hand.like(h0, "end")))


def rows(mesh: MeshShape, size: int) -> Program:
    """A sum over ranks of tensors of some size."""
    hand = Hand(mesh)
    x = hand.input("x", (size,), {"x": Partial()}, torch.float32)
    y = hand.op(aten.view.default, (x, [size]), hand.like(x, "y"), source=Source("train.py", 7, "x.view(size)"))
    return hand.program(hand.op(AllReduce(("x",)), (y,), hand.like(x, "z", x=WHOLE)))


def overwriting(mesh: MeshShape) -> Program:
    """A sum of a value that nothing reads afterwards, with work to do meanwhile."""
    hand = Hand(mesh)
    x = hand.input("x", (6,), {"x": Partial()}, torch.float32)
    y = hand.op(aten.neg.default, (x,), hand.like(x, "y"))
    z = hand.op(AllReduce(("x",)), (y,), hand.like(x, "z", x=WHOLE))
    w = hand.op(aten.neg.default, (x,), hand.like(x, "w"))
    return hand.program(hand.op(aten.add.Tensor, (z, w), hand.like(x, "s")))


PROGRAMS = {"overwriting": overwriting, "every_collective": every_collective, "looped": looped, "rows": rows}


def inputs(program: Program) -> list[list[Tensor]]:
    """Inputs [rank][leaf] whose sums round differently in every order."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for v in program.graph.inputs:
        layout: Layout = program.layouts[v]
        held = parts(10 * torch.randn(v.shape, generator=generator, dtype=torch.float64), layout)
        if layout.partial:
            held = [10 * torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in held]
        values.append([x.to(v.dtype) for x in held])
    return [list(rank) for rank in zip(*values)]


def run(process: int, processes: int, name: str, sizes: tuple[int, ...], *args: Any, deterministic: bool = True) -> Any:
    """Results [local rank][leaf] of a program on this process."""
    shape = MeshShape(("x", "y")[: len(sizes)], sizes)
    program = PROGRAMS[name](shape, *args)
    mesh = Mesh(shape, "torchdist", processes=processes, process=process)
    engine = TorchDistEngine(mesh, deterministic)
    mine = [inputs(program)[r] for r in mesh.local_ranks]
    return engine.load(program)(mine)


def run_native(process: int, processes: int, name: str, sizes: tuple[int, ...], *args: Any) -> Any:
    """`run` with the library's own sums."""
    return run(process, processes, name, sizes, *args, deterministic=False)


def train(process: int, processes: int) -> list[str]:
    """Losses of a small GPT, exactly, after each of three steps. Process -1 holds virtual ranks."""
    sizes = Sizes(layers=1, width=32)
    mesh = vf.make_mesh(dp=2, tp=2) if process < 0 else vf.make_mesh(dp=2, tp=2, processes=processes)
    state, x, y = on_mesh(sizes, mesh, MEGATRON, "b/dp s")
    step = vf.pjit(make_step(sizes), donate_argnums=0, deterministic=processes > 2)
    losses = []
    for _ in range(3):
        state, loss = step(state, x, y)
        losses.append(float(loss).hex())
    return losses


def run_different(process: int, processes: int) -> Any:
    """Every process sums tensors of another size. Returns the message and how long it took."""
    started = time.monotonic()
    try:
        run(process, processes, "rows", (processes,), 4 + process)
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return None


def run_with_failure(process: int, processes: int, when: str) -> Any:
    """Process 1 gets an input of a wrong shape, at the first call or at a later one; then all run again."""
    shape = MeshShape(("x",), (processes,))
    mesh = Mesh(shape, "torchdist", processes=processes, process=process)
    executable = TorchDistEngine(mesh).load(rows(shape, 4))
    if when == "later":
        executable([[torch.ones(4)]])
    started = time.monotonic()
    try:
        executable([[torch.ones(3 if process == 1 else 4)]])
    except RuntimeError as error:
        message, seconds = str(error), time.monotonic() - started
        return message, seconds, executable([[torch.ones(4)]])[0][0].tolist()
    return None


def run_in_a_new_world(process: int, processes: int) -> Any:
    """A program that was loaded in one world of torch.distributed runs in the next."""
    shape = MeshShape(("x",), (processes,))
    executable = TorchDistEngine(Mesh(shape, "torchdist", processes=processes, process=process)).load(rows(shape, 2))
    first = executable([[torch.ones(2)]])[0][0].tolist()
    store = torch.distributed.distributed_c10d._get_default_store()
    torch.distributed.destroy_process_group()
    store = torch.distributed.PrefixStore("again", store)
    torch.distributed.init_process_group("gloo", store=store, rank=process, world_size=processes)
    return first, executable([[torch.ones(2)]])[0][0].tolist()


def run_and_leave(process: int, processes: int) -> Any:
    """Process 1 leaves after the first call, the others go on."""
    shape = MeshShape(("x",), (processes,))
    engine = TorchDistEngine(Mesh(shape, "torchdist", processes=processes, process=process))
    executable = engine.load(rows(shape, 4))
    executable([[torch.ones(4)]])
    if process == 1:
        for wire in engine.wires.values():
            torch.distributed.destroy_process_group(wire.group)
        engine.wires.clear()
        return None
    try:
        executable([[torch.ones(4)]])
    except RuntimeError as error:
        return str(error)
    return "no error"
