"""Every collective and cast of a region as a linear function of one global tensor: what tests of adjoints need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import vescale_fn as vf
from vescale_fn.sharding.mesh import Mesh, MeshShape

Axes = tuple[str, ...]
NAMED = {"V": "varying", "I": "invarying", "U": "unreduced", "R": "reduced"}
MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 3, "c": 2})


@dataclass(frozen=True)
class Place:
    """Axes of a mesh, major to minor, in any order."""

    mesh: tuple[tuple[str, int], ...]
    axes: Axes

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def n(self) -> int:
        return self.extent(self.axes)

    @property
    def others(self) -> Axes:
        return tuple(a for a in self.sizes if a not in self.axes)

    def extent(self, axes: Sequence[str]) -> int:
        out = 1
        for a in axes:
            out *= self.sizes[a]
        return out

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes.values())) + ":" + "".join(self.axes)


def places(meshes: Sequence[Mapping[str, int]] = MESHES) -> list[Place]:
    """Every ordered choice of axes of every mesh."""
    return [
        Place(tuple(mesh.items()), axes)
        for mesh in meshes
        for k in range(1, len(mesh) + 1)
        for axes in itertools.permutations(mesh, k)
    ]


# ---- moves: each takes what a rank holds, the place, a dim, and whether the dim is cut in tiles

Body = Callable[[Tensor, Place, int, bool], Tensor]


def _permuted(x: Tensor, at: Place, dim: int, tiled: bool) -> Tensor:
    if tiled:
        return vf.ppermute(x, at.axes, shift=1 + dim)  # type: ignore[no-any-return]
    chain = [((i + dim) % at.n, i) for i in range(at.n - 1)]  # one rank gets nothing
    return vf.ppermute(x, at.axes, perm=chain)  # type: ignore[no-any-return]


def _cast(to: str) -> Body:
    return lambda x, at, dim, tiled: vf.pcast(x, at.axes, to=NAMED[to])


def _gather(to: str) -> Body:
    return lambda x, at, dim, tiled: vf.all_gather(x, at.axes, dim, tiled=tiled, to=NAMED[to])


# ---- the same as patterns: dims p, q and r of what a rank holds

Layout = Callable[[str, int], str]  # (axes, dim) -> a layout


def _cut(axes: str, dim: int) -> str:
    return " ".join(f"{name}/{axes}" if i == dim % 3 else name for i, name in enumerate("pqr"))


def _next_cut(axes: str, dim: int) -> str:
    return _cut(axes, dim % 3 + 1)


def _whole(axes: str, dim: int) -> str:
    return "p q r"


def _parts(axes: str, dim: int) -> str:
    return f"p q r {{sum: {axes}}}"


def _reduced(axes: str, dim: int) -> str:
    return f"p q r {{ct: {axes}}}"


def _pattern(collective: Callable[[Tensor, str], Tensor], before: Layout, after: Layout) -> Body:
    def body(x: Tensor, at: Place, dim: int, tiled: bool) -> Tensor:
        axes = f"({' '.join(at.axes)})"
        return collective(x, f"{before(axes, dim)} -> {after(axes, dim)}")

    return body


def _product(after: Callable[[str, str, str], str]) -> Body:
    """x times a matrix, contracted over the cut dim after `dim`; after: (free dim, the other, axes) -> the result."""

    def body(x: Tensor, at: Place, dim: int, tiled: bool) -> Tensor:
        names, axes, d = "pqr", f"({' '.join(at.axes)})", dim % 3
        free, contracted, other = (names[(d + i) % 3] for i in range(3))
        w = torch.arange(1.0, 2 * x.shape[(d + 1) % 3] + 1, dtype=x.dtype).reshape(-1, 2)
        return vf.einsum(  # type: ignore[no-any-return]
            x, w, f"{_cut(axes, d + 1)}, {contracted}/{axes} s -> {after(free, other, axes)}"
        )

    return body


PATTERNS: dict[str, tuple[Body, Sequence[str]]] = {
    "psum, pattern": (_pattern(vf.psum, _parts, _whole), ("U->I", "V->I")),
    "all_gather, pattern": (_pattern(vf.all_gather, _cut, _whole), ("V->V", "I->V", "R->V")),
    "all_gather to reduced, pattern": (_pattern(vf.all_gather, _cut, _reduced), ("V->R",)),
    "psum_scatter, pattern": (_pattern(vf.psum_scatter, _parts, _cut), ("U->V", "V->V")),
    "all_to_all, pattern": (_pattern(vf.all_to_all, _next_cut, _cut), ("V->V",)),
    "reshard, psum": (_pattern(vf.reshard, _parts, _whole), ("U->I",)),
    "reshard, all_gather": (_pattern(vf.reshard, _cut, _whole), ("V->I",)),
    "reshard, all_gather to reduced": (_pattern(vf.reshard, _cut, _reduced), ("V->R",)),
    "reshard, psum_scatter": (_pattern(vf.reshard, _parts, _cut), ("U->V",)),
    "reshard, all_to_all": (_pattern(vf.reshard, _next_cut, _cut), ("V->V",)),
    "reshard, own slice": (_pattern(vf.reshard, _whole, _cut), ("I->V",)),
    "reshard, cast to unreduced": (_pattern(vf.reshard, _whole, _parts), ("I->U",)),
    "reshard, cast to reduced": (_pattern(vf.reshard, _whole, _reduced), ("I->R",)),
    "einsum, summed": (_product(lambda free, other, axes: f"{other} {free} s"), ("V->I",)),
    "einsum, scattered": (_product(lambda free, other, axes: f"{other} {free}/{axes} s"), ("V->V",)),
    "einsum, parts": (_product(lambda free, other, axes: f"{other} s {free} {{sum: {axes}}}"), ("V->U",)),
}

MOVES: dict[str, tuple[Body, Sequence[str]]] = {
    "psum": (lambda x, at, dim, tiled: vf.psum(x, at.axes), ("V->I", "U->I", "I->I", "R->I")),
    "pmean": (lambda x, at, dim, tiled: vf.pmean(x, at.axes), ("V->I", "U->I")),
    "psum_scatter": (
        lambda x, at, dim, tiled: vf.psum_scatter(x, at.axes, dim, tiled=tiled),
        ("V->V", "U->V", "I->V", "R->V"),
    ),
    "all_gather": (_gather("V"), ("V->V", "I->V", "R->V")),
    "all_gather to invarying": (_gather("I"), ("V->I", "I->I", "R->I")),
    "all_gather to reduced": (_gather("R"), ("V->R", "I->R", "R->R")),
    "all_to_all": (
        lambda x, at, dim, tiled: vf.all_to_all(x, at.axes, dim, 1 - dim if dim < 2 else 2, tiled=tiled),
        ("V->V", "I->V", "R->V"),
    ),
    "ppermute": (_permuted, ("V->V", "I->V", "R->V")),
    "pbroadcast": (lambda x, at, dim, tiled: vf.pbroadcast(x, at.axes, dim % at.n), ("V->V", "I->V", "R->V")),
    "nothing": (lambda x, at, dim, tiled: x, ("V->V", "I->I", "U->U", "R->R")),
    "cast to varying": (_cast("V"), ("I->V", "R->V")),
    "cast to invarying": (_cast("I"), ("R->I",)),
    "cast to unreduced": (_cast("U"), ("I->U", "V->U")),
    "cast to reduced": (_cast("R"), ("I->R",)),
    "axis_index": (lambda x, at, dim, tiled: x * (1.0 + vf.axis_index(at.axes)), ("V->V", "I->V", "R->V")),
    "negation, scaling, sum": (
        lambda x, at, dim, tiled: (-x * 3.0 + x / 2).sum(dim, keepdim=tiled),
        ("V->V", "I->I", "U->U", "R->R"),
    ),
    **PATTERNS,
}
ROWS = [(name, states) for name, (_, states_of) in MOVES.items() for states in states_of]
# Those that cut a dim in as many pieces as there are ranks.
SHAPED = {"psum_scatter", "all_to_all"}
SHAPED |= {n for n in PATTERNS if any(k in n for k in ("scatter", "all_to_all", "own slice"))}


@dataclass(frozen=True)
class Case:
    """A move as a function of a global tensor: the ranks' values are stacked in its first dim where they differ."""

    at: Place
    name: str
    states: str
    dim: int = 0
    tiled: bool = False
    checked: bool = True

    def spec(self, state: str) -> str:
        """How a value in this state lies outside: stacked over the axes along which it varies."""
        axes = tuple(self.at.sizes) if state in "V" else self.at.others
        rows = f"r/({' '.join(axes)})" if len(axes) > 1 else f"r/{axes[0]}" if axes else "r"
        mark = {"U": "sum", "R": "ct"}.get(state)
        names = " ".join(self.at.axes)
        return f"{rows} ..." + (f" {{{mark}: ({names})}}" if mark and self.checked else "")

    def input(self) -> Tensor:
        """Whole numbers, so that sums in any order are the same."""
        n = self.at.n
        shape = [2, 3, 2]
        if self.name in SHAPED:
            shape[self.dim] = 2 * n if self.tiled else n
        rows = self.at.extent(tuple(self.at.sizes) if self.states[0] in "VU" else self.at.others)
        return whole_numbers((rows, *shape), 0)

    def body(self, x: Tensor) -> Tensor:
        x = x[0]
        before = self.states[0]
        if before == "U":  # parts of a sum that differ on all ranks
            x = vf.pcast(x, self.at.axes, to="unreduced")
        return MOVES[self.name][0](x, self.at, self.dim, self.tiled)[None]

    def global_function(self, mesh: Mesh | None = None) -> Any:
        before, after = self.states.split("->")
        return vf.shard_map(
            self.body,
            mesh=mesh or mesh_of(self.at.sizes),
            in_specs=self.spec("V" if before == "U" else before),
            out_specs=self.spec(after),
            check_vma=self.checked,
        )

    def __str__(self) -> str:
        said = f"{self.at}-{self.name}-{self.states}-{self.dim}"
        return said + "-tiled" * self.tiled + "-unchecked" * (not self.checked)


def mesh_of(sizes: Mapping[str, int]) -> Mesh:
    return Mesh(MeshShape(tuple(sizes), tuple(sizes.values())))


def whole_numbers(shape: Sequence[int], seed: int) -> Tensor:
    """Small whole numbers in float64."""
    return torch.randint(-4, 5, tuple(shape), generator=torch.Generator().manual_seed(seed)).double()
