"""The per-rank program: local operations and explicit collectives, the same text for every rank.

A program is a `Graph` whose Vars keep their global shape; `layouts` says which part a rank holds. What differs from
rank to rank (a local extent, an owned range, a coordinate) stands in the arguments as an unbound constant and becomes
a number when the program is bound to a rank's coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vescale_fn.sharding.graph import Graph, Var
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import MeshShape


@dataclass(frozen=True)
class LocalDim:
    """Extent of `dim` on this rank. Binds to an int."""

    layout: Layout
    dim: int


@dataclass(frozen=True)
class Owned:
    """The runs of global indices of `dim` that this rank holds. Binds to ((start, stop), ...)."""

    layout: Layout
    dim: int


@dataclass(frozen=True)
class AxisIndex:
    """This rank's position along `axes` (major to minor). Binds to an int."""

    axes: tuple[str, ...]


Unbound = LocalDim | Owned | AxisIndex


def bind_constant(c: Unbound, mesh: MeshShape, coords: Mapping[str, int]) -> Any:
    """The value of an unbound constant on the rank at `coords`."""
    if isinstance(c, LocalDim):
        return c.layout.local_size(c.dim, coords)
    if isinstance(c, Owned):
        return c.layout.intervals(c.dim, coords)
    index = 0
    for axis in c.axes:
        index = index * mesh[axis] + coords[axis]
    return index


def bind(tree: Any, mesh: MeshShape, coords: Mapping[str, int]) -> Any:
    """`tree` with every unbound constant replaced by its value at `coords`."""
    if isinstance(tree, (LocalDim, Owned, AxisIndex)):
        return bind_constant(tree, mesh, coords)
    if isinstance(tree, (tuple, list)):
        return type(tree)(bind(t, mesh, coords) for t in tree)
    if isinstance(tree, dict):
        return {k: bind(v, mesh, coords) for k, v in tree.items()}
    return tree


@dataclass(frozen=True, eq=False)
class Program:
    """What one rank does. `layouts` covers every Var; equation operations are OpOverloads, functions of `local_ops`,
    our primitives, sub-programs whose body is a Graph of the same kind, or `comm` collectives."""

    mesh: MeshShape
    graph: Graph
    layouts: Mapping[Var, Layout]
    origin: Mapping[Var, Var] = field(default_factory=dict)  # local Var -> the Var of the global graph it is a part of
    donated: frozenset[int] = frozenset()  # indices of inputs whose storage may be reused
    messages: tuple[str, ...] = ()

    def local_bytes(self, v: Var) -> int:
        """Bytes of v on the rank that holds most of it."""
        return self.layouts[v].max_local_numel * int(v.dtype.itemsize)
