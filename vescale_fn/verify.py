"""Where a per-rank program first departs from the plain function.

The global graph and the program run side by side, equation by equation, the program on virtual ranks; after each
equation what the ranks hold is put together by its layout and compared with the global value. Replicas must be equal
bit for bit, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn.audit import bits
from vescale_fn.engines.virtual import VirtualEngine
from vescale_fn.placement import cut
from vescale_fn.program import Program
from vescale_fn.regions.lower import OPS as REGION_OPS
from vescale_fn.regions.rank_tensor import AtOnce, RankTensor, evaluate_on_ranks
from vescale_fn.sharding.bind import spec_of
from vescale_fn.sharding.graph import Eqn, Graph, Source, Var, equations, map_vars, op_name
from vescale_fn.sharding.layout import WHOLE, Layout
from vescale_fn.sharding.mesh import Mesh, MeshShape

_ONE = MeshShape((), ())
_REDUCE: Mapping[str, Callable[..., torch.Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


@dataclass(frozen=True)
class Difference:
    """The first equation whose result is wrong. `largest`: largest absolute difference, NaN counts as infinite."""

    operation: str
    value: str
    layout: str
    ranks: str
    largest: float
    source: Source

    def __str__(self) -> str:
        where = f"{self.source}: {self.source.code}" if self.source.file else "no source line"
        return (
            f"{self.value} = {self.operation}(...) differs from the plain function by {self.largest:.3g} "
            f"on {self.ranks}, layout {self.layout} ({where})"
        )


@dataclass(frozen=True)
class Verified:
    """What `verify` found. True when nothing differs."""

    equations: int
    difference: Difference | None

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        return str(self.difference) if self.difference else f"all {self.equations} equations equal the plain function"


def verify(program: Program, graph: Graph, inputs: Sequence[Any], *, rtol: float | None = None) -> Verified:
    """Run `graph` (global) on whole `inputs` and `program` on virtual ranks, and compare every value.

    rtol: allowed difference relative to the largest magnitude of a value; by default 1e-9 in float64, 1e-4 in float32,
        2e-2 below.
    """
    mesh = Mesh(program.mesh)
    whole = _whole_values(graph, inputs, mesh)
    coords = list(program.mesh.all_coords())
    parts: dict[Var, list[Any]] = {}
    for v, x in zip(program.graph.inputs, inputs, strict=True):
        layout = program.layouts.get(v)
        parts[v] = [cut(x, layout, c) for c in coords] if layout is not None else [x] * len(coords)
    for e in program.graph.eqns:
        if not e.outs:
            continue
        columns = [parts[v] for v in e.reads]
        outs = VirtualEngine(mesh).load(_only(program, e))([list(row) for row in zip(*columns)] or [[] for _ in coords])
        parts.update(zip(e.outs, (list(column) for column in zip(*outs))))
        for v in e.outs:
            found = _compare(program, e, v, parts[v], whole, rtol)
            if found is not None:
                return Verified(len(program.graph.eqns), found)
    return Verified(len(program.graph.eqns), None)


def _only(program: Program, e: Eqn) -> Program:
    """A program of one equation."""
    return Program(program.mesh, Graph(e.reads, (e,), e.outs), program.layouts)


def _whole_values(graph: Graph, inputs: Sequence[Any], mesh: Mesh) -> Mapping[Var, Any]:
    """Every value of a global graph; of one in a region, what every rank holds."""
    values: dict[Var, Any] = dict(zip(graph.inputs, inputs, strict=True))
    layouts = {v: Layout.of(_ONE, v.shape) for e in graph.eqns for v in (*e.reads, *e.outs)}
    for e in filter(lambda e: e.outs, graph.eqns):
        if _in_region(e) or any(isinstance(values[v], RankTensor) for v in e.reads):
            args, kwargs = map_vars(e.args, values.__getitem__), map_vars(e.kwargs, values.__getitem__)
            values.update(zip(e.outs, evaluate_on_ranks(e, args, kwargs, AtOnce(mesh))))
            continue
        program = Program(_ONE, Graph(e.reads, (e,), e.outs), layouts)
        (outs,) = VirtualEngine(Mesh(_ONE)).load(program)([[_own(values[v]) for v in e.reads]])
        values.update(zip(e.outs, outs))
    return values


def _in_region(e: Eqn) -> bool:
    """Whether an equation, or one of a sub-program that it runs, is an operation of regions."""
    return any(inner.op in REGION_OPS for inner in equations(Graph((), (e,), ())))


def _own(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _compare(
    program: Program, e: Eqn, v: Var, parts: list[Any], whole: Mapping[Var, Any], rtol: float | None
) -> Difference | None:
    origin, layout = program.origin.get(v), program.layouts.get(v)
    want = whole.get(origin) if origin is not None else None
    if layout is None or not isinstance(want, torch.Tensor):
        return None
    scale = _magnitude(want)
    for ranks, got, expected in _regions(parts, layout, want):
        if isinstance(got, str):
            return _difference(e, v, layout, got, float("inf"))
        gap = _gap(got, expected)
        if gap > (_tolerance(want.dtype) if rtol is None else rtol) * scale:
            return _difference(e, v, layout, ranks, gap)
    return None


def _difference(e: Eqn, v: Var, layout: Layout, ranks: str, gap: float) -> Difference:
    return Difference(op_name(e.op), v.name, f"'{spec_of(layout)}'", ranks, gap, e.source)


def _regions(parts: Sequence[torch.Tensor], layout: Layout, want: torch.Tensor) -> Any:
    """(ranks, what they hold together, what they should) for each distinct part of the value; where replicas differ,
    the ranks that do, in words, in the place of what they hold."""

    def wanted(rank: int) -> torch.Tensor:
        return want.parts[rank] if isinstance(want, RankTensor) else want

    for first, *others in layout.replicas():
        for r in others:
            if bits(parts[r]) != bits(parts[first]):
                yield "", f"rank {r}, which should hold what rank {first} holds", None
    pending = [a for a, _ in layout.partial]
    reduced = layout.with_states(dict.fromkeys(pending, WHOLE))
    for ranks in reduced.replicas():
        coords = {r: layout.mesh.coords(r) for r in ranks}
        operands = {tuple(coords[r][a] for a in pending): parts[r] for r in reversed(ranks)}  # one of each replica
        pieces = torch.stack([operands[k] for k in sorted(operands)])
        got = _REDUCE[layout.partial[0][1]](pieces, 0) if pending else pieces[0]
        yield (
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}",
            got,
            cut(wanted(ranks[0]), reduced, coords[ranks[0]]),
        )


def _magnitude(x: torch.Tensor) -> float:
    """The largest finite absolute value, at least a tiny one."""
    x = torch.stack(x.parts) if isinstance(x, RankTensor) else x
    finite = x[x.isfinite()] if x.dtype.is_floating_point or x.is_complex() else x
    wide = finite.to(torch.complex128 if x.is_complex() else torch.float64)
    return max(float(wide.abs().max()), 1e-30) if wide.numel() else 1e-30


def _gap(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    wide = torch.complex128 if got.is_complex() else torch.float64
    difference = (got.to(wide) - want.to(wide)).abs()
    difference[(got == want) | (got.isnan() & want.isnan())] = 0
    return float(difference.nan_to_num(nan=float("inf")).max())


def _tolerance(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}.get(dtype, 2e-2)
