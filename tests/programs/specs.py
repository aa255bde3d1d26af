"""Random meshes and specs: tuple axes, shards of factors, uneven and empty shards, pending sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]


def mesh_for(draw: Draw) -> dict[str, int]:
    """Up to 3 axes of sizes 1 to 3."""
    return {a: draw(st.sampled_from([2, 3, 2, 1])) for a in ("x", "y", "z")[: draw(st.sampled_from([2, 1, 2, 3]))]}


def spec_for(draw: Draw, shape: Sequence[int], mesh: Mapping[str, int], pending: Sequence[str] = ("sum",)) -> str:
    """A spec that fits the shape: each axis shards a dim, or holds one of the pending kinds, or nothing."""
    places = [None, *range(len(shape)), *range(len(shape)), *pending]
    held: dict[Any, list[str]] = {}
    for axis in draw(st.permutations(list(mesh))):
        held.setdefault(draw(st.sampled_from(places)), []).append(axis)
    dims = [
        _dim(draw, "abcdefg"[d], n, axes, math.prod(mesh[a] for a in axes))
        for d, n in enumerate(shape)
        for axes in [held.get(d, [])]
    ]
    entries = ", ".join(f"{kind}: {_axes(held[kind])}" for kind in pending if kind in held)
    return " ".join(dims + ([f"{{{entries}}}"] if entries else []))


def constraint_for(draw: Draw, value: torch.Tensor, mesh: Mapping[str, int]) -> str:
    """A spec for vf.reshard, which may ask for pending gradients too."""
    return spec_for(draw, tuple(value.shape), mesh, pending_of(value.dtype))


def pending_of(dtype: torch.dtype) -> tuple[str, ...]:
    """What a constraint on values of this dtype may leave pending."""
    return () if dtype is torch.bool else ("sum", "ct") if dtype.is_floating_point else ("sum",)


def _axes(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else f"({' '.join(axes)})"


def _dim(draw: Draw, name: str, n: int, axes: Sequence[str], ranks: int) -> str:
    if not axes:
        return name
    over = _axes(axes)
    if n % ranks:
        return f"{name}~/{over}"
    factors = [f for f in (2, 3) if n > f and n % (f * ranks) == 0]
    if factors and draw(st.booleans()):
        return f"({name}={factors[0]} {name}1/{over})"
    return f"{name}/{over}"
