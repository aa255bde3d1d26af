"""ZeRO: optimizer state, gradients and parameters, each held in parts by the ranks of an axis that hold the same batch
of parameters otherwise (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models").

A stage only says where things live; the collectives follow. With P bytes of parameters, K copies of them in the state
and n ranks, a rank holds between steps P + KP/n in stages 1 and 2, and P/n + KP/n in stage 3; gradients take P bytes in
stage 1 where they are added up over microbatches, and P/n in stages 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale_fn.array import Array
from vescale_fn.optim import Optimizer
from vescale_fn.pjit import pjit
from vescale_fn.placement import device_put
from vescale_fn.primitives import reshard
from vescale_fn.schedules.held import Held as Held
from vescale_fn.schedules.held import held
from vescale_fn.schedules.kinds import check_kind
from vescale_fn.schedules.layouts import owners, sharded_further, undone
from vescale_fn.schedules.mirror import mirrored
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.shardings import NamedSharding, layouts_for
from vescale_fn.tracing import ShapeDtype, sharding_of
from vescale_fn.tree import flatten, flatten_with_paths, unflatten

STAGES = (1, 2, 3)
Places = Sequence[NamedSharding | None]  # of the leaves of the parameters
Row = tuple[int | None, Any, NamedSharding | None]  # which parameter a tensor belongs to, the tensor, where it lives


@dataclass(frozen=True)
class Zero(Optimizer):
    """An optimizer whose state, and by `stage` gradients and parameters too, are sharded over `axis`."""

    inner: Optimizer = field(kw_only=True)
    axis: str = field(kw_only=True)
    stage: int = field(kw_only=True)

    def __repr__(self) -> str:
        return self.name

    # ---- where things live, given where parameters do

    def parameters(self, at: Places, params: Any) -> Places:
        """Where the leaves of `params` live that the user puts `at`."""
        at = self.inner.parameters(at, params) if isinstance(self.inner, Zero) else at
        return self._further(at, params, from_stage=3, keep_cuts=True)

    def gradients(self, at: Places, params: Any) -> Places:
        """Where the gradients of the leaves of `params` live, which live `at`."""
        at = self.inner.gradients(at, params) if isinstance(self.inner, Zero) else at
        return self._further(at, params, from_stage=2)

    def moments(self, at: Places, params: Any) -> Places:
        """Where the state of the leaves of `params` lives, which live `at`."""
        at = self.inner.moments(at, params) if isinstance(self.inner, Zero) else at
        return self._further(at, params, from_stage=1)

    def _further(self, at: Places, params: Any, from_stage: int, keep_cuts: bool = False) -> Places:
        """`keep_cuts`: where blocks would undo a cut of the user's, the tensor is cut as if there were none."""
        mesh = next((x.mesh for x in at if x is not None), None)
        if mesh is None:
            return at
        if self.axis not in mesh.shape:
            raise ValueError(no_axis(self.axis, mesh))
        if self.stage < from_stage:
            return at
        blocks, leaves = self.blocks(params), flatten(params)[0]
        spread = [i for i, b in enumerate(blocks) if b is not None and b.work]
        owner = dict(zip(spread, owners([b.work for b in blocks if b is not None and b.work], mesh.shape[self.axis])))

        def further(i: int, x: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
            found = sharded_further(x, shape, self.axis, blocks[i], owner.get(i))
            lost = keep_cuts and undone(x.layout(shape), found.layout(shape))
            return sharded_further(x, shape, self.axis) if lost else found

        return [None if x is None else further(i, x, tuple(p.shape)) for i, (x, p) in enumerate(zip(at, leaves))]

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
        moments = self.moments([None if p is None else p.sharding for p in leaves], params)
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

        if not self.shards_gradients:
            return grads
        (leaves, tree), of_params = flatten(grads), flatten(params)[0]
        places = self.gradients([None if p is None else sharding_of(p) for p in of_params], params)
        moved = [g if g is None or at is None else reshard(g, str(at.spec)) for g, at in zip(leaves, places)]
        return unflatten(tree, moved)

    def table(self, params: Any, mesh: Mesh | None = None, specs: Any = None, **sizes: int) -> str:
        """For each parameter the specs of parameter, gradient and state, and the bytes of all three on a rank.

        params: Arrays that `place` gave, or tensors with the mesh and specs that `place` would get.
        """
        rows: list[tuple[str, ...]] = [("path", "shape", "parameter", "gradient", "state", "bytes per rank")]
        paths, leaves, _ = flatten_with_paths(params)
        columns = self._columns(params, mesh, specs, **sizes)
        for i, (path, x) in enumerate(zip(paths, leaves)):
            own = [[(y, at) for of, y, at in column if of == i] for column in columns]
            if own[0]:
                places = [next((at for y, at in column if y.shape == x.shape), None) for column in own]
                texts = ("" if at is None else f"'{at.spec}'" for at in places)
                rows.append((path, str(list(x.shape)), *texts, f"{held(*own).total:,}"))
        width = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(r[:-1], width)), r[-1].rjust(width[-1])]) for r in rows
        )

    def held(self, params: Any, mesh: Mesh | None = None, specs: Any = None, **sizes: int) -> Held:
        """Bytes per rank of parameters, of gradients that are kept, and of the state; arguments as for `table`."""
        parameters, gradients, state = self._columns(params, mesh, specs, **sizes)
        return held(*([(x, at) for _, x, at in column] for column in (parameters, gradients, state)))

    # ---- how

    def _places(self, params: Any, mesh: Mesh, specs: Any, **sizes: int) -> Any:
        leaves, tree = flatten(params)
        asked = layouts_for(specs, params, mesh, what="schedules.zero", **sizes)
        user = [NamedSharding(mesh, "..." if spec is None else spec) for _, spec in asked]
        return unflatten(tree, self.parameters([None if x is None else at for x, at in zip(leaves, user)], params))

    def _columns(self, params: Any, mesh: Mesh | None, specs: Any, **sizes: int) -> list[list[Row]]:
        """Parameters, gradients and state with what each of their tensors belongs to, and where it lives."""
        leaves, tree = flatten(params)
        at: Places = (
            [sharding_of(x) for x in leaves] if mesh is None else flatten(self._places(params, mesh, specs, **sizes))[0]
        )
        described = unflatten(tree, _described(leaves))
        state = self.init_fn(described)
        of = mirrored(state, described, range(len(leaves)), None, self.inner.name)
        of_state = mirrored(state, described, self.moments(at, params), None, self.inner.name)
        columns = [
            zip(range(len(leaves)), leaves, at),
            zip(range(len(leaves)), leaves, self.gradients(at, params)),
            zip(of, flatten(state)[0], of_state),
        ]
        placed = [x is not None for x in at]
        return [[(i, x, y) for i, x, y in c if x is not None and (i is None or placed[i])] for c in columns]


