"""Random functions under shard_map, what they mean in NumPy, and how they are written with this library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import vescale_fn as vf
from vescale_fn.sharding.mesh import Mesh, MeshShape

Axes = tuple[str, ...]
Cut = tuple[int, Axes]  # of a dim: how many leading pieces are not cut, and the axes that cut each, major to minor
Where = tuple[Cut, ...]
Step = tuple[str, Axes, int]
MESHES = [{"x": 1}, {"x": 1, "y": 1}, {"x": 1, "y": 2}, {"x": 2, "y": 2}, {"x": 2, "y": 4}, {"x": 4, "y": 2}]
SHAPES = [s for n in (1, 2, 3) for s in itertools.permutations((1, 2, 3), n)]

# ---- the reference: NumPy alone, all ranks one after the other


def index(sizes: dict[str, int], axes: Axes, at: dict[str, int]) -> int:
    return int(np.ravel_multi_index([at[a] for a in axes], [sizes[a] for a in axes])) if axes else 0


def block(x: np.ndarray[Any, Any], where: Where, sizes: dict[str, int], at: dict[str, int]) -> Any:
    """The view of a global array that the rank at some coordinates holds, each dim as (pieces, rest)."""
    split = [(pre, math.prod(sizes[a] for a in axes), -1) for pre, axes in where]
    full = [(p, n, s // p // n) for (p, n, _), s in zip(split, x.shape)]
    view = x.reshape([i for dim in full for i in dim])
    return view[tuple(i for _, axes in where for i in (slice(None), index(sizes, axes, at), slice(None)))]


def reference(sizes: dict[str, int], regions: Sequence[Region], x: Any, ws: Sequence[Any]) -> Any:
    """What regions make of x one after the other, and of a weight for each step "dot"."""
    ranks = [dict(zip(sizes, c)) for c in np.ndindex(*sizes.values())]
    rest = iter(ws)
    for region in regions:
        held = [block(x, region.enters, sizes, at).reshape(region.shape) for at in ranks]
        for step in region.steps:
            name, axes, k = step
            if name.startswith("dot"):
                w, where, shape = next(rest), region.weights[step][0], region.weights[step][1]
                held = [v @ block(w, where, sizes, at).reshape(shape) for v, at in zip(held, ranks)]
                continue
            groups: dict[Any, list[int]] = {}
            for r in sorted(range(len(ranks)), key=lambda r: index(sizes, axes, ranks[r])):
                groups.setdefault(tuple(i for a, i in ranks[r].items() if a not in axes), []).append(r)
            for members in groups.values():
                for r, v in zip(members, STEPS[name].numpy([held[r] for r in members], k)):
                    held[r] = v
        shape = [s * math.prod(sizes[a] for a in axes) for s, (_, axes) in zip(held[0].shape, region.leaves)]
        x = np.empty(shape)
        for at, v in zip(ranks, held):
            into = block(x, region.leaves, sizes, at)
            into[...] = v.reshape(into.shape)
    return x


# ---- steps


@dataclass(frozen=True)
class Move:
    """torch: (x, axes, k) -> y. numpy: (values of a group, k) -> those after. after: the state along the axes, "" for
    what it was. grows: whether dim k becomes a group longer (1) or shorter (-1; -2: and dim 0 longer). states: what x
    may be in."""

    torch: Callable[[Tensor, Axes, int], Tensor]
    numpy: Callable[[list[Any], int], list[Any]]
    after: str = ""
    grows: int = 0
    states: str = "VIR"
    collectives: int = 1


def _sum(vs: list[Any], k: int) -> list[Any]:
    return [sum(vs)] * len(vs)


def _pieces(vs: list[Any], k: int) -> list[Any]:
    return list(np.split(sum(vs), len(vs), k))


def _joined(vs: list[Any], k: int) -> list[Any]:
    return [np.concatenate(vs, k)] * len(vs)


def _each(fn: Callable[[Any], Any]) -> Callable[[list[Any], int], list[Any]]:
    return lambda vs, k: [fn(v) for v in vs]


def _unreduced(x: Tensor, axes: Axes) -> Tensor:
    return -2 * vf.pcast(x, axes, to="unreduced") / 4  # type: ignore[no-any-return]


def _inner_sum(x: Tensor, axes: Axes) -> Tensor:
    """In a region of its own, over axes that are not manual yet."""

    def inner(t: Tensor) -> Tensor:
        return vf.psum(t.sin() * (1 + vf.axis_index(axes)), axes)  # type: ignore[no-any-return]

    return vf.shard_map(inner, in_specs="...", out_specs="...", axis_names=axes)(x)  # type: ignore[no-any-return]


def _gather(to: str) -> Callable[[Tensor, Axes, int], Tensor]:
    return lambda x, axes, k: vf.all_gather(x, axes, k, tiled=True, to=to)


STEPS: dict[str, Move] = {
    "sin": Move(lambda x, _, k: x.sin(), _each(np.sin), collectives=0),
    "square": Move(lambda x, _, k: x * x, _each(lambda v: v * v), collectives=0),
    "scale": Move(lambda x, _, k: 1 - x / 2, _each(lambda v: 1 - v / 2), collectives=0),
    "flip": Move(lambda x, _, k: x.flip(k), lambda vs, k: [np.flip(v, k) for v in vs], collectives=0),
    "constant": Move(lambda x, _, k: x + torch.ones_like(x), _each(lambda v: v + 1), collectives=0),
    "axis_index": Move(
        lambda x, axes, k: x * (1 + vf.axis_index(axes)),
        lambda vs, k: [v * (1 + i) for i, v in enumerate(vs)],
        "V",
        collectives=0,
    ),
    "cast": Move(lambda x, axes, k: vf.pcast(x, axes, to="varying"), _each(lambda v: v), "V", 0, "VIR", 0),
    "reduced": Move(lambda x, axes, k: vf.pcast(x, axes, to="reduced"), _each(lambda v: v), "R", 0, "I", 0),
    "psum": Move(lambda x, axes, k: vf.psum(x, axes), _sum, "I"),
    "pmean": Move(lambda x, axes, k: vf.pmean(x, axes), lambda vs, k: [sum(vs) / len(vs)] * len(vs), "I"),
    "psum_scatter": Move(lambda x, axes, k: vf.psum_scatter(x, axes, k, tiled=True), _pieces, "V", -1),
    "all_gather": Move(_gather("varying"), _joined, "V", 1),
    "all_gather to invarying": Move(_gather("invarying"), _joined, "I", 1),
    "all_gather to reduced": Move(_gather("reduced"), _joined, "R", 1),
    "all_to_all": Move(
        lambda x, axes, k: vf.all_to_all(x, axes, k, 0, tiled=True),
        lambda vs, k: [np.concatenate(row, 0) for row in zip(*(np.split(v, len(vs), k) for v in vs))],
        "V",
        -2,
    ),
    "ppermute": Move(lambda x, axes, k: vf.ppermute(x, axes, shift=1 + k), lambda vs, k: _rolled(vs, 1 + k), "V"),
    "pbroadcast": Move(lambda x, axes, k: vf.pbroadcast(x, axes, 0), lambda vs, k: [vs[0]] * len(vs), "V"),
    "sum of parts": Move(
        lambda x, axes, k: vf.psum(_unreduced(x, axes), axes), lambda vs, k: [-sum(vs) / 2] * len(vs), "I", 0, "V"
    ),
    "pieces of parts": Move(
        lambda x, axes, k: vf.psum_scatter(_unreduced(x, axes), axes, k, tiled=True),
        lambda vs, k: [-v / 2 for v in _pieces(vs, k)],
        "V",
        -1,
        "V",
    ),
    "one keeps": Move(
        lambda x, axes, k: vf.psum(_unreduced(x, axes), axes), lambda vs, k: [-v / 2 for v in vs], "I", 0, "I"
    ),
    "nested": Move(
        lambda x, axes, k: _inner_sum(x, axes),
        lambda vs, k: [sum((1 + i) * np.sin(v) for i, v in enumerate(vs))] * len(vs),
    ),
}


def _rolled(vs: list[Any], shift: int) -> list[Any]:
    n = len(vs)
    return [vs[(i - shift) % n] for i in range(n)]


# ---- programs


@dataclass(frozen=True)
class Region:
    """One call of shard_map. shape: what a rank sees of the argument. weights: of each step "dot", its placement, local
    shape, and the axes along which it is reduced."""

    names: Axes
    enters: Where
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    leaves: Where
    weights: dict[Step, tuple[Where, tuple[int, ...], Axes]] = field(default_factory=dict)

    def spec(self, where: Where) -> str:
        return " ".join(map(_dim_text, range(len(where)), where))


def _dim_text(i: int, cut: Cut) -> str:
    pre, axes = cut
    over = f"/({' '.join(axes)})" if len(axes) > 1 else f"/{axes[0]}" if axes else ""
    return f"(p{i}={pre} d{i}{over})" if pre > 1 else f"d{i}{over}"


@dataclass(frozen=True)
class Program:
    sizes: dict[str, int]
    regions: tuple[Region, ...]
    shape: tuple[int, ...]  # of x, global

    @property
    def mesh(self) -> Mesh:
        return Mesh(MeshShape(tuple(self.sizes), tuple(self.sizes.values())))

    def arguments(self) -> list[Tensor]:
        """x, and the weights."""
        shapes = [self.shape]
        for region in self.regions:
            for where, shape, _ in region.weights.values():
                shapes.append(tuple(s * math.prod(self.sizes[a] for a in axes) for s, (_, axes) in zip(shape, where)))
        return [torch.arange(1.0, math.prod(s) + 1, dtype=torch.float64).reshape(s) / math.prod(s) for s in shapes]

    def reference(self, x: Tensor, *ws: Tensor) -> Tensor:
        return torch.from_numpy(reference(self.sizes, self.regions, x.numpy(), [w.numpy() for w in ws]))

    def __call__(self, x: Tensor, *ws: Tensor, checked: bool = True) -> Tensor:
        rest = iter(ws)
        for region in self.regions:
            mine = [next(rest) for _ in region.weights]
            specs = (region.spec(region.enters), *(region.spec(w) for w, _, _ in region.weights.values()))
            mapped = vf.shard_map(
                lambda x, *ws, region=region: _body(region, x, ws),
                mesh=self.mesh,
                in_specs=specs,
                out_specs=region.spec(region.leaves),
                axis_names=region.names,
                check_vma=checked,
            )
            x = mapped(x, *mine)
        return x

    @property
    def modes(self) -> list[bool]:
        """Values of check_vma for which the program means the same: a cast to unreduced needs types to be one."""
        return [True] if any(name == "one keeps" for r in self.regions for name, *_ in r.steps) else [True, False]

    @property
    def collectives(self) -> int:
        """How many move something."""
        moves = [(STEPS[n].collectives, axes) for r in self.regions for n, axes, _ in r.steps if n in STEPS]
        return sum(count for count, axes in moves if math.prod(self.sizes[a] for a in axes) > 1)


def _body(region: Region, x: Tensor, ws: Sequence[Tensor]) -> Tensor:
    rest = iter(ws)
    for step in region.steps:
        name, axes, k = step
        if name.startswith("dot"):
            w, reduced = next(rest), region.weights[step][2]
            x = x @ (vf.pcast(w, reduced, to="reduced") if reduced else w)
        else:
            x = STEPS[name].torch(x, axes, k)
    return x


@st.composite
def programs(draw: Any) -> Program:
    sizes = draw(st.sampled_from(MESHES))
    shape = draw(st.sampled_from(SHAPES))
    first: tuple[int, ...] = ()
    regions: list[Region] = []
    for number in range(draw(st.sampled_from([1, 1, 1, 2]))):
        names = tuple(a for a in sizes if draw(st.integers(0, 4)) > 0) or tuple(sizes)[:1]
        if number == 0:
            enters = _where(draw, names, shape)
            first = tuple(s * math.prod(sizes[a] for a in axes) for s, (_, axes) in zip(shape, enters))
        else:
            enters = _dividing(draw, names, shape, sizes)
            shape = tuple(s // math.prod(sizes[a] for a in axes) for s, (_, axes) in zip(shape, enters))
        region, shape = _region(draw, sizes, names, enters, shape)
        regions.append(region)
    return Program(sizes, tuple(regions), first)


def _region(draw: Any, sizes: dict[str, int], names: Axes, enters: Where, local: tuple[int, ...]) -> Any:
    states = {a: "V" if any(a in axes for _, axes in enters) else "I" for a in names}
    others = tuple(a for a in sizes if a not in names)
    shape, steps, weights = list(local), list[Step](), dict[Step, Any]()
    for number in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from([*STEPS, "dot", "dot"]))
        k = draw(st.integers(0, len(shape) - 1))
        axes = tuple(draw(st.permutations(names)))[: draw(st.integers(1, len(names)))]
        n = math.prod(sizes[a] for a in axes)
        if name == "dot":
            step = (f"dot {number}", (), 0)
            w = (shape[-1], draw(st.integers(1, 3)))
            where = _where(draw, names, w)
            cut = {a for _, axes in where for a in axes}
            reduced = tuple(a for a in names if a not in cut and draw(st.booleans()))
            given = {a: "V" if a in cut else "R" if a in reduced else "I" for a in names}
            if any(s == "R" and states[a] != "V" for a, s in given.items()):
                reduced, given = (), {a: "V" if a in cut else "I" for a in names}
            states = {a: max(states[a], given[a], key="IRV".index) for a in names}
            shape[-1], weights[step] = w[1], (where, w, reduced)
            steps.append(step)
            continue
        move = STEPS[name]
        if name == "nested":
            axes = others
        if (name == "nested" and not others) or {states.get(a, "I") for a in axes} - set(move.states):
            continue
        if (move.grows < 0 and shape[k] % n) or ((move.grows > 0 or move.grows == -2) and math.prod(shape) * n > 200):
            continue
        if move.grows:
            shape[k] = shape[k] * n if move.grows > 0 else shape[k] // n
            shape[0] *= n if move.grows == -2 else 1
        if move.after:
            states.update(dict.fromkeys(axes, move.after))
        steps.append((name, axes, k))
    must = [a for a in names if states[a] == "V" or draw(st.integers(0, 3)) == 0]
    leaves = _where(draw, must, tuple(shape), all_of=True)
    out = tuple(s * math.prod(sizes[a] for a in axes) for s, (_, axes) in zip(shape, leaves))
    return Region(names, enters, local, tuple(steps), leaves, weights), out


def _where(draw: Any, names: Sequence[str], shape: tuple[int, ...], all_of: bool = False) -> Where:
    """Axes over dims at random, in any order, some behind a leading factor."""
    dims: list[list[str]] = [[] for _ in shape]
    for a in draw(st.permutations(list(names))):
        if all_of or draw(st.booleans()):
            dims[draw(st.integers(0, len(shape) - 1))].append(a)
    pres = [s if axes and s > 1 and draw(st.integers(0, 2)) == 0 else 1 for s, axes in zip(shape, dims)]
    return tuple((pre, tuple(axes)) for pre, axes in zip(pres, dims))


def _dividing(draw: Any, names: Sequence[str], shape: tuple[int, ...], sizes: dict[str, int]) -> Where:
    """Axes over dims of a global shape, where they divide it."""
    dims: list[list[str]] = [[] for _ in shape]
    for a in draw(st.permutations(list(names))):
        d = draw(st.integers(0, len(shape) - 1))
        if draw(st.booleans()) and shape[d] % math.prod(sizes[b] for b in (*dims[d], a)) == 0:
            dims[d].append(a)
    return tuple((1, tuple(axes)) for axes in dims)
