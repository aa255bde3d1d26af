"""Do parameters, gradients, state and settings belong together? The text of what is raised when they do not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vescale_fn.errors import one_line
from vescale_fn.sharding.graph import dtype_text
from vescale_fn.shardings import five
from vescale_fn.tree import flatten, flatten_with_paths

Tree = Any

_REMEDY = "Start with opt.init(params), or go on with the optimizer and the parameters that this state was made for."


def params(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise TypeError for a parameter that is not a floating-point tensor."""
    for path, p in zip(paths, leaves):
        if p is not None and not p.dtype.is_floating_point:
            raise TypeError(
                f"{name}: {path or 'the parameter'} is {p.dtype}; only floating-point tensors can be trained. "
                "Keep other values in a tree of their own."
            )


def gradients(name: str, grads: Tree, params: Tree) -> list[Any]:
    """The leaves of the gradients. Raises ValueError unless each fits its parameter."""
    paths, leaves, _ = flatten_with_paths(params)
    given = _leaves_like(f"{name}: the tree of gradients", grads, params)
    for path, p, g in zip(paths, leaves, given):
        if p is not None and g is not None and (p.shape != g.shape or p.dtype != g.dtype):
            raise ValueError(
                f"{name}: the gradient of {path or 'the parameter'} is {g.dtype} of shape {list(g.shape)}, "
                f"but the parameter is {p.dtype} of shape {list(p.shape)}."
            )
    return given


def entries(name: str, state: Any, expected: Collection[str]) -> None:
    """Raise ValueError unless a state has these entries and no others."""
    if not isinstance(state, dict):
        raise ValueError(
            f"{name}: the state is a {type(state).__name__}, but this optimizer keeps a dict with "
            f"{one_line([*expected])}. Arguments go in the order opt.step(grads, state, params)."
        )
    if set(state) != set(expected):
        raise ValueError(
            f"{name}: the state has {one_line([*state]) or 'no entries'}, but this optimizer keeps "
            f"{one_line([*expected])}: it is the state of another optimizer. {_REMEDY}"
        )


def mirror(name: str, entry: str, tree: Tree, params: Tree, shapes: Sequence[tuple[int, ...] | None]) -> list[Any]:
    """The leaves of an entry of a state that has a tensor of these shapes for each parameter (None: none)."""
    paths = flatten_with_paths(params)[0]
    found = _leaves_like(f"{name}: the state's {entry}", tree, params, _REMEDY)
    for path, x, shape in zip(paths, found, shapes):
        if (x is None) != (shape is None) or (x is not None and tuple(x.shape) != shape):
            has = "missing" if x is None else f"{dtype_text(x.dtype)}{list(x.shape)}"
            wants = "has none" if shape is None else f"needs one of shape {list(shape)}"
            raise ValueError(
                f"{name}: the state's {entry} of {path or 'the parameter'} is {has}, but it {wants}. {_REMEDY}"
            )
    return found


def _leaves_like(what: str, tree: Tree, params: Tree, remedy: str = "") -> list[Any]:
    """The leaves of a tree that must be of the form of the parameters."""
    (found, treedef), (_, expected) = flatten(tree), flatten(params)
    if treedef == expected:
        return found
    has, wants = flatten_with_paths(tree)[0], flatten_with_paths(params)[0]
    missing, more = [p for p in wants if p not in has], [p for p in has if p not in wants]
    lacks = f" It lacks {five(missing)}." if missing else ""
    extra = f" It has {five(more)}, which the parameters do not." if more else ""
    kinds = "" if lacks or extra else f" It is {treedef}, the parameters are {expected}."
    raise ValueError(f"{what} is not of the form of the parameters.{lacks}{extra}{kinds} {remedy}".rstrip())


def settings(name: str, **values: Any) -> None:
    """Raise ValueError for a number that is negative."""
    for key, value in values.items():
        if isinstance(value, (int, float)) and not value >= 0:
            raise ValueError(f"{name}: {key}={value} must not be negative.")
