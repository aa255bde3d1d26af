"""Chains of collectives between layouts: they keep the value, and nothing cheaper was left out."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
import simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_fn.sharding.comm import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter, Slice, ToPartial
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
        found += [Ragged(dim, u) for u in (_units(n), _units(n)[::-1]) if size and size % sum(u) == 0]
    return found


def _choices(axes: list[str], k: int) -> list[tuple[str, ...]]:
    return [c for c in product(axes, repeat=k) if len(set(c)) == k]


def _units(n: int) -> tuple[int, ...]:
    return tuple([0, 1, 3][:n])


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


def numbers(layout: Layout) -> np.ndarray:
    return np.random.default_rng(0).integers(-50, 50, layout.shape).astype(np.float64)


@settings(max_examples=1500, deadline=None)
@given(chains(2))
def test_plan_keeps_the_value(pair: tuple[Layout, ...]) -> None:
    src, dst = pair
    x = numbers(src)
    parts = simulate.run(plan(src, dst), simulate.distribute(x, src), src.mesh)
    assert np.array_equal(simulate.assemble(parts, dst), x)
