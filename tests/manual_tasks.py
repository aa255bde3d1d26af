"""Programs made by hand in which every rank holds values of its own, as in a region, and what they must give.

A value is whole in its layout along the axes of its collectives, so its shape is what a rank holds; the numbers differ
from rank to rank. They are small integers, so that every dtype is exact and NumPy says what is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import simulate
import torch
from hand import Hand
from torch import Tensor

from vescale_fn.engines.rows import VECTORS
from vescale_fn.engines.torchdist import TorchDistEngine
from vescale_fn.program import Program
from vescale_fn.sharding import comm as c
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import Layout, State
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


def inputs(program: Program, seed: int = 0) -> list[list[Tensor]]:
    """Inputs [rank][leaf], other numbers on every rank."""
    rng, layouts = np.random.default_rng(seed), program.layouts
    held = {v: _numbers(layouts[v], v.dtype, rng) for v in program.graph.inputs}
    for e in program.graph.eqns:
        if isinstance(e.op, c.RaggedAllToAll):
            said = _traffic(program.mesh, e.op.axes, [len(x) for x in held[e.operands[0]]], rng)
            for v, rows in zip(e.operands[2:], said.transpose(1, 0, 2)):
                held[v] = list(torch.from_numpy(rows).to(v.dtype))
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


def run(process: int, processes: int, sizes: tuple[int, ...], *args: Any, deterministic: bool = False) -> Any:
    """Results [local rank][leaf] of `every_local` on this process."""
    shape = MeshShape(("x", "y"), sizes)
    program = every_local(shape, *args)
    mesh = Mesh(shape, "torchdist", processes=processes, process=process)
    given = inputs(program)
    return TorchDistEngine(mesh, deterministic).load(program)([given[r] for r in mesh.local_ranks])
