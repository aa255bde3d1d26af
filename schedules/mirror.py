"""Optimizer state as what it mostly is: trees that mirror the parameters, and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vescale_fn.optim.optimizer import mirrors as fits
from vescale_fn.optim.optimizer import sharding_of_blocks
from vescale_fn.shardings import NamedSharding
from vescale_fn.tree import children, flatten, flatten_with_paths, is_leaf


def mirrored(state: Any, params: Any, of_params: Sequence[Any], of_number: Any, optimizer: str) -> list[Any]:
    """For each leaf of `state` what goes with it: that of the parameter that it mirrors (`of_params`, in leaf order),
    as it is cut for the leaf's blocks, or `of_number` for a 0-d tensor and for what is no tensor.

    A mirror is a subtree of the form of the parameters, with leaves of the same shapes, with leaves that have one entry
    for each block of a parameter, or with None.
    Raises ValueError naming a leaf that is neither.
    """
    leaves, treedef = flatten(params)

    def mirrors(tree: Any) -> bool:
        found, form = flatten(tree)
        return form == treedef and all(x is None or fits(x, p) for x, p in zip(found, leaves))

    def walk(tree: Any, at: int) -> list[Any]:
        if mirrors(tree):
            found = flatten(tree)[0]
            return [_of_blocks(own, p, x) for x, p, own in zip(found, leaves, of_params)]
        if is_leaf(tree):
            if getattr(tree, "shape", ()):
                raise ValueError(not_a_mirror(optimizer, flatten_with_paths(state)[0][at], list(tree.shape), params))
            return [of_number]
        out: list[Any] = []
        for child in children(tree):
            out += walk(child, at + len(out))
        return out

    return walk(state, 0)


def _of_blocks(own: Any, param: Any, x: Any) -> Any:
    """What goes with the blocks of a parameter, `own` being what goes with the parameter."""
    if x is None or not isinstance(own, NamedSharding):
        return own
    return sharding_of_blocks(own, tuple(param.shape), tuple(x.shape))


def not_a_mirror(optimizer: str, path: str, shape: list[int], params: Any) -> str:
    paths, leaves, _ = flatten_with_paths(params)
    like = next((p for p in sorted(paths, key=len, reverse=True) if path.endswith(p)), None)
    has = f"the parameter {like} has {list(leaves[paths.index(like)].shape)}" if like else "no parameter goes with it"
    return (
        f"schedules.zero: the state of {optimizer} is not shaped like the parameters: {path} has shape {shape}, and "
        f"{has}. State must mirror the parameters or be 0-d to be sharded; was it made for other parameters?"
    )
