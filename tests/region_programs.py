"""Random functions under shard_map: how they are written with this library, and what they send."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from region_reference import reference
from torch import Tensor

import vescale_fn as vf
from vescale_fn.sharding.mesh import Mesh, MeshShape

Axes = tuple[str, ...]
Cut = tuple[int, Axes]  # of a dim: how many leading pieces are not cut, and the axes that cut each, major to minor
Values = list[Any]  # what the ranks of a group hold
MESHES: list[dict[str, int]] = [
    *({"x": 1}, {"x": 3}, {"x": 1, "y": 1}, {"x": 1, "y": 2}, {"x": 2, "y": 2}, {"x": 2, "y": 3}),
    *({"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 3, "z": 2}),
]
SHAPES = [s for n in (1, 2, 3) for s in itertools.permutations((1, 2, 3), n)]

# ---- steps


@dataclass(frozen=True)
class Move:
    """torch: (x, axes, k) -> y. numpy: (values of a group, k) -> those after. states: what x may be in along the axes.
    after: the state then, "" for what it was. grows: whether dim k becomes a group longer (1) or shorter (-1; -2: and
    dim 0 longer). linear: whether parts of a sum, along other axes, pass. sends: its collective, and that of its
    transpose, on a varying operand."""

    torch: Callable[[Tensor, Axes, int], Tensor]
    numpy: Callable[[Values, int], Values]
    states: str = "VIR"
    after: str = ""
    grows: int = 0
    linear: bool = True
    sends: tuple[str, str] = ("", "")
    smooth: bool = True


def _sum(vs: Values, k: int) -> Values:
    return [sum(vs)] * len(vs)


def _pieces(vs: Values, k: int) -> Values:
    return list(np.split(sum(vs), len(vs), k))


def _joined(vs: Values, k: int) -> Values:
    return [np.concatenate(vs, k)] * len(vs)


def _each(fn: Callable[[Any], Any]) -> Callable[[Values, int], Values]:
    return lambda vs, k: [fn(v) for v in vs]


def _rolled(vs: Values, shift: int) -> Values:
    return [vs[(i - shift) % len(vs)] for i in range(len(vs))]


def _same(v: Any) -> Any:
    return v


def _inner_sum(x: Tensor, axes: Axes) -> Tensor:
    """In a region of its own, over axes that are not manual yet."""

    def inner(t: Tensor) -> Tensor:
        return vf.psum(t.sin() * (1 + vf.axis_index(axes)), axes)  # type: ignore[no-any-return]

    return vf.shard_map(inner, in_specs="...", out_specs="...", axis_names=axes)(x)  # type: ignore[no-any-return]


def _gather(to: str) -> Callable[[Tensor, Axes, int], Tensor]:
    return lambda x, axes, k: vf.all_gather(x, axes, k, tiled=True, to=to)


def _cast(*to: str) -> Callable[[Tensor, Axes, int], Tensor]:
    def cast(x: Tensor, axes: Axes, k: int) -> Tensor:
        for state in to:
            x = vf.pcast(x, axes, to=state)
        return x

    return cast


def _to_next(n: int) -> list[tuple[int, int]]:
    """Everyone to the next, but the last: the first gets nothing."""
    return [(i, i + 1) for i in range(n - 1)]


ELEMENTWISE: dict[str, Move] = {
    "sin": Move(lambda x, _, k: x.sin(), _each(np.sin), linear=False),
    "square": Move(lambda x, _, k: x * x, _each(lambda v: v * v), linear=False),
    "offset": Move(lambda x, _, k: 1 - x / 2, _each(lambda v: 1 - v / 2), linear=False),
    "constant": Move(lambda x, _, k: x + torch.ones_like(x), _each(lambda v: v + 1), linear=False),
    "flip": Move(lambda x, _, k: x.flip(k), lambda vs, k: [np.flip(v, k) for v in vs]),
    "scale": Move(lambda x, _, k: -3 * x / 2 + x, _each(lambda v: -v / 2)),
    "sum": Move(lambda x, _, k: x + x.sum(k, keepdim=True), lambda vs, k: [v + v.sum(k, keepdims=True) for v in vs]),
}
COLLECTIVES: dict[str, Move] = {
    "psum": Move(lambda x, axes, k: vf.psum(x, axes), _sum, "VIRU", "I", sends=("all_reduce", "")),
    "pmean": Move(
        lambda x, axes, k: vf.pmean(x, axes),
        lambda vs, k: [sum(vs) / len(vs)] * len(vs),
        *("VIRU", "I"),
        sends=("all_reduce", ""),
    ),
    "pmax": Move(
        lambda x, axes, k: x - vf.pmax(x.detach(), axes),
        lambda vs, k: [v - np.max(vs, 0) for v in vs],
        linear=False,
        sends=("all_reduce", "none"),
        smooth=False,
    ),
    "psum_scatter": Move(
        lambda x, axes, k: vf.psum_scatter(x, axes, k, tiled=True),
        _pieces,
        *("VIRU", "V", -1),
        sends=("reduce_scatter", "all_gather"),
    ),
    "all_gather": Move(_gather("varying"), _joined, "VIR", "V", 1, sends=("all_gather", "reduce_scatter")),
    "all_gather, stacked": Move(
        lambda x, axes, k: vf.all_gather(x, axes, k).flatten(k, k + 1),
        _joined,
        *("VIR", "V", 1),
        sends=("all_gather", "reduce_scatter"),
    ),
    "all_gather to invarying": Move(_gather("invarying"), _joined, "VIR", "I", 1, sends=("all_gather", "")),
    "all_gather to reduced": Move(_gather("reduced"), _joined, "VIR", "R", 1, sends=("all_gather", "reduce_scatter")),
    "all_to_all": Move(
        lambda x, axes, k: vf.all_to_all(x, axes, k, 0, tiled=True),
        lambda vs, k: [np.concatenate(row, 0) for row in zip(*(np.split(v, len(vs), k) for v in vs))],
        *("VIR", "V", -2),
        sends=("all_to_all", "all_to_all"),
    ),
    "ppermute": Move(
        lambda x, axes, k: vf.ppermute(x, axes, shift=1 + k),
        lambda vs, k: _rolled(vs, 1 + k),
        *("VIR", "V"),
        sends=("ppermute", "ppermute"),
    ),
    "ppermute to the next": Move(
        lambda x, axes, k: vf.ppermute(x, axes, _to_next(vf.axis_size(axes))),
        lambda vs, k: [0 * vs[0], *vs[:-1]],
        *("VIR", "V"),
        sends=("ppermute", "ppermute"),
    ),
    "pbroadcast": Move(
        lambda x, axes, k: vf.pbroadcast(x, axes, k % vf.axis_size(axes)),
        lambda vs, k: [vs[k % len(vs)]] * len(vs),
        *("VIR", "V"),
        sends=("broadcast", "all_reduce"),
    ),
    "axis_index": Move(
        lambda x, axes, k: x * (1 + vf.axis_index(axes)),
        lambda vs, k: [v * (1 + i) for i, v in enumerate(vs)],
        *("VIR", "V"),
        linear=False,
    ),
    "nested": Move(
        lambda x, axes, k: _inner_sum(x, axes),
        lambda vs, k: [sum((1 + i) * np.sin(v) for i, v in enumerate(vs))] * len(vs),
        linear=False,
        sends=("all_reduce", "all_reduce"),
    ),
}
CASTS: dict[str, Move] = {
    "to varying": Move(_cast("varying"), _each(_same), "VIR", "V"),
    "to reduced": Move(_cast("reduced"), _each(_same), "I", "R", sends=("", "all_reduce")),
    "reduced and back": Move(_cast("reduced", "invarying"), _each(_same), "I", "I", sends=("", "all_reduce")),
    "to parts": Move(_cast("unreduced"), _each(_same), "V", "U"),
    "one keeps": Move(
        _cast("unreduced"), lambda vs, k: [v * (i == 0) for i, v in enumerate(vs)], "I", "U", sends=("", "")
    ),
}
STEPS = {**ELEMENTWISE, **COLLECTIVES, **CASTS}

# ---- programs


@dataclass(frozen=True)
class Edge:
    """How a value crosses the edge of a region: what cuts each dim, along which axes it is a sum, and reduced."""

    where: tuple[Cut, ...]
    sums: Axes = ()
    reduced: Axes = ()

    @property
    def cut(self) -> Axes:
        return tuple(a for _, axes in self.where for a in axes)

    def states(self, names: Sequence[str]) -> dict[str, str]:
        return {
            a: "V" if a in self.cut else "U" if a in self.sums else "R" if a in self.reduced else "I" for a in names
        }

    def spec(self, others: Axes = ()) -> str:
        """others: axes that cut, unevenly, the first dims that are whole."""
        free = iter(others)
        return " ".join(_dim_text(i, cut, free) for i, cut in enumerate(self.where))

    @property
    def text(self) -> str:
        """The spec with its states."""
        found = [f"{kind}: ({' '.join(axes)})" for kind, axes in (("sum", self.sums), ("ct", self.reduced)) if axes]
        return self.spec() + (f" {{{', '.join(found)}}}" if found else "")

    def outside(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The global shape of which a rank holds `shape`."""
        return tuple(s * extent(sizes, axes) for s, (_, axes) in zip(shape, self.where))


