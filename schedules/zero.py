"""ZeRO: optimizer state, gradients and parameters, each held in parts by the ranks of an axis that hold the same batch
of parameters otherwise (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models").

A stage only says where things live; the collectives follow. With P bytes of parameters, K copies of them in the state
and n ranks, a rank holds between steps P + KP/n in stages 1 and 2, and P/n + KP/n in stage 3; gradients take P bytes in
stage 1 where they are added up over microbatches, and P/n in stages 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn.array import Array
from vescale_fn.optim import Optimizer
from vescale_fn.pjit import pjit
from vescale_fn.placement import device_put
from vescale_fn.primitives import reshard
from vescale_fn.schedules.kinds import check_kind
from vescale_fn.schedules.layouts import sharded_further
from vescale_fn.schedules.mirror import mirrored
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.shardings import NamedSharding, layouts_for
from vescale_fn.tracing import ShapeDtype, sharding_of
from vescale_fn.tree import flatten, flatten_with_paths, map_leaves, unflatten

STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Held:
    """Bytes that the rank with most holds, by kind."""

    parameters: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.state


@dataclass(frozen=True)
class Zero(Optimizer):
    """An optimizer whose state, and by `stage` gradients and parameters too, are sharded over `axis`."""

    inner: Optimizer
    axis: str
    stage: int

    def __repr__(self) -> str:
        return self.name

    # ---- where things live, given where a parameter does

    def parameter(self, at: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
        """Where a parameter lives that the user puts `at`."""
        at = self.inner.parameter(at, shape) if isinstance(self.inner, Zero) else at
        return self._further(at, shape, from_stage=3)

    def gradient(self, at: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
        """Where the gradient of a parameter lives that lives `at`."""
        at = self.inner.gradient(at, shape) if isinstance(self.inner, Zero) else at
        return self._further(at, shape, from_stage=2)

    def moment(self, at: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
        """Where the state of a parameter lives that lives `at`."""
        at = self.inner.moment(at, shape) if isinstance(self.inner, Zero) else at
        return self._further(at, shape, from_stage=1)

    def _further(self, at: NamedSharding, shape: tuple[int, ...], from_stage: int) -> NamedSharding:
        if self.axis not in at.mesh.shape:
            raise ValueError(no_axis(self.axis, at.mesh))
        return sharded_further(at, shape, self.axis) if self.stage >= from_stage else at

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are kept in parts."""
        return self.stage >= 2 or (isinstance(self.inner, Zero) and self.inner.shards_gradients)

    # ---- what a user calls

    def init(self, params: Any) -> Any:
        """The state before the first update. That of Arrays is made where it lives: no rank holds a whole one."""
        leaves, tree = flatten(params)
        mesh = next((p.mesh for p in leaves if isinstance(p, Array)), None)
        if mesh is None:
            return self.init_fn(params)
        described = self.init_fn(unflatten(tree, _described(leaves)))
        moments = [None if p is None else self.moment(p.sharding, tuple(p.shape)) for p in leaves]
        state, form = flatten(described)
        places = mirrored(described, params, moments, NamedSharding(mesh, "..."), self.inner.name)
        if mesh.kind == "abstract":
            shapes = [None if x is None else ShapeDtype(tuple(x.shape), x.dtype) for x in state]
            return device_put(unflatten(form, shapes), unflatten(form, places), mesh)
        return pjit(self.init_fn, out_shardings=unflatten(form, places))(params)

    def place(self, params: Any, mesh: Mesh, specs: Any = None, **sizes: int) -> tuple[Any, Any]:
        """Parameters and state on a mesh, sharded as the stage says.

        params, specs, sizes: as for `vf.device_put`. Each spec is extended by the axis on the largest dim that is not
        cut yet and that its size divides (see `vescale_fn.schedules.layouts`; `.table` shows the result).
        Raises ValueError when the mesh has no such axis, or the state does not mirror the parameters.
        """
        placed = device_put(params, self._places(params, mesh, specs, **sizes), mesh)
        return placed, self.init(placed)

    def reduced(self, grads: Any, params: Any) -> Any:
        """`grads` where this optimizer wants them: from stage 2 on in shards. As they are where no mesh is known."""

        def placed(g: Any, p: Any) -> Any:
            at = None if g is None else sharding_of(p)
            return g if at is None else reshard(g, str(self.gradient(at, tuple(g.shape)).spec))

        return map_leaves(placed, grads, params) if self.shards_gradients else grads

    def table(self, params: Any, mesh: Mesh | None = None, specs: Any = None, **sizes: int) -> str:
        """For each parameter the specs of parameter, gradient and state, and the bytes of all three on a rank.

        params: Arrays that `place` gave, or tensors with the mesh and specs that `place` would get.
        """
        rows: list[tuple[str, ...]] = [("path", "shape", "parameter", "gradient", "state", "bytes per rank")]
        for path, x, at in self._rows(params, mesh, specs, **sizes):
            shape = tuple(x.shape)
            places = (at, self.gradient(at, shape), self.moment(at, shape))
            held = self._held([x], [at], numbers=False)
            rows.append((path, str(list(shape)), *(f"'{p.spec}'" for p in places), f"{held.total:,}"))
        width = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(r[:-1], width)), r[-1].rjust(width[-1])]) for r in rows
        )

    def held(self, params: Any, mesh: Mesh | None = None, specs: Any = None, **sizes: int) -> Held:
        """Bytes per rank of parameters, of gradients that are kept, and of the state; arguments as for `table`."""
        rows = self._rows(params, mesh, specs, **sizes)
        return self._held([x for _, x, _ in rows], [at for _, _, at in rows], numbers=True)

    # ---- how

    def _places(self, params: Any, mesh: Mesh, specs: Any, **sizes: int) -> Any:
        leaves, tree = flatten(params)
        asked = layouts_for(specs, params, mesh, what="schedules.zero", **sizes)
        user = [NamedSharding(mesh, "..." if spec is None else spec) for _, spec in asked]
        return unflatten(
            tree, [None if x is None else self.parameter(at, tuple(x.shape)) for x, at in zip(leaves, user)]
        )

    def _rows(self, params: Any, mesh: Mesh | None, specs: Any, **sizes: int) -> list[tuple[str, Any, NamedSharding]]:
        paths, leaves, _ = flatten_with_paths(params)
        if mesh is None:
            places = [sharding_of(x) for x in leaves]
        else:
            places = flatten(self._places(params, mesh, specs, **sizes))[0]
        return [(p, x, at) for p, x, at in zip(paths, leaves, places) if at is not None]

    def _held(self, leaves: Sequence[Any], places: Sequence[NamedSharding], numbers: bool) -> Held:
        """`numbers`: whether to count what is in the state and mirrors no parameter."""
        shapes = [tuple(x.shape) for x in leaves]
        state = self.init_fn(_described(leaves))
        moments = [self.moment(at, s) for at, s in zip(places, shapes)]
        of_state = mirrored(state, list(leaves), moments, None, self.inner.name)
        return Held(
            sum(_nbytes(x, at) for x, at in zip(leaves, places)),
            sum(_nbytes(x, self.gradient(at, s)) for x, at, s in zip(leaves, places, shapes)),
            sum(_nbytes(x, at) for x, at in zip(flatten(state)[0], of_state) if x is not None and (at or numbers)),
        )


