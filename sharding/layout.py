"""Layouts: which rank holds which part of a tensor.

A layout is one `State` per mesh axis. In the even case an axis of size n that shards a dim of size N takes one
digit of the index, in mixed radix: `Shard(dim, pre)` means

    index = (major, digit, minor)   with   major < pre,  digit < n,  minor < N / (pre * n)

and the rank with coordinate c holds the indices with digit == c. So `pre=1` is the ordinary contiguous shard,
`b/(x y)` is {x: Shard(0, 1), y: Shard(0, n_x)}, and Megatron's fused `(qkv h/tp k)` is {tp: Shard(0, 3)}.
States of different axes are independent; equal layouts compare equal; removing an axis from a layout leaves the
others as they are. A leading factor that does not divide evenly is cut like `torch.chunk`: `Shard(dim, pre,
uneven=size of that factor)`, where axes that cut the same factor nest in order of `pre`. `Ragged` names the units
of each rank. `Manual` says that every rank holds a tensor of its own. Axes of size 1 are always `Whole`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from vescale_fn.sharding.mesh import MeshShape

Kind = Literal["sum", "max", "min"]


@dataclass(frozen=True, order=True)
class Whole:
    """Every rank along the axis holds the same value."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, order=True)
class Partial:
    """The value is the sum (max, min) over the axis of what the ranks hold."""

    kind: Kind = "sum"

    def __str__(self) -> str:
        return f"partial {self.kind}"


@dataclass(frozen=True, order=True)
class Shard:
    """Each rank holds one digit of `dim`; see the module's text. `uneven`: size of the leading factor that is cut
    like torch.chunk, 0 when the division is even."""

    dim: int
    pre: int = 1
    uneven: int = 0

    def __str__(self) -> str:
        return f"shard {self.dim}" + (f" pre {self.pre}" if self.pre > 1 else "") + ("~" if self.uneven else "")


@dataclass(frozen=True, order=True)
class Ragged:
    """Rank i holds units[i] of sum(units) equal pieces of `dim` (dims dim..last flattened into one when last > dim)."""

    dim: int
    units: tuple[int, ...]
    last: int = -1

    def __str__(self) -> str:
        return f"ragged {self.dim} {list(self.units)}"


@dataclass(frozen=True, order=True)
class Manual:
    """Each rank along the axis holds a tensor of its own, of the whole shape: a value inside a `shard_map` over it."""

    def __str__(self) -> str:
        return "manual"


State = Whole | Partial | Shard | Ragged | Manual
CUTS = (Shard, Ragged)  # states in which each rank holds a part of its own
WHOLE = Whole()
MANUAL = Manual()


def cut_dims(state: State) -> frozenset[int]:
    """The dims that a state cuts: several where it merges them.

    >>> sorted(cut_dims(Ragged(1, (1, 2), last=2)))
    [1, 2]
    """
    if isinstance(state, Ragged):
        return frozenset(range(state.dim, max(state.dim, state.last) + 1))
    return frozenset((state.dim,)) if isinstance(state, Shard) else frozenset()


