"""What an optimizer is: two pure functions, which run as a pjit where they are given Arrays outside of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vescale_fn.array import Array
from vescale_fn.pjit import pjit
from vescale_fn.sharding.ragged import coarsened
from vescale_fn.sharding.unbind import spec_of
from vescale_fn.shardings import NamedSharding
from vescale_fn.tree import flatten, map_leaves, unflatten

Tree = Any
State = dict[str, Tree]


@dataclass(frozen=True)
class Block:
    """What of a parameter is updated together, so that a rank holds all of its state or none.

    shape: of a block; each dim divides that of the parameter. work: operations that the update of one takes, for blocks
    that are whole parameters and are each updated by one rank; 0 for those that any rank may update.
    """

    shape: tuple[int, ...]
    work: float = 0.0


def no_blocks(params: Tree) -> list[Block | None]:
    """Of an optimizer that updates each element by itself."""
    return [None] * len(flatten(params)[0])


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions: `init(params) -> state` and `step(grads, state, params) -> (params, state)`.

    init_fn, step_fn: the two on plain tensors; step_fn(grads, state, params, skip) changes nothing where `skip`, a 0-d
    bool tensor, is true (None: never). The methods take Arrays too. blocks: for each parameter what of it is updated
    together, None for any part of it.

    >>> from vescale_fn.optim import sgd
    >>> opt = sgd(lr=0.5)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> opt.step({"w": torch.ones(2)}, opt.init(params), params)
    ({'w': tensor([0.5000, 1.5000])}, {'step': tensor(1.)})
    """

    name: str
    init_fn: Callable[[Tree], State]
    step_fn: Callable[[Tree, State, Tree, Tensor | None], tuple[Tree, State]]
    blocks: Callable[[Tree], Sequence[Block | None]] = no_blocks

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
    """The sharding of a parameter, for a tensor that has its shape or one entry for each of its blocks."""
    if x is None or not isinstance(param, Array):
        return None if x is None else "..."
    return sharding_of_blocks(param.sharding, param.shape, tuple(x.shape)) if mirrors(x, param) else "..."


def mirrors(x: Any, param: Any) -> bool:
    """Whether x has the shape of a parameter, or one entry for each of its blocks, which all have the same shape."""
    if not hasattr(x, "shape") or not hasattr(param, "shape") or len(x.shape) != len(param.shape):
        return False
    return all(a == b or (a and b % a == 0) for a, b in zip(x.shape, param.shape))


def sharding_of_blocks(at: NamedSharding, shape: Sequence[int], blocks: Sequence[int]) -> NamedSharding:
    """Where a tensor with so many `blocks` in each dim lives, whose blocks those of a tensor of `shape` are that lives
    `at`: cut where that is cut between blocks, whole along axes that cut through them."""
    if tuple(shape) == tuple(blocks):
        return at
    return NamedSharding(at.mesh, str(spec_of(coarsened(at.layout(shape), blocks))))