def zero(optimizer: Optimizer, axis: str = "dp", *, stage: int) -> Zero:
    """The optimizer with its state sharded over a mesh axis (stage 1), the gradients too (2), the parameters too (3).

    It has the same `init` and `step`, and `place`, which puts parameters on a mesh and makes their state. A step is
    written as with any optimizer, and runs without a mesh as if the transform were not there. Around another `zero` on
    another axis it shards what that leaves: `zero(zero(opt, "fsdp", stage=3), "dp", stage=1)` shards parameters inside
    a node, and the state further over the nodes that hold copies.
    Raises ValueError for a stage that does not exist, TypeError when `optimizer` is none, and where they are used
    ValueError for an axis that the mesh does not have and state that does not mirror the parameters.

    >>> import vescale_fn as vf
    >>> mesh, params = vf.make_mesh(dp=2), {"w": torch.ones(6, 4), "b": torch.ones(3)}
    >>> opt = zero(vf.optim.sgd(lr=0.1, momentum=0.9), "dp", stage=1)
    >>> print(opt.table(params, mesh))
    path  shape   parameter  gradient  state     bytes per rank
    w     [6, 4]  '...'      '...'     'a/dp b'             240
    b     [3]     '...'      '...'     '...'                 36
    >>> params, state = opt.place(params, mesh)
    >>> state["momentum_buffer"]["w"].sharding
    NamedSharding(dp=2: 'a/dp b')
    """
    check_kind("zero", "optimizer", optimizer)
    if stage not in STAGES:
        raise ValueError(
            f"schedules.zero: stage={stage} does not exist. Stage 1 shards the optimizer state over '{axis}', stage 2 "
            "the gradients too, stage 3 the parameters too."
        )

    def step(grads: Any, state: Any, params: Any, skip: torch.Tensor | None) -> tuple[Any, Any]:
        mirrored(state, params, [None] * len(flatten(params)[0]), None, optimizer.name)
        return optimizer.step_fn(made.reduced(grads, params), state, params, skip)

    name = f"zero({optimizer.name}, '{axis}', stage={stage})"
    made = Zero(name, optimizer.init_fn, step, optimizer, axis, stage)
    return made


def _described(leaves: Sequence[Any]) -> list[Any]:
    """The leaves as tensors without memory."""
    return [None if x is None else torch.empty(tuple(x.shape), dtype=x.dtype, device="meta") for x in leaves]


def _nbytes(x: Any, at: NamedSharding | None) -> int:
    """Bytes of x on the rank that holds most of it."""
    shape = tuple(x.shape) if at is None else at.layout(tuple(x.shape)).max_local_shape
    return math.prod(shape) * int(x.dtype.itemsize)


def no_axis(axis: str, mesh: Mesh) -> str:
    has = ", ".join(f"{a}={mesh.shape[a]}" for a in mesh.shape.names)
    return f"schedules.zero: there is no mesh axis '{axis}': this mesh has {has or 'no axes'}."