def _dim_text(i: int, cut: Cut, others: Iterator[str]) -> str:
    pre, axes = cut
    other = next(others, "") if not axes else ""
    if other:
        return f"d{i}~/{other}"
    over = f"/({' '.join(axes)})" if len(axes) > 1 else f"/{axes[0]}" if axes else ""
    return f"(p{i}={pre} d{i}{over})" if pre > 1 else f"d{i}{over}"


def extent(sizes: Mapping[str, int], axes: Axes) -> int:
    return math.prod(sizes[a] for a in axes)


@dataclass(frozen=True)
class Weight:
    """The right operand of a product. shape: what a rank sees. cast: axes along which the body casts it to reduced.
    closed: whether the body closes over it."""

    edge: Edge
    shape: tuple[int, ...]
    cast: Axes
    closed: bool

    def states(self, names: Sequence[str]) -> dict[str, str]:
        return {**self.edge.states(names), **dict.fromkeys(self.cast, "R")}


@dataclass(frozen=True)
class Step:
    """before: the states of x along the axes of the region."""

    name: str
    axes: Axes
    k: int
    before: dict[str, str]
    weight: Weight | None = None

    @property
    def move(self) -> Move:
        return STEPS[self.name]

    def casts(self) -> Iterator[str]:
        """The collectives that the transposes of casts are, which nobody wrote: of x, and of the weight."""
        if self.weight is not None:
            ours, theirs = self.before, self.weight.states(tuple(self.before))
            yield from _sums_back(ours, theirs)
            yield from _sums_back(theirs, ours)
            yield from ["all_reduce"] * bool(self.weight.cast)
        elif self.move.after == "V" or self.name in ("psum", "pmean") or self.name.startswith("all_gather"):
            wanted = dict.fromkeys(self.axes, "V")
            yield from _sums_back({a: self.before[a] for a in self.axes}, wanted)


