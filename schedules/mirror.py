"""Optimizer state as what it mostly is: trees that mirror the parameters, and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vescale_fn.tree import children, flatten, flatten_with_paths, is_leaf


def mirrored(state: Any, params: Any, of_params: Sequence[Any], of_number: Any, optimizer: str) -> list[Any]:
    """For each leaf of `state` what goes with it: that of the parameter that it mirrors (`of_params`, in leaf order),
    or `of_number` for a 0-d tensor, for what is no tensor, and for a mirror in which some dims have only one entry.

    A mirror is a subtree of the form of the parameters, with leaves of the same shapes or None.
    Raises ValueError naming a leaf that is neither.
    """
    leaves, treedef = flatten(params)

    def mirrors(tree: Any) -> bool:
        found, form = flatten(tree)
        return form == treedef and all(_fits(x, p) for x, p in zip(found, leaves))

    def walk(tree: Any, at: int) -> list[Any]:
        if mirrors(tree):
            found = flatten(tree)[0]
            return [own if _shape(x) == _shape(p) else of_number for x, p, own in zip(found, leaves, of_params)]
        if is_leaf(tree):
            if getattr(tree, "shape", ()):
                raise ValueError(not_a_mirror(optimizer, flatten_with_paths(state)[0][at], list(tree.shape), params))
            return [of_number]
        out: list[Any] = []
        for child in children(tree):
            out += walk(child, at + len(out))
        return out

    return walk(state, 0)


def _shape(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if hasattr(x, "shape") else None


def _fits(x: Any, param: Any) -> bool:
    """Whether x has the shape of a parameter, or 1 in some of its dims."""
    if x is None:
        return True
    a, b = _shape(x), _shape(param)
    return a is not None and b is not None and len(a) == len(b) and all(i in (1, j) for i, j in zip(a, b))


def not_a_mirror(optimizer: str, path: str, shape: list[int], params: Any) -> str:
    paths, leaves, _ = flatten_with_paths(params)
    like = next((p for p in sorted(paths, key=len, reverse=True) if path.endswith(p)), None)
    has = f"the parameter {like} has {list(leaves[paths.index(like)].shape)}" if like else "no parameter goes with it"
    return (
        f"schedules.zero: the state of {optimizer} is not shaped like the parameters: {path} has shape {shape}, and "
        f"{has}. State must mirror the parameters or be 0-d to be sharded; was it made for other parameters?"
    )
