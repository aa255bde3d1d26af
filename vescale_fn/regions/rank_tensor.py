"""Regions that run at once: one tensor that holds the parts of all ranks of this process, in lock step.

Python runs once. An operation runs on each part; a collective runs on all of them, by the engine of the mesh. What the
trace decomposes is decomposed here too, so that a region gives the same bits whether it is lowered or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vescale_fn.array import Array, ArrayType
from vescale_fn.decompositions import ALWAYS
from vescale_fn.effects import DEBUG_PRINT
from vescale_fn.engines import Executable, engine_for
from vescale_fn.functional import unseen
from vescale_fn.interpret import evaluate_equation, run_graph, run_scan
from vescale_fn.local_ops import keep
from vescale_fn.local_print import print_once, print_parts
from vescale_fn.localize.context import Builder
from vescale_fn.move import move_to
from vescale_fn.names import Names
from vescale_fn.placement import cut
from vescale_fn.program import AxisIndex, Program, bind_constant
from vescale_fn.regions import ops, texts
from vescale_fn.regions.infer import boundary_states
from vescale_fn.regions.lower import COLLECTIVES, ZEROS, is_silent, several
from vescale_fn.regions.marks import mark, states_of
from vescale_fn.regions.ops import boundary_layout, global_shape, group_of
from vescale_fn.regions.region import note
from vescale_fn.regions.states import I
from vescale_fn.regions.typeof import typeof
from vescale_fn.sharding import comm
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Source, Var
from vescale_fn.sharding.layout import MANUAL, WHOLE, Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.source import user_source
from vescale_fn.tree import map_tensors


class RankTensor(Tensor):
    """What each rank of this process holds of a value in a region. Printing shows every rank."""

    parts: tuple[Tensor, ...]
    mesh: Mesh

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], mesh: Mesh) -> RankTensor:
        first = parts[0]
        out: RankTensor = Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device
        )
        out.parts, out.mesh = tuple(parts), mesh
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in ALWAYS:
            out = ALWAYS[func](*args, **kwargs)
            if out is not NotImplemented:  # which leaves the call as it is
                return out
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return func.decompose(*args, **kwargs)  # below autograd, what is made of other operations comes whole
        out = cls.run(func, args, kwargs)
        note(func, args, kwargs, out, Source())
        return out

    @staticmethod
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        """The operation on every rank."""
        if func in _OURS:
            return _OURS[func](*args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return _scalar(args[0])
        mesh = next(x.mesh for x in _tensors((args, kwargs)) if isinstance(x, RankTensor))
        results = [func(*_of_rank(args, i), **_of_rank(kwargs, i)) for i in range(len(mesh.local_ranks))]
        if not (func._schema.is_mutable and _writes_first(func)):
            return _gathered(results, mesh)
        if torch.Tag.inplace_view in func.tags:  # squeeze_ and its like: the shape of the whole changes with the parts
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
        return args[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with unseen():
            rows = [f"{where}: {part}" for where, part in self._by_rank()]
        return f"RankTensor({typeof(self)}\n  " + "\n  ".join(r.replace("\n", "\n    ") for r in rows) + "\n)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def _by_rank(self) -> Iterator[tuple[str, Tensor]]:
        for rank, part in zip(self.mesh.local_ranks, self.parts):
            coords = self.mesh.shape.coords(rank)
            yield ", ".join(f"{a}={i}" for a, i in coords.items()), part


@dataclass(frozen=True)
class AtOnce:
    """How values enter a region that runs at once."""

    mesh: Mesh
    failures: int = 0  # of the engine when the region began

    @staticmethod
    def on(mesh: Mesh) -> AtOnce:
        if mesh.processes == 1:
            return AtOnce(mesh)
        engine: Any = engine_for(mesh)
        engine.enter()
        return AtOnce(mesh, engine.failures)

    def failed(self, error: Exception) -> None:
        """Tell the other processes, unless the engine, where it failed, has told them."""
        engine: Any = engine_for(self.mesh)
        if self.mesh.processes > 1 and engine.failures == self.failures:
            engine.fail(error)

    def parts(self, x: Any, axes: str, spec: str) -> RankTensor:
        """What each rank of this process sees of a global tensor or Array."""
        layout = _on_mesh(boundary_layout(spec, axes, tuple(x.shape)), self.mesh)
        with unseen():
            if isinstance(x, Array):
                parts = [s.clone() for s in move_to(x, layout).shards]
            else:
                parts = [cut(x.to(self.mesh.device_of(r)), layout, c) for r, c in _ranks(self.mesh)]
        out = RankTensor(parts, self.mesh)
        mark(out, boundary_states(spec, axes, tuple(x.shape)))
        return out

    def same(self, x: Any) -> Any:
        """A tensor that the region made out of nothing, as it is on every rank."""
        if type(x) is not Tensor:
            return x
        return RankTensor([x.to(self.mesh.device_of(r), copy=True) for r in self.mesh.local_ranks], self.mesh)

    def index(self, axes: str) -> RankTensor:
        """Every rank's position along axes."""
        at = zip(self.mesh.local_ranks, _positions(self.mesh, axes))
        with unseen():
            return RankTensor([torch.tensor(i, device=self.mesh.device_of(r)) for r, i in at], self.mesh)

    def array(self, x: Any, axes: str, spec: str) -> Array:
        """An output as an Array."""
        layout = _on_mesh(boundary_layout(spec, axes, global_shape(spec, axes, x.shape)), self.mesh)
        with unseen():
            return Array(ArrayType(layout, x.dtype, self.mesh), [p.contiguous() for p in x.parts], spec)


