"""Random meshes and specs: tuple axes, shards of factors, uneven and empty shards, units and owners, pending sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
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
    dims: list[str] = []
    while len(dims) < len(shape):
        dims += _dims(draw, shape, mesh, held, len(dims))
    entries = ", ".join(f"{kind}: {_axes(held[kind])}" for kind in pending if kind in held)
    return " ".join([*filter(None, dims)] + ([f"{{{entries}}}"] if entries else []))


def constraint_for(draw: Draw, value: torch.Tensor, mesh: Mapping[str, int]) -> str:
    """A spec for vf.reshard, which may ask for pending gradients too."""
    return spec_for(draw, tuple(value.shape), mesh, pending_of(value.dtype))


def pending_of(dtype: torch.dtype) -> tuple[str, ...]:
    """What a constraint on values of this dtype may leave pending."""
    return () if dtype is torch.bool else ("sum", "ct") if dtype.is_floating_point else ("sum",)


def _axes(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else f"({' '.join(axes)})"


def _dims(
    draw: Draw, shape: Sequence[int], mesh: Mapping[str, int], held: Mapping[Any, list[str]], d: int
) -> list[str]:
    """Dim d; with those that follow it where one axis cuts them together, in units ("" for all but the last)."""
    axes, name = held.get(d, []), "abcdefg"[d]
    ranks = math.prod(mesh[a] for a in axes)
    if len(axes) != 1 or not shape[d] or draw(st.integers(0, 5)):
        return [_dim(draw, name, shape[d], axes, ranks)]
    last = d
    while last + 1 < len(shape) and not held.get(last + 1) and draw(st.booleans()):
        last += 1
    group = name if last == d else f"({' '.join('abcdefg'[d : last + 1])})"
    return [*[""] * (last - d), f"{group}~{_units(draw, math.prod(shape[d : last + 1]), ranks)}/{axes[0]}"]


def _units(draw: Draw, size: int, ranks: int) -> str:
    """An owner, or as many units as there are rows."""
    if not size or draw(st.integers(0, 3)) == 0:
        return f"@{draw(st.integers(0, ranks - 1))}"
    cuts = [0, *sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1))), size]
    return f"[{' '.join(str(b - a) for a, b in pairwise(cuts))}]"


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
