"""Programs made by hand in which every rank holds values of its own, as in a region, and what they must give.

A value is whole in its layout along the axes of its collectives, so its shape is what a rank holds; the numbers differ
from rank to rank. They are small integers, so that every dtype is exact and NumPy says what is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import simulate
import torch
from hand import Hand, aten
from torch import Tensor

from vescale_fn.engines import engine_for
from vescale_fn.engines.rows import VECTORS
from vescale_fn.engines.torchdist import TorchDistEngine
from vescale_fn.program import Program
from vescale_fn.sharding import comm as c
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Shard, State
from vescale_fn.sharding.mesh import Mesh, MeshShape

SPARE = 3  # rows of an output that nobody needs
Pairs = tuple[tuple[int, int], ...]


def ring(n: int) -> Pairs:
    return tuple((i, (i + 1) % n) for i in range(n))


def ragged(
    hand: Hand, axes: tuple[str, ...], dtype: torch.dtype, rows: int = 7, states: Mapping[str, State] | None = None
) -> Var:
    """A RaggedAllToAll of an operand of some rows, into an output that has place for all that may come."""
    n = hand.mesh.extent(axes)
    operand = hand.input("operand", (rows, 3), states, dtype)
    output = hand.input("output", (rows * n + SPARE, 3), None, dtype)
    vectors = [hand.input(name, (n,), None, torch.int32) for name in VECTORS]
    out: Var = hand.op(c.RaggedAllToAll(axes), (operand, output, *vectors), hand.like(output, "rows"))
    return out


def every_local(mesh: MeshShape, dtype: torch.dtype = torch.float32, axes: Sequence[str] = ("x", "y")) -> Program:
    """Every collective along `axes` on blocks of every rank's own, empty ones and rows at run time too."""
    hand, axes = Hand(mesh), tuple(axes)
    n = mesh.extent(axes)
    outs: list[Any] = []

    def step(op: Any, v: Var, *shape: int) -> Var:
        outs.append(hand.op(op, (v,), hand.var(f"v{len(outs)}", shape, None, v.dtype)))
        return outs[-1]  # type: ignore[no-any-return]

    x, empty = hand.input("x", (2 * n, 3), None, dtype), hand.input("empty", (0, 4), None, dtype)
    for pairs in (ring(n), ring(n)[1:], ((n - 1, 0),), tuple((i, i) for i in range(0, n, 2)), ()):
        step(c.PPermute(axes, pairs), x, 2 * n, 3)
        step(c.PPermute(axes, pairs), empty, 0, 4)
    for source in (0, n - 1):
        step(c.Broadcast(axes, source), x, 2 * n, 3)
        step(c.Broadcast(axes, source), empty, 0, 4)
    step(c.AllGather(axes, 1), step(c.PPermute(axes, ring(n)), outs[-2], 2 * n, 3), 2 * n, 3 * n)
    step(c.AllGather(axes, 0), empty, 0, 4)
    step(c.AllToAll(axes, 0, 1), x, 2, 3 * n)
    step(c.AllToAll(axes, 0, 0), x, 2 * n, 3)
    step(c.Slice(axes, 0), x, 2, 3)
    step(c.ReduceScatter(axes, 0), x, 2, 3)
    step(c.AllReduce(axes), step(c.ToPartial(axes), x, 2 * n, 3), 2 * n, 3)
    if not dtype.is_complex:
        step(c.AllReduce(axes, "max"), x, 2 * n, 3)
        step(c.AllReduce(axes, "min"), step(c.ToPartial(axes, "min"), x, 2 * n, 3), 2 * n, 3)
    return hand.program(*outs, ragged(hand, axes, dtype))


def lazy(mesh: MeshShape) -> Program:
    """Collectives on views that torch conjugates or negates when they are read, and with work to do meanwhile."""
    hand, axes, n = Hand(mesh), ("x", "y"), mesh.extent(("x", "y"))
    outs: list[Any] = []
    z, x = hand.input("z", (n, 2), None, torch.complex64), hand.input("x", (n, 2), None, torch.float64)
    vectors = [hand.input(name, (n,), None, torch.int32) for name in VECTORS]
    for v, view in ((z, aten._conj.default), (x, aten._neg_view.default)):
        held = hand.op(view, (v,), hand.like(v, f"{v}_view"))
        output = hand.input(f"{v}_output", (n * n + SPARE, 2), None, v.dtype)
        comms = (c.AllReduce(axes), c.AllGather(axes, 0), c.PPermute(axes, ring(n)), c.Broadcast(axes, n - 1))
        for comm in (*comms, c.RaggedAllToAll(axes)):
            read = (held, output, *vectors) if isinstance(comm, c.RaggedAllToAll) else (held,)
            shape = {c.AllGather: (n * n, 2), c.RaggedAllToAll: output.shape}.get(type(comm), v.shape)
            y = hand.op(comm, read, hand.var(f"y{len(outs)}", shape, None, v.dtype))
            other = hand.op(aten.neg.default, (v,), hand.like(v, f"other{len(outs)}"))
            outs += [other, hand.op(aten.neg.default, (y,), hand.like(y, f"z{len(outs)}"))]
    return hand.program(*outs)