def zero(optimizer: Optimizer, axis: str = "dp", *, stage: int) -> Zero:
    """The optimizer with its state sharded over a mesh axis (stage 1), the gradients too (2), the parameters too (3).

    It has the same `init` and `step`, and `place`, which puts parameters on a mesh and makes their state. A step is
    written as with any optimizer, and runs without a mesh as if the transform were not there. Around another `zero` on
    another axis it shards what that leaves: `zero(zero(opt, "fsdp", stage=3), "dp", stage=1)` shards parameters inside
    a node, and the state further over the nodes that hold copies.
    What the optimizer updates in blocks (`adamw8bit`) is cut between blocks, and a matrix that it updates as a whole
    (`muon`) has one rank as its owner, so that the work is spread evenly: updates never communicate.
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
    made = Zero(name, optimizer.init_fn, step, optimizer.blocks, inner=optimizer, axis=axis, stage=stage)
    return made


def _described(leaves: Sequence[Any]) -> list[Any]:
    """The leaves as tensors without memory."""
    return [None if x is None else torch.empty(tuple(x.shape), dtype=x.dtype, device="meta") for x in leaves]


def no_axis(axis: str, mesh: Mesh) -> str:
    has = ", ".join(f"{a}={mesh.shape[a]}" for a in mesh.shape.names)
    return f"schedules.zero: there is no mesh axis '{axis}': this mesh has {has or 'no axes'}."