def _ranks(mesh: Mesh) -> list[tuple[int, dict[str, int]]]:
    return [(r, mesh.shape.coords(r)) for r in mesh.local_ranks]


def _positions(mesh: Mesh, axes: str) -> list[int]:
    """Where each rank of this process stands along axes."""
    return [bind_constant(AxisIndex(group_of(axes).names), mesh.shape, c) for _, c in _ranks(mesh)]


def _on_mesh(layout: Layout, mesh: Mesh, others: Any = WHOLE) -> Layout:
    """A layout on the axes of a region, on all axes of the mesh."""
    states = {**dict.fromkeys(mesh.axis_names, others), **dict(zip(layout.mesh.names, layout.states))}
    return Layout.of(mesh.shape, layout.shape, states)


def evaluate_on_ranks(e: Eqn, args: Sequence[Any], kwargs: Any, at_once: AtOnce) -> list[Any]:
    """The results of an equation of a traced graph whose operands are what every rank holds."""

    def evaluate(e: Eqn, args: Sequence[Any], kwargs: Any) -> list[Any]:
        return evaluate_on_ranks(e, args, kwargs, at_once)

    if isinstance(e.op, Call):
        return run_graph(e.op.body, args, evaluate)
    if isinstance(e.op, Scan):
        return run_scan(e.op, args, evaluate)
    if e.op is ops.AXIS_INDEX:
        return [at_once.index(args[0])]
    if e.op is ops.TO_LOCAL and not isinstance(args[0], RankTensor):
        return [at_once.parts(args[0], args[1], args[2])]
    if ops.is_ours(e.op):
        args = [at_once.same(x) if isinstance(x, Tensor) else x for x in args]
    return evaluate_equation(e, args, kwargs)


# ---- operations on every part


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(tree, found.append)
    return found


def _of_rank(tree: Any, i: int) -> Any:
    return map_tensors(tree, lambda x: x.parts[i] if isinstance(x, RankTensor) else x)


def _gathered(results: Sequence[Any], mesh: Mesh) -> Any:
    """Results of the ranks as one: tensors together, and what has no values as the first rank has it."""
    first = results[0]
    if isinstance(first, Tensor):  # on the device "meta" there are no values, so the ranks' own are alike
        return first if first.is_meta else RankTensor(results, mesh)
    if isinstance(first, (tuple, list)):
        return type(first)([_gathered(column, mesh) for column in zip(*results)])
    return first


def _writes_first(op: Any) -> bool:
    """Whether an operation writes to its first operand, and returns it."""
    alias = op._schema.arguments[0].alias_info
    return alias is not None and bool(alias.is_write)


def _scalar(x: RankTensor) -> Any:
    """The one value of an invarying tensor. Raises RegionError where ranks may differ."""
    varying = [a for a, s in (states_of(x) or {}).items() if s != I]
    if varying:
        raise texts.RegionError(texts.reads_varying(typeof(x), varying, user_source()))
    return x.parts[0].item()


# ---- operations of regions


def _collective(op: Any) -> Callable[..., RankTensor]:
    def run(x: RankTensor, axes: str, *rest: Any) -> RankTensor:
        made = COLLECTIVES[op](axes, *(tuple(r) if isinstance(r, list) else r for r in rest))
        if not several(axes):
            return RankTensor([ZEROS(p) for p in x.parts], x.mesh) if is_silent(op, rest) else _alias(x)
        shape = op(torch.empty(x.shape, device="meta"), axes, *rest).shape
        return _by_engine(made, [x], tuple(shape))

    return run


