"""Parameters by path: which of them have weight decay, and which group they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from vescale_fn.shardings import five, matches

# Globs that match the end of a dotted path, or a function of path and parameter; None is all.
Mask = str | Sequence[str] | Callable[[str, Tensor], bool] | None


def chosen(name: str, mask: Mask, paths: Sequence[str], leaves: Sequence[Any]) -> list[bool]:
    """Which leaves a mask chooses; never those that are None. Raises ValueError for a glob that matches nothing."""
    if callable(mask):
        return [p is not None and bool(mask(path, p)) for path, p in zip(paths, leaves)]
    globs = ("*",) if mask is None else (mask,) if isinstance(mask, str) else tuple(mask)
    check_globs(f"{name}: decay", globs, paths)
    return [p is not None and any(matches(path, g) for g in globs) for path, p in zip(paths, leaves)]


def check_globs(what: str, globs: Sequence[str], paths: Sequence[str]) -> None:
    """Every glob but "*" must match a path."""
    for g in globs:
        if g != "*" and not any(matches(path, g) for path in paths):
            raise ValueError(f"{what}: '{g}' matches no parameter. The parameters are: {five(paths) or 'none'}.")
