"""Random meshes and specs: tuple axes, shards of factors, uneven and empty shards, pending sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]


def mesh_for(draw: Draw) -> dict[str, int]:
    """Up to 3 axes of sizes 1 to 3."""
    return {a: draw(st.integers(1, 3)) for a in ("x", "y", "z")[: draw(st.integers(1, 3))]}


def spec_for(draw: Draw, shape: Sequence[int], mesh: Mapping[str, int], *, partial: bool = True) -> str:
    """A spec that fits the shape."""
    free = list(draw(st.permutations(list(mesh))))
    dims = []
    for d, n in enumerate(shape):
        take = draw(st.integers(0, min(2, len(free))))
        axes, free = free[:take], free[take:]
        dims.append(_dim(draw, "abcdefg"[d], n, axes, math.prod(mesh[a] for a in axes)))
    state = f" {{sum: {free[0]}}}" if partial and free and draw(st.integers(0, 3)) == 0 else ""
    return (" ".join(dims) + state).strip()


def _dim(draw: Draw, name: str, n: int, axes: Sequence[str], ranks: int) -> str:
    if not axes:
        return name
    over = axes[0] if len(axes) == 1 else f"({' '.join(axes)})"
    if n % ranks:
        return f"{name}~/{over}"
    factors = [f for f in (2, 3) if n > f and n % (f * ranks) == 0]
    if factors and draw(st.booleans()):
        return f"({name}={factors[0]} {name}1/{over})"
    return f"{name}/{over}"