def reductions(mesh: MeshShape, dtype: torch.dtype, size: int) -> Program:
    """The largest and the smallest of all ranks, as a whole and in parts."""
    hand = Hand(mesh)
    x = hand.input("x", (size,), {"x": Partial("max")}, dtype)
    y = hand.input("y", (size,), {"x": Partial("min")}, dtype)
    part = {"x": Shard(0)}
    return hand.program(
        hand.op(c.AllReduce(("x",), "max"), (x,), hand.like(x, "a", x=WHOLE)),
        hand.op(c.AllReduce(("x",), "min"), (y,), hand.like(y, "b", x=WHOLE)),
        hand.op(c.ReduceScatter(("x",), 0, 1, "max"), (x,), hand.var("c", (size,), part, dtype)),
        hand.op(c.ReduceScatter(("x",), 0, 1, "min"), (y,), hand.var("d", (size,), part, dtype)),
    )


PROGRAMS: dict[str, Callable[..., Program]] = {"every_local": every_local, "lazy": lazy}
OPERATIONS = {aten._conj.default: np.conj, aten._neg_view.default: np.negative, aten.neg.default: np.negative}


def inputs(program: Program, seed: int = 0) -> list[list[Tensor]]:
    """Inputs [rank][leaf], other numbers on every rank."""
    rng, layouts = np.random.default_rng(seed), program.layouts
    held = {v: _numbers(layouts[v], v.dtype, rng) for v in program.graph.inputs}
    for e in program.graph.eqns:
        if isinstance(e.op, c.RaggedAllToAll):
            rows = [layouts[e.operands[0]].local_shape(k)[0] for k in program.mesh.all_coords()]
            said = _traffic(program.mesh, e.op.axes, rows, rng)
            for v, numbers in zip(e.operands[2:], said.transpose(1, 0, 2)):
                held[v] = [torch.tensor(x, dtype=v.dtype) for x in numbers]
    return [list(rank) for rank in zip(*held.values())]


def _numbers(layout: Layout, dtype: torch.dtype, rng: np.random.Generator) -> list[Tensor]:
    shapes = [layout.local_shape(k) for k in layout.mesh.all_coords()]
    return [torch.from_numpy(rng.integers(0 if dtype is torch.bool else -8, 2, s)).to(dtype) for s in shapes]


def _traffic(mesh: MeshShape, axes: tuple[str, ...], held: Sequence[int], rng: np.random.Generator) -> Any:
    """What each rank says: an array [rank][vector][member]. Rows land in any order of senders, with gaps."""
    n = mesh.extent(axes)
    said = np.zeros((mesh.size, len(VECTORS), n), np.int64)
    for group in mesh.groups(axes):
        for r in group:
            said[r, 0] = rng.integers(0, held[r] + 1, n)
            said[r, 1] = rng.integers(0, held[r] - said[r, 0] + 1)
        for j, r in enumerate(group):
            said[r, 3] = said[group, 1, j]
            start, spare = 0, SPARE
            for i in rng.permutation(n):
                gap = rng.integers(0, spare + 1)
                start, spare = start + gap, spare - gap
                said[group[i], 2, j] = start
                start += said[r, 3, i]
    return said


