"""Groups of parameters, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vescale_fn.errors import one_line
from vescale_fn.optim import checks
from vescale_fn.optim.masks import check_globs
from vescale_fn.optim.optimizer import Block, Optimizer, State, Tree
from vescale_fn.shardings import five, matches
from vescale_fn.tree import flatten, flatten_with_paths, unflatten


def groups(table: Mapping[str, Optimizer | None]) -> Optimizer:
    """Each parameter is trained by the optimizer of the first glob that matches the end of its dotted path; those of
    None stay as they are. The state has the state of each optimizer under its glob.

    Raises ValueError for a glob that matches no parameter (but "*"), and for a parameter that no glob matches.

    >>> import torch
    >>> from vescale_fn.optim import sgd
    >>> opt = groups({"*.bias": sgd(lr=0.5), "*": None})
    >>> params = {"up": {"bias": torch.ones(1), "weight": torch.ones(1)}}
    >>> opt.step(params, opt.init(params), params)[0]
    {'up': {'bias': tensor([0.5000]), 'weight': tensor([1.])}}
    """
    name = f"groups({one_line([f'{g}: {opt}' for g, opt in table.items()])})"
    trained = {g: opt for g, opt in table.items() if opt is not None}

    def init(params: Tree) -> State:
        return {g: trained[g].init_fn(part) for g, part in _parts(params, params, table).items() if g in trained}

    def step(grads: Tree, state: State, params: Tree, skip: Tensor | None) -> tuple[Tree, State]:
        checks.entries(name, state, trained)
        checks.gradients(name, grads, params)
        new, states = params, {}
        of_grads = _parts(grads, params, table)
        for g, part in _parts(params, params, table).items():
            if g in trained:
                updated, states[g] = trained[g].step_fn(of_grads[g], state[g], part, skip)
                new = _merged(new, updated)
        return new, states

    def blocks(params: Tree) -> list[Block | None]:
        found: list[Block | None] = [None] * len(flatten(params)[0])
        for g, part in _parts(params, params, table).items():
            if g in trained:
                found = [a or b for a, b in zip(found, trained[g].blocks(part))]
        return found

    return Optimizer(name, init, step, blocks)


def _parts(tree: Tree, params: Tree, table: Mapping[str, Any]) -> dict[str, Tree]:
    """For each glob the tree with None in the place of what belongs to others."""
    paths, leaves, _ = flatten_with_paths(params)
    check_globs("groups", [*table], paths)
    first = [next((g for g in table if matches(path, g)), None) for path in paths]
    lost = [path for path, g, p in zip(paths, first, leaves) if g is None and p is not None]
    if lost:
        raise ValueError(
            f"groups: no glob matches {five(lost)}. Add one, or end with '*': None, which leaves the rest as it is."
        )
    _, found, treedef = flatten_with_paths(tree)
    return {g: unflatten(treedef, [x if own == g else None for x, own in zip(found, first)]) for g in table}


def _merged(tree: Tree, updated: Tree) -> Tree:
    """A tree with the leaves of another that are not None."""
    (_, old, treedef), (_, new, _) = flatten_with_paths(tree), flatten_with_paths(updated)
    return unflatten(treedef, [a if b is None else b for a, b in zip(old, new)])
