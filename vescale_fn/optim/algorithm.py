"""The frame of every algorithm: which parameters are updated together, with what state, and at what rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_fn.optim import checks
from vescale_fn.optim.masks import Mask, chosen
from vescale_fn.optim.optimizer import Block, Optimizer, State, Tree
from vescale_fn.optim.schedules import Rate, rate_at
from vescale_fn.tree import flatten, flatten_with_paths, unflatten

Moments = dict[str, Tensor]  # of one parameter, by name


@dataclass(frozen=True)
class Slot:
    """A moment of one parameter before the first update. dtype: None for the parameter's."""

    shape: tuple[int, ...]
    fill: float = 0.0
    dtype: torch.dtype | None = None

    def tensor(self, param: Tensor) -> Tensor:
        dtype = self.dtype or param.dtype
        if self.shape == tuple(param.shape):
            return torch.full_like(param, self.fill, dtype=dtype)
        return param.new_full(self.shape, self.fill, dtype=dtype)


@dataclass(frozen=True)
class Rows:
    """Parameters of one device and dtype, that are updated together."""

    params: list[Tensor]
    grads: list[Tensor]
    moments: list[Moments]


@dataclass(frozen=True)
class Now:
    """What one update is told.

    count: of updates, this one included (0-d float32). lr: the learning rate. skip: see `Optimizer`.
    decays: whether weight decay is meant for these parameters.
    """

    count: Tensor
    lr: float | Tensor
    skip: Tensor | None
    decays: bool


@dataclass(frozen=True)
class Algorithm:
    """An optimizer by what it does to one group of parameters.

    names: of all moments; `slots(shape, dtype)` are those of one parameter.
    update: new parameters and moments, in order. It leaves its operands alone.
    mask: which parameters have weight decay.
    skips: `update` heeds `Now.skip` itself.
    admits: raises for a parameter, known by its path, that the algorithm cannot train.
    block: what of a parameter of a shape is updated together; None for any part.
    """

    name: str
    lr: Rate
    names: tuple[str, ...]
    slots: Callable[[tuple[int, ...], torch.dtype], dict[str, Slot]]
    update: Callable[[Rows, Now], tuple[Sequence[Tensor], Sequence[Moments]]]
    mask: Mask = None
    skips: bool = False
    admits: Callable[[str, Tensor], None] = lambda path, param: None
    block: Callable[[tuple[int, ...]], Block | None] = lambda shape: None

    def optimizer(self) -> Optimizer:
        return Optimizer(self.name, self.init, self.step, self.blocks)

    def blocks(self, params: Tree) -> list[Block | None]:
        return [None if p is None else self.block(tuple(p.shape)) for p in flatten(params)[0]]

    def init(self, params: Tree) -> State:
        paths, leaves, tree = flatten_with_paths(params)
        checks.params(self.name, paths, leaves)
        for path, p in zip(paths, leaves):
            if p is not None:
                self.admits(path, p)
        moments = [{} if p is None else {m: s.tensor(p) for m, s in self._slots(p).items()} for p in leaves]
        device = next((p.device for p in leaves if p is not None), None)
        step = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": step, **{m: unflatten(tree, [row.get(m) for row in moments]) for m in self.names}}

    def step(self, grads: Tree, state: State, params: Tree, skip: Tensor | None = None) -> tuple[Tree, State]:
        paths, leaves, tree = flatten_with_paths(params)
        checks.entries(self.name, state, ("step", *self.names))
        expected = [{} if p is None else {m: s.shape for m, s in self._slots(p).items()} for p in leaves]
        columns = {
            m: checks.mirror(self.name, m, state[m], params, [shapes.get(m) for shapes in expected]) for m in self.names
        }
        given = checks.gradients(self.name, grads, params)
        done: Tensor = state["step"]
        decays = chosen(self.name, self.mask, paths, leaves)
        for rows in _groups(leaves, given, decays):
            now = Now(done + 1, rate_at(self.lr, done), skip, decays[rows[0]])
            self._update(rows, now, leaves, given, columns)
        moments = {m: unflatten(tree, column) for m, column in columns.items()}
        return unflatten(tree, leaves), {
            "step": done + 1 if skip is None else torch.where(skip, done, done + 1),
            **moments,
        }

    def _slots(self, param: Tensor) -> dict[str, Slot]:
        return self.slots(tuple(param.shape), param.dtype)

    def _update(
        self, rows: Sequence[int], now: Now, params: list[Any], grads: Sequence[Any], columns: dict[str, list[Any]]
    ) -> None:
        """Replace these rows of the parameters and of the columns of moments."""
        old = Rows(
            [params[i] for i in rows],
            [grads[i] for i in rows],
            [{m: column[i] for m, column in columns.items() if column[i] is not None} for i in rows],
        )
        new_params, new_moments = self.update(old, now)
        keep = None if self.skips else now.skip
        for i, param, moments, before in zip(rows, new_params, new_moments, old.moments, strict=True):
            params[i] = unless(keep, params[i], param)
            for m, new in moments.items():
                columns[m][i] = unless(keep, before[m], new)


def unless(skip: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    """The new value, or the old one where `skip` is true."""
    return new if skip is None else torch.where(skip, old, new)


def one_by_one(
    update: Callable[[Tensor, Tensor, Moments, Now], tuple[Tensor, Moments]],
) -> Callable[[Rows, Now], tuple[Sequence[Tensor], Sequence[Moments]]]:
    """The update of a group, from that of one parameter."""

    def run(rows: Rows, now: Now) -> tuple[Sequence[Tensor], Sequence[Moments]]:
        results = [update(p, g, m, now) for p, g, m in zip(rows.params, rows.grads, rows.moments)]
        return [p for p, _ in results], [m for _, m in results]

    return run


def _groups(leaves: Sequence[Any], grads: Sequence[Any], decays: Sequence[bool]) -> list[list[int]]:
    """Indices of the parameters that have a gradient, by device, dtype and weight decay."""
    groups: dict[Any, list[int]] = {}
    for i, (p, g, d) in enumerate(zip(leaves, grads, decays)):
        if p is not None and g is not None:
            groups.setdefault((p.device, p.dtype, d), []).append(i)
    return list(groups.values())
