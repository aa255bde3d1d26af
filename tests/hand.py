"""Programs made by hand, and the NumPy definition of what a layout means, for tests of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vescale_fn.program import Program
from vescale_fn.sharding.graph import Eqn, Graph, Source, Var
from vescale_fn.sharding.layout import Layout, Partial, State
from vescale_fn.sharding.mesh import MeshShape

aten = torch.ops.aten
_JOIN = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_IDENTITY = {"sum": 0.0, "max": -np.inf, "min": np.inf}


@dataclass
class Hand:
    """Builds a Program equation by equation."""

    mesh: MeshShape
    layouts: dict[Var, Layout] = field(default_factory=dict)
    inputs: list[Var] = field(default_factory=list)
    eqns: list[Eqn] = field(default_factory=list)

    def var(
        self, name: str, shape: Sequence[int], states: Mapping[str, State] | Layout | None = None, dtype: Any = None
    ) -> Var:
        v = Var(name, tuple(shape), dtype or torch.float64)
        self.layouts[v] = states if isinstance(states, Layout) else Layout.of(self.mesh, shape, states)
        return v

    def input(self, name: str, shape: Sequence[int] = (), states: Any = None, dtype: Any = None) -> Var:
        v = Var(name, (), float) if dtype is float else self.var(name, shape, states, dtype)
        self.inputs.append(v)
        return v

    def op(self, op: Any, args: Sequence[Any], *outs: Var, source: Source | None = None, **kwargs: Any) -> Any:
        self.eqns.append(Eqn(op, tuple(args), kwargs, outs, source or Source()))
        return outs[0] if len(outs) == 1 else outs

    def like(self, v: Var, name: str, **states: State) -> Var:
        """A new Var of v's shape, its layout changed along some axes."""
        return self.var(name, v.shape, self.layouts[v].with_states(states), v.dtype)

    def graph(self, *outputs: Any) -> Graph:
        """What was built so far, as the body of a sub-program; starts afresh."""
        graph = Graph(tuple(self.inputs), tuple(self.eqns), outputs)
        self.inputs, self.eqns = [], []
        return graph

    def program(self, *outputs: Any, donated: Sequence[int] = ()) -> Program:
        return Program(self.mesh, self.graph(*outputs), self.layouts, donated=frozenset(donated))


def parts(values: Tensor, layout: Layout, seed: int = 0) -> list[Tensor]:
    """What each rank holds of a global value. A pending reduction is split at random (in sixteenths: exact sums)."""
    rng = np.random.default_rng(seed)
    whole = [values.numpy()] * layout.mesh.size
    for axis, kind in layout.partial:
        whole = _spread(whole, layout.mesh, axis, kind, rng)
    flat = layout.flat
    cut = [x.reshape(flat.shape)[index(flat, layout.mesh.coords(r))] for r, x in enumerate(whole)]
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in cut]


def _spread(whole: list[Any], mesh: MeshShape, axis: str, kind: str, rng: Any) -> list[Any]:
    out = list(whole)
    for group in mesh.groups((axis,)):
        noise = [rng.integers(-8, 8, whole[0].shape) / 16 for _ in group[1:]]
        if kind == "sum":
            terms = [*noise, whole[group[0]] - sum(noise)]
        else:
            sign = -1 if kind == "max" else 1
            terms = [whole[group[0]] + sign * abs(n) for n in noise] + [whole[group[0]]]
        for rank, term in zip(group, terms):
            out[rank] = np.asarray(term, dtype=whole[0].dtype)
    return out


def index(layout: Layout, coords: Mapping[str, int]) -> Any:
    """The global indices that a rank holds, for NumPy."""
    runs = [[i for a, b in layout.intervals(d, coords) for i in range(a, b)] for d in range(layout.ndim)]
    return np.ix_(*[np.array(r, dtype=np.intp) for r in runs]) if runs else ()


def assemble(shards: Sequence[Tensor], layout: Layout) -> np.ndarray[Any, Any]:
    """The global value of what the ranks hold; asserts that shapes are right and that copies agree."""
    pending = dict(layout.partial)
    total: np.ndarray[Any, Any] | None = None
    for where in _along(layout.mesh, pending):
        value = _assemble_one({r: shards[r] for r in where}, layout)
        total = value if total is None else _JOIN[next(iter(pending.values()))](total, value)
    assert total is not None
    return total


def _along(mesh: MeshShape, pending: Mapping[str, str]) -> list[list[int]]:
    """Ranks, grouped by their coordinates along the pending axes."""
    found: dict[tuple[int, ...], list[int]] = {}
    for r in range(mesh.size):
        found.setdefault(tuple(mesh.coords(r)[a] for a in pending), []).append(r)
    return list(found.values())


def _assemble_one(shards: Mapping[int, Tensor], layout: Layout) -> np.ndarray[Any, Any]:
    first = next(iter(shards.values()))
    out = np.zeros(layout.shape, dtype=first.numpy().dtype)
    seen = np.zeros(layout.shape, dtype=bool)
    for rank, shard in shards.items():
        coords = layout.mesh.coords(rank)
        assert tuple(shard.shape) == layout.local_shape(coords), f"rank {rank} holds {tuple(shard.shape)} of {layout}"
        where = index(layout, coords)
        assert np.array_equal(out[where][seen[where]], shard.numpy()[seen[where]]), f"rank {rank} differs in {layout}"
        out[where], seen[where] = shard.numpy(), True
    assert seen.all(), f"nobody holds part of {layout}"
    return out


def partial(kind: str = "sum") -> Partial:
    return Partial(kind)  # type: ignore[arg-type]