def _by_engine(made: comm.Comm, operands: Sequence[RankTensor], shape: tuple[int, ...]) -> RankTensor:
    """The collective of these operands, whose result has this shape."""
    mesh = operands[0].mesh
    program = _one_equation(mesh, made, tuple((tuple(x.shape), x.dtype) for x in operands), shape)
    rows = [[p.contiguous() for p in row] for row in zip(*(x.parts for x in operands))]
    return RankTensor([row[0] for row in _executable(mesh, program)(rows)], mesh)


def _executable(mesh: Mesh, program: Program) -> Executable:
    """A program ready to run. Several processes run the Python code of a region each by itself: they meet before every
    collective and compare it, which an engine does when it runs a program for the first time."""
    return _loaded(mesh, program) if mesh.processes == 1 else engine_for(mesh).load(program)


@lru_cache(maxsize=1024)
def _loaded(mesh: Mesh, program: Program) -> Executable:
    return engine_for(mesh).load(program)


@lru_cache(maxsize=1024)
def _one_equation(
    mesh: Mesh, made: comm.Comm, operands: tuple[tuple[tuple[int, ...], torch.dtype], ...], shape: tuple[int, ...]
) -> Program:
    """The program of one collective on values of the ranks' own."""
    inputs = tuple(Var(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(operands))
    out = Var("y", shape, operands[0][1])
    layouts = {v: Layout.of(mesh.shape, v.shape, dict.fromkeys(mesh.axis_names, MANUAL)) for v in (*inputs, out)}
    graph = Graph(inputs, (Eqn(made, inputs, {}, (out,)),), (out,))
    return Program(mesh.shape, graph, layouts)


def _alias(x: RankTensor, *_: Any) -> RankTensor:
    return RankTensor([torch.ops.aten.alias.default(p) for p in x.parts], x.mesh)


def _keep(x: RankTensor, axes: str, index: int, _: str) -> RankTensor:
    return RankTensor([keep(p, i, index) for p, i in zip(x.parts, _positions(x.mesh, axes))], x.mesh)


def _to_local(x: RankTensor, axes: str, spec: str) -> RankTensor:
    """Into a region inside another one: every rank takes its part of what it holds."""
    layout = boundary_layout(spec, axes, tuple(x.shape))
    return RankTensor([cut(p, layout, c) for p, (_, c) in zip(x.parts, _ranks(x.mesh))], x.mesh)


def _to_global(x: RankTensor, axes: str, spec: str) -> Tensor:
    """Out of a region: the whole value, of the ranks of the region around it if there is one."""
    layout = boundary_layout(spec, axes, global_shape(spec, axes, x.shape))
    nested = len(group_of(axes).names) < len(states_of(x) or {})
    start = _on_mesh(layout, x.mesh, MANUAL if nested else WHOLE)
    (column,) = zip(*_executable(x.mesh, _whole(start, x.dtype))([[p] for p in x.parts]))
    return RankTensor(column, x.mesh) if nested else column[0]


@lru_cache(maxsize=1024)
def _whole(start: Layout, dtype: torch.dtype) -> Program:
    """The program that makes a value whole along the axes that are not manual."""
    source = Var("x", start.shape, dtype)
    builder = Builder({source: start}, Names({"x"}))
    to = start.with_states({a: WHOLE for a, s in zip(start.mesh.names, start.states) if s != MANUAL})
    chain = [source, *builder.reshard(source, to, Source(), "forward")]
    return Program(start.mesh, Graph((source,), tuple(builder.eqns), (chain[-1],)), builder.layouts)


def _ragged(*args: Any) -> RankTensor:
    return _by_engine(comm.RaggedAllToAll(group_of(args[6]).names), args[:6], tuple(args[1].shape))


def _print(values: Sequence[Tensor], text: str, batch_dims: int, per_rank: bool) -> None:
    """What the program of a region does on each rank."""
    mesh = next(v.mesh for v in values if isinstance(v, RankTensor))
    manual = [a for a in mesh.axis_names if any(a in (states_of(v) or {}) for v in values)]
    for i, (rank, coords) in enumerate(_ranks(mesh)):
        parts: Sequence[Tensor] = _of_rank(list(values), i)
        if per_rank:
            print_parts(rank, tuple(coords.items()), parts, text, batch_dims)
        else:
            elsewhere = sum(n for a, n in coords.items() if a not in manual)
            print_once(elsewhere, [(a, coords[a]) for a in manual], parts, text, batch_dims)


_OURS: dict[Any, Callable[..., Any]] = {
    DEBUG_PRINT: _print,
    **{op: _collective(op) for op in COLLECTIVES},
    ops.CAST: _alias,
    ops.KEEP: _keep,
    ops.TO_LOCAL: _to_local,
    ops.TO_GLOBAL: _to_global,
    ops.RAGGED_ALL_TO_ALL: _ragged,
}