def expected(program: Program, values: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """Results [rank][leaf] in NumPy."""
    held = {v: [_array(x) for x in column] for v, column in zip(program.graph.inputs, zip(*values), strict=True)}
    for e in program.graph.eqns:
        parts, (out,) = [held[v] for v in e.operands], e.outs
        if isinstance(e.op, c.RaggedAllToAll):
            held[out] = simulate.ragged_all_to_all(e.op.axes, list(zip(*parts)), program.mesh)
        elif e.op in OPERATIONS:
            held[out] = list(map(OPERATIONS[e.op], parts[0]))
        else:
            held[out] = simulate.simulate(e.op, parts[0], program.mesh, program.layouts[out])
    return [list(rank) for rank in zip(*(held[v] for v in program.graph.outputs))]


def _array(x: Tensor) -> Any:
    return (x.double() if x.dtype is torch.bfloat16 else x).numpy()


def assert_equal(got: Sequence[Sequence[Tensor]], want: Sequence[Sequence[Any]], program: Program) -> None:
    assert len(got) == len(want)
    for rank, (a, b) in enumerate(zip(got, want)):
        for v, x, y in zip(program.graph.outputs, a, b, strict=True):
            assert x.dtype == v.dtype
            assert x.is_contiguous()
            assert np.array_equal(_array(x), y), f"{v} differs on rank {rank}: {x} and {y}"


def engine(shape: MeshShape, process: int, processes: int, deterministic: bool = False) -> TorchDistEngine:
    return TorchDistEngine(Mesh(shape, "torchdist", processes=processes, process=process), deterministic)


def run(
    process: int, processes: int, name: str, sizes: tuple[int, int], *args: Any, deterministic: bool = False
) -> Any:
    """Results [local rank][leaf] of a program on this process."""
    program = PROGRAMS[name](MeshShape(("x", "y"), sizes), *args)
    ours, given = engine(program.mesh, process, processes, deterministic), inputs(program)
    return ours.load(program)([given[r] for r in ours.mesh.local_ranks])


def run_in_order(process: int, processes: int, *args: Any) -> Any:
    """`run` with sums in the order of the ranks."""
    return run(process, processes, *args, deterministic=True)


def shared_memory(process: int, processes: int) -> int:
    """How many results of collectives on this process lie in memory of an operand or another result; process -1 holds
    virtual ranks."""
    program = every_local(MeshShape(("x", "y"), (2, 2)))
    given, ours = inputs(program), engine(program.mesh, process, processes)
    mine = list(given) if process < 0 else [given[r] for r in ours.mesh.local_ranks]
    loader = engine_for(Mesh(program.mesh)) if process < 0 else ours
    got = loader.load(program)([list(row) for row in mine])
    made = {v for e in program.graph.eqns if isinstance(e.op, c.COLLECTIVES) for v in e.outs}
    results = [x for row in got for v, x in zip(program.graph.outputs, row, strict=True) if v in made and x.numel()]
    taken = {x.untyped_storage().data_ptr() for row in mine for x in row}
    return len(taken) + len(results) - len(taken | {x.untyped_storage().data_ptr() for x in results})


def with_nan(dtype: torch.dtype, ranks: int, size: int) -> list[Tensor]:
    """What each rank holds: numbers, and NaN on one rank, on every rank, on the first and on the last."""
    x = torch.randn((ranks, size), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    x[torch.arange(0, size, 5) % ranks, torch.arange(0, size, 5)] = torch.nan
    x[:, 1], x[0, 2], x[-1, 3] = torch.nan, torch.nan, torch.nan
    return list(x)


def run_with_nan(process: int, processes: int, dtype: torch.dtype, ranks: int, size: int) -> Any:
    """Results [local rank][leaf] of `reductions` of numbers and NaN; process -1 holds virtual ranks."""
    program, held = reductions(MeshShape(("x",), (ranks,)), dtype, size), with_nan(dtype, ranks, size)
    if process < 0:
        return engine_for(Mesh(program.mesh)).load(program)([[x, x.clone()] for x in held])
    ours = engine(program.mesh, process, processes)
    return ours.load(program)([[held[r], held[r].clone()] for r in ours.mesh.local_ranks])


def run_with_wrong_sizes(process: int, processes: int) -> Any:
    """The last rank expects one row more than the first sends: the message, how long it took, and the call after it."""
    hand = Hand(MeshShape(("x",), (processes,)))
    program = hand.program(ragged(hand, ("x",), torch.float32))
    ours, given = engine(program.mesh, process, processes), inputs(program)
    executable = ours.load(program)
    wrong = [[x.clone() for x in row] for row in given]
    wrong[-1][-1][0] += 1
    started = time.monotonic()
    try:
        executable([wrong[r] for r in ours.mesh.local_ranks])
    except (RuntimeError, ValueError) as error:
        message, seconds = str(error), time.monotonic() - started
        return message, seconds, executable([given[r] for r in ours.mesh.local_ranks])
    return None