def chunk(size: int, n: int, index: int) -> tuple[int, int]:
    """Start and length of piece `index` when `size` rows are cut in n like torch.chunk; later pieces may be empty.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // n)
    start = min(index * step, size)
    return start, min(step, size - start)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a tensor of global `shape` live on `mesh`: one state per axis, in mesh order.

    >>> m = MeshShape(("dp", "tp"), (2, 4))
    >>> l = Layout.of(m, (8, 12), {"dp": Shard(0), "tp": Shard(1)})
    >>> l.local_shape({"dp": 0, "tp": 3})
    (4, 3)
    >>> l.with_state("tp", Partial()).partial
    (('tp', 'sum'),)
    """

    mesh: MeshShape
    shape: tuple[int, ...]
    states: tuple[State, ...]

    @staticmethod
    def of(mesh: MeshShape, shape: Sequence[int], states: Mapping[str, State] | None = None) -> Layout:
        """The layout with the given states; axes left out, and axes of size 1, are whole, and an axis that cuts an
        uneven factor into equal parts is even."""
        given = states or {}
        plain = (_plain(given.get(a, WHOLE), n) for a, n in zip(mesh.names, mesh.sizes))
        return Layout(mesh, tuple(shape), tuple(plain))

    def __getitem__(self, axis: str) -> State:
        return self.states[self.mesh.names.index(axis)]

    def with_state(self, axis: str, state: State) -> Layout:
        return Layout.of(self.mesh, self.shape, {**dict(zip(self.mesh.names, self.states)), axis: state})

    def with_states(self, states: Mapping[str, State]) -> Layout:
        return Layout.of(self.mesh, self.shape, {**dict(zip(self.mesh.names, self.states)), **states})

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def partial(self) -> tuple[tuple[str, Kind], ...]:
        """Axes with a pending reduction, and its kind."""
        return tuple((a, s.kind) for a, s in zip(self.mesh.names, self.states) if isinstance(s, Partial))

    @cached_property
    def is_whole(self) -> bool:
        """Every rank holds the whole value."""
        return all(isinstance(s, Whole) for s in self.states)

    @cached_property
    def is_local(self) -> bool:
        """What a rank holds is a whole tensor, be it the same for all or its own."""
        return all(isinstance(s, (Whole, Manual)) for s in self.states)

    @cached_property
    def is_even(self) -> bool:
        """All ranks hold parts of the same shape."""
        return not any(isinstance(s, Ragged) or (isinstance(s, Shard) and s.uneven) for s in self.states)

    def shards(self, dim: int) -> tuple[tuple[str, Shard], ...]:
        """Axes that shard `dim`, major to minor: first those that cut an uneven leading factor."""
        return self._shards.get(dim, ())

    @cached_property
    def _shards(self) -> dict[int, tuple[tuple[str, Shard], ...]]:
        found: dict[int, list[tuple[str, Shard]]] = {}
        for axis, state in zip(self.mesh.names, self.states):
            if isinstance(state, Shard):
                found.setdefault(state.dim, []).append((axis, state))
        return {dim: _major_first(shards) for dim, shards in found.items()}

    @cached_property
    def flat(self) -> Layout:
        """This layout over the dims of the local tensors, in which each group of dims that a Ragged state merges is one
        dim. Itself where nothing is merged.

        >>> m = MeshShape(("dp",), (2,))
        >>> Layout.of(m, (4, 3, 5), {"dp": Ragged(0, (1, 3), last=1)}).flat.shape
        (12, 5)
        """
        for axis, state in zip(self.mesh.names, self.states):
            if isinstance(state, Ragged) and state.last > state.dim:
                first, end = state.dim, state.last + 1
                shape = (*self.shape[:first], math.prod(self.shape[first:end]), *self.shape[end:])
                moved = {a: _moved(s, end - first - 1, end) for a, s in zip(self.mesh.names, self.states)}
                return Layout.of(self.mesh, shape, {**moved, axis: Ragged(first, state.units)}).flat
        return self

    def flat_dim(self, dim: int) -> int:
        """The dim of `flat` that holds `dim`.

        >>> m = MeshShape(("dp",), (2,))
        >>> [Layout.of(m, (4, 3, 5), {"dp": Ragged(0, (1, 3), last=1)}).flat_dim(d) for d in range(3)]
        [0, 0, 1]
        """
        merged = [s for s in self.states if isinstance(s, Ragged) and s.last > s.dim]
        return dim - sum(min(dim, s.last) - s.dim for s in merged if s.dim < dim)

    def intervals(self, dim: int, coords: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """The (start, stop) runs of global indices of `dim` that the rank at `coords` holds, in local order.

        >>> m = MeshShape(("tp",), (2,))
        >>> Layout.of(m, (12,), {"tp": Shard(0, pre=3)}).intervals(0, {"tp": 1})
        ((2, 4), (6, 8), (10, 12))
        """
        size = self.shape[dim]
        for axis, state in zip(self.mesh.names, self.states):
            if isinstance(state, Ragged) and state.dim == dim:
                unit = size // max(sum(state.units), 1)
                start = unit * sum(state.units[: coords[axis]])
                return ((start, start + unit * state.units[coords[axis]]),)
        runs = [(0, size)]
        for axis, state in self.shards(dim):
            n, c = self.mesh[axis], coords[axis]
            if state.uneven:
                unit = size // state.uneven if state.uneven else 0
                ((a, b),) = runs
                start, length = chunk((b - a) // unit, n, c) if unit else (0, 0)
                runs = [(a + start * unit, a + (start + length) * unit)]
            else:
                step = size // (state.pre * n)  # length of one digit
                runs = [r for a, b in runs for r in _digit(a, b, step, n, c)]
        return tuple(runs)

    def replicas(self) -> list[list[int]]:
        """Groups of ranks that hold the same bits: those with equal coordinates on every axis that is not whole.

        >>> Layout.of(MeshShape(("dp", "tp"), (2, 2)), (4,), {"tp": Shard(0)}).replicas()
        [[0, 2], [1, 3]]
        """
        axes = [a for a, s in zip(self.mesh.names, self.states) if not isinstance(s, Whole)]
        together: dict[tuple[int, ...], list[int]] = {}
        for rank, coords in enumerate(self.mesh.all_coords()):
            together.setdefault(tuple(coords[a] for a in axes), []).append(rank)
        return list(together.values())

    def local_size(self, dim: int, coords: Mapping[str, int]) -> int:
        """Extent of `dim` on the rank at `coords`."""
        return sum(b - a for a, b in self.intervals(dim, coords))

    def local_shape(self, coords: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the part that the rank at `coords` holds; flattened dims count as one."""
        return tuple(self.flat.local_size(d, coords) for d in range(self.flat.ndim))

    @cached_property
    def max_local_shape(self) -> tuple[int, ...]:
        """Shape of the part of the rank at the origin: with torch.chunk order no rank holds more."""
        if self.flat is not self:
            return self.flat.max_local_shape
        out = list(self.shape)
        for axis, state in zip(self.mesh.names, self.states):
            n = self.mesh[axis]
            if isinstance(state, Shard) and not state.uneven:
                out[state.dim] //= n
            elif isinstance(state, Ragged):
                out[state.dim] = out[state.dim] // max(sum(state.units), 1) * max(state.units)
        origin = dict.fromkeys(self.mesh.names, 0)
        for d in range(self.ndim):
            if any(s.uneven for _, s in self.shards(d)):
                out[d] = self.local_size(d, origin)
        return tuple(out)

    @property
    def max_local_numel(self) -> int:
        return math.prod(self.max_local_shape)

    def __str__(self) -> str:
        on = [f"{a}: {s}" for a, s in zip(self.mesh.names, self.states) if not isinstance(s, Whole)]
        return f"{list(self.shape)} {{{', '.join(on)}}}"


def _major_first(shards: Sequence[tuple[str, Shard]]) -> tuple[tuple[str, Shard], ...]:
    lead = max(s.uneven for _, s in shards)
    return tuple(sorted(shards, key=lambda p: (not p[1].uneven and p[1].pre >= lead, p[1].pre)))


def _plain(state: State, n: int) -> State:
    """The state of an axis of size n in its only spelling."""
    if n == 1:
        return WHOLE
    if isinstance(state, Shard) and state.uneven and state.uneven % (state.pre * n) == 0:
        return Shard(state.dim, state.pre)
    return state


def _moved(state: State, by: int, end: int) -> State:
    """The state of another axis after `by` dims before dim `end` were merged into their predecessor."""
    return shifted(state, -by) if isinstance(state, CUTS) and state.dim >= end else state


def shifted(state: State, by: int) -> State:
    """The state of a tensor that has `by` more dims in front.

    >>> shifted(Ragged(0, (1, 2), last=1), 1)
    Ragged(dim=1, units=(1, 2), last=2)
    """
    if isinstance(state, Ragged) and state.last > state.dim:
        return replace(state, dim=state.dim + by, last=state.last + by)
    return replace(state, dim=state.dim + by) if isinstance(state, CUTS) else state


def _digit(start: int, stop: int, step: int, n: int, c: int) -> list[tuple[int, int]]:
    """The sub-runs of [start, stop) whose digit (index // step) % n equals c; start is aligned to step * n unless
    the run is itself inside one digit of a minor position."""
    if not step:
        return []
    out = []
    block = step * n
    for base in range(start - start % block, stop, block):
        a, b = max(start, base + c * step), min(stop, base + (c + 1) * step)
        if a < b:
            out.append((a, b))
    return out