def _sums_back(states: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """An invarying value is cast once to each of the states that others are in, along other axes than it is."""
    return ["all_reduce"] * len({t for a, s in states.items() if s == "I" and (t := others[a]) in "RV"})


@dataclass(frozen=True)
class Region:
    """One call of shard_map. shape: what a rank sees of the argument. last: the states of the result in it."""

    names: Axes
    enters: Edge
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    leaves: Edge
    last: dict[str, str]

    @property
    def weights(self) -> list[Weight]:
        return [s.weight for s in self.steps if s.weight is not None]

    def body(self, x: Tensor, given: Sequence[Tensor], closed: Sequence[Tensor]) -> Tensor:
        rest = {False: iter(given), True: iter(closed)}
        for step in self.steps:
            if step.weight is None:
                x = step.move.torch(x, step.axes, step.k)
            else:
                w, cast = next(rest[step.weight.closed]), step.weight.cast
                x = x @ (vf.pcast(w, cast, to="reduced") if cast else w)
        return x


@dataclass(frozen=True)
class Program:
    """shape: of x, global. uneven: whether arguments lie in unequal parts along the axes of no region."""

    sizes: dict[str, int]
    regions: tuple[Region, ...]
    shape: tuple[int, ...]
    uneven: bool

    @property
    def mesh(self) -> Mesh:
        return Mesh(MeshShape(tuple(self.sizes), tuple(self.sizes.values())))

    @property
    def edges(self) -> list[Edge]:
        """Where the arguments come from."""
        return [self.regions[0].enters, *(w.edge for r in self.regions for w in r.weights)]

    @property
    def whole(self) -> Axes:
        """Axes of the solver, in every region."""
        return tuple(a for a in self.sizes if not any(a in r.names for r in self.regions))

    def arguments(self) -> list[Tensor]:
        """x, and the weights."""
        shapes = [self.shape, *(w.edge.outside(w.shape, self.sizes) for r in self.regions for w in r.weights)]
        return [torch.arange(1.0, math.prod(s) + 1, dtype=torch.float64).reshape(s) / math.prod(s) for s in shapes]

    def reference(self, x: Tensor, *ws: Tensor) -> Tensor:
        return torch.from_numpy(reference(self.sizes, self.regions, x.numpy(), [w.numpy() for w in ws]))

    def __call__(self, x: Tensor, *ws: Tensor, checked: bool = True) -> Tensor:
        rest = iter(ws)
        for region in self.regions:
            mine = [(w, next(rest)) for w in region.weights]
            closed = [t for w, t in mine if w.closed]
            mapped = vf.shard_map(
                lambda x, *given, region=region, closed=closed: region.body(x, given, closed),
                mesh=self.mesh,
                in_specs=(region.enters.text, *(w.edge.text for w, _ in mine if not w.closed)),
                out_specs=region.leaves.text,
                axis_names=region.names,
                check_vma=checked,
            )
            x = mapped(x, *(t for w, t in mine if not w.closed))
        return x

    @property
    def modes(self) -> list[bool]:
        """Values of check_vma for which the program means the same: a cast to unreduced needs types to be one."""
        return [True] if any(s.name == "one keeps" for r in self.regions for s in r.steps) else [True, False]

    @property
    def smooth(self) -> bool:
        return all(s.weight or s.move.smooth for r in self.regions for s in r.steps)

    @property
    def sends(self) -> Counter[tuple[str, str]]:
        """The collectives that the table of transposes says, (kind, phase), for the value and all gradients."""
        found: Counter[tuple[str, str]] = Counter()
        for region in self.regions:
            for step in region.steps:
                forward, backward = step.move.sends if step.weight is None else ("", "")
                found.update([(forward, "forward"), (backward, "backward")])
                found.update((kind, "backward") for kind in step.casts())
            after = region.leaves.states(region.names)
            found.update((kind, "backward") for kind in _sums_back(region.last, after))
        return Counter({k: n for k, n in found.items() if k[0] not in ("", "none")})

    @property
    def moving(self) -> int:
        """How many collectives that were written have more than one rank."""
        steps = [s for r in self.regions for s in r.steps if s.weight is None and s.move.sends[0]]
        return sum(extent(self.sizes, s.axes) > 1 for s in steps)


# ---- drawn at random


@st.composite
def programs(draw: Any) -> Program:
    sizes = draw(st.sampled_from(MESHES))
    shape = draw(st.sampled_from(SHAPES))
    first: tuple[int, ...] = ()
    regions: list[Region] = []
    for number in range(draw(st.sampled_from([1, 1, 1, 2]))):
        names = tuple(a for a in sizes if draw(st.integers(0, 4)) > 0) or tuple(sizes)[:1]
        if number == 0:
            enters = _pending(draw, names, _where(draw, names, shape))
            first = enters.outside(shape, sizes)
        else:
            enters = _pending(draw, names, _dividing(draw, names, shape, sizes))
            shape = tuple(s // extent(sizes, axes) for s, (_, axes) in zip(shape, enters.where))
        region, shape = _region(draw, sizes, names, enters, shape)
        regions.append(region)
    return Program(sizes, tuple(regions), first, draw(st.integers(0, 3)) > 0)


def _region(draw: Any, sizes: dict[str, int], names: Axes, enters: Edge, local: tuple[int, ...]) -> Any:
    states, shape, steps = enters.states(names), list(local), list[Step]()
    others = tuple(a for a in sizes if a not in names)
    for _ in range(draw(st.integers(0, 5))):
        along = tuple(draw(st.permutations(names)))[: draw(st.integers(1, len(names)))]
        k = draw(st.integers(0, len(shape) - 1))
        every = [Step(name, others if name == "nested" else along, k, dict(states)) for name in STEPS]
        step = draw(st.sampled_from([s for s in every if _fits(s, shape, extent(sizes, s.axes))] + [None] * 4))
        if step is None:
            weight = _weight(draw, states, (shape[-1], draw(st.integers(1, 3))))
            given, shape[-1] = weight.states(names), weight.shape[1]
            steps.append(Step("dot", (), 0, dict(states), weight))
            states = {a: max(s, given[a], key="IRVU".index) for a, s in states.items()}
        else:
            _grow(shape, step, extent(sizes, step.axes))
            states.update(dict.fromkeys(step.axes, step.move.after) if step.move.after else {})
            steps.append(step)
    leaves = _leaves(draw, states, tuple(shape))
    return Region(names, enters, local, tuple(steps), leaves, states), leaves.outside(tuple(shape), sizes)


def _fits(step: Step, shape: Sequence[int], n: int) -> bool:
    """Whether a step may come here: states, divisibility, and room."""
    move, found = step.move, {step.before.get(a, "I") for a in step.axes}
    if step.name in ELEMENTWISE:
        return move.linear or "U" not in step.before.values()
    if not step.axes or found - set(move.states) or ("U" in found and len(found) > 1):
        return False
    if not move.linear and "U" in step.before.values():
        return False
    room = math.prod(shape) * n <= 200 or move.grows in (0, -1)
    return room and (move.grows >= 0 or shape[step.k] % n == 0)


def _grow(shape: list[int], step: Step, n: int) -> None:
    k, grows = step.k, step.move.grows
    if grows:
        shape[k] = shape[k] * n if grows > 0 else shape[k] // n
        shape[0] *= n if grows == -2 else 1


def _weight(draw: Any, states: Mapping[str, str], shape: tuple[int, int]) -> Weight:
    """Along an axis over which x is parts of a sum, it must be reduced."""
    must = [a for a, s in states.items() if s == "U"]
    where = _where(draw, [a for a in states if a not in must], shape)
    cut = [a for _, axes in where for a in axes]
    reduced = [a for a in states if a in must or (a not in cut and draw(st.booleans()))]
    cast = [a for a in reduced if draw(st.booleans())]
    edge = Edge(where, (), tuple(a for a in reduced if a not in cast))
    return Weight(edge, shape, tuple(cast), not cut and not edge.reduced and draw(st.booleans()))


def _leaves(draw: Any, states: Mapping[str, str], shape: tuple[int, ...]) -> Edge:
    must = [a for a, s in states.items() if s == "V" or (s in "IR" and draw(st.integers(0, 3)) == 0)]
    where = _where(draw, must, shape, all_of=True)
    reduced = tuple(a for a, s in states.items() if s in "IR" and a not in must and draw(st.integers(0, 3)) == 0)
    return Edge(where, tuple(a for a, s in states.items() if s == "U"), reduced)


def _pending(draw: Any, names: Axes, where: tuple[Cut, ...]) -> Edge:
    """Some of the axes that cut nothing: a sum that enters in parts, and a reduced value."""
    cut = [a for _, axes in where for a in axes]
    kind = {a: draw(st.sampled_from(["", "", "", "sum", "ct"])) for a in names if a not in cut}
    sums, reduced = (tuple(a for a, k in kind.items() if k == wanted) for wanted in ("sum", "ct"))
    return Edge(where, sums, reduced)


def _where(draw: Any, names: Sequence[str], shape: tuple[int, ...], all_of: bool = False) -> tuple[Cut, ...]:
    """Axes over dims at random, in any order, some behind a leading factor."""
    dims: list[list[str]] = [[] for _ in shape]
    for a in draw(st.permutations(list(names))):
        if all_of or draw(st.booleans()):
            dims[draw(st.integers(0, len(shape) - 1))].append(a)
    pres = [s if axes and s > 1 and draw(st.integers(0, 2)) == 0 else 1 for s, axes in zip(shape, dims)]
    return tuple((pre, tuple(axes)) for pre, axes in zip(pres, dims))


def _dividing(draw: Any, names: Sequence[str], shape: tuple[int, ...], sizes: dict[str, int]) -> tuple[Cut, ...]:
    """Axes over dims of a global shape, where they divide it."""
    dims: list[list[str]] = [[] for _ in shape]
    for a in draw(st.permutations(list(names))):
        d = draw(st.integers(0, len(shape) - 1))
        if draw(st.booleans()) and shape[d] % extent(sizes, (*dims[d], a)) == 0:
            dims[d].append(a)
    return tuple((1, tuple(axes)) for axes in dims)
