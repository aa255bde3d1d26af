"""What an optimizer is: two pure functions, which run as a pjit where they are given Arrays outside of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vescale_fn.array import Array
from vescale_fn.pjit import pjit
from vescale_fn.sharding.layout import WHOLE, Layout, cut_dims
from vescale_fn.sharding.unbind import spec_of
from vescale_fn.shardings import NamedSharding
from vescale_fn.tree import flatten, map_leaves, unflatten

Tree = Any
State = dict[str, Tree]


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions: `init(params) -> state` and `step(grads, state, params) -> (params, state)`.

    init_fn, step_fn: the two on plain tensors; step_fn(grads, state, params, skip) changes nothing where `skip`, a 0-d
    bool tensor, is true (None: never). The methods take Arrays too.

    >>> from vescale_fn.optim import sgd
    >>> opt = sgd(lr=0.5)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> opt.step({"w": torch.ones(2)}, opt.init(params), params)
    ({'w': tensor([0.5000, 1.5000])}, {'step': tensor(1.)})
    """

    name: str
    init_fn: Callable[[Tree], State]
    step_fn: Callable[[Tree, State, Tree, Tensor | None], tuple[Tree, State]]

    def init(self, params: Tree) -> State:
        """The state before the first update. State of Arrays is born where they live: no rank holds a whole one."""
        if not _any_array(params):
            return self.init_fn(params)
        described = map_leaves(lambda p: _described(p) if isinstance(p, Array) else p, params)
        places = state_shardings(self.init_fn(described), params)
        state: State = pjit(self.init_fn, out_shardings=places)(params)
        return state

    def step(self, grads: Tree, state: State, params: Tree, skip: Tensor | None = None) -> tuple[Tree, State]:
        """New parameters and state. Where `skip` (0-d bool) is true they are the old ones.

        Raises ValueError when gradients or state do not belong to these parameters and this optimizer.
        """
        return (self._jitted_step if _any_array(params) else self.step_fn)(grads, state, params, skip)

    @cached_property
    def _jitted_step(self) -> Callable[[Tree, State, Tree, Tensor | None], tuple[Tree, State]]:
        return pjit(self.step_fn)

    def __repr__(self) -> str:
        return self.name


def _any_array(tree: Tree) -> bool:
    return any(isinstance(x, Array) for x in flatten(tree)[0])


def _described(x: Array) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


# ---- where state lives


def state_shardings(state: Tree, params: Tree) -> Tree:
    """The specs of a state: what mirrors the parameters lives where they do, everything else is whole.

    state: as `init` gives it for `params`, dicts of mirrors, of other tensors, and of dicts of these.
    """
    leaves, tree = flatten(params)
    found, state_tree = flatten(state)
    if state_tree == tree:
        return unflatten(tree, [_sharding_like(x, p) for x, p in zip(found, leaves)])
    if isinstance(state, dict):
        return {k: state_shardings(x, params) for k, x in state.items()}
    return map_leaves(lambda x: None if x is None else "...", state)


def _sharding_like(x: Any, param: Any) -> Any:
    """The sharding of a parameter, for a tensor of its shape; dims of which x has only one entry are whole."""
    if x is None or not isinstance(param, Array):
        return None if x is None else "..."
    layout: Layout = param.layout
    if tuple(x.shape) == layout.shape:
        return param.sharding
    if x.ndim != layout.ndim or any(a not in (1, b) for a, b in zip(x.shape, layout.shape)):
        return "..."
    gone = [d for d, (a, b) in enumerate(zip(x.shape, layout.shape)) if a != b]
    states = {axis: WHOLE if cut_dims(s) & {*gone} else s for axis, s in zip(layout.mesh.names, layout.states)}
    return NamedSharding(param.mesh, str(spec_of(Layout.of(layout.mesh, tuple(x.shape), states))))
