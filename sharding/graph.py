"""The graph of a step: what `trace` makes, `solve` reads and `partition` rewrites.

Equations in order, each with an operation, arguments and result variables, like a jaxpr. Shapes in a global graph
are global. A per-rank program uses the same types, with local operations and `comm` collectives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

Phase = str  # "forward" | "backward" | "update"


@dataclass(frozen=True)
class Source:
    """A line of the user's code."""

    file: str = ""
    line: int = 0
    code: str = ""

    @property
    def short(self) -> str:
        """`train.py:12`, without the folder; empty when the line is not known."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "?"


@dataclass(frozen=True, eq=False)
class Var:
    """A value: a tensor (dtype is a torch.dtype) or a Python number that varies from call to call (dtype is float or
    int, shape is ())."""

    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.dtype, torch.dtype)

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize if self.is_tensor else 8
        for s in self.shape:
            size *= s
        return int(size)

    def __repr__(self) -> str:
        return self.name


def map_vars(tree: Any, fn: Callable[[Var], Any]) -> Any:
    """`tree` (nested tuples, lists, dicts) with every Var replaced by fn(var)."""
    if isinstance(tree, Var):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_vars(t, fn) for t in tree)
    if isinstance(tree, dict):
        return {k: map_vars(v, fn) for k, v in tree.items()}
    return tree


def vars_in(tree: Any) -> Iterator[Var]:
    """Every Var in `tree`, in order, repeats included."""
    if isinstance(tree, Var):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for t in tree:
            yield from vars_in(t)
    elif isinstance(tree, dict):
        for t in tree.values():
            yield from vars_in(t)


@dataclass(frozen=True, eq=False)
class Eqn:
    """outs = op(*args, **kwargs). `op` is an OpOverload, one of our primitives, a sub-program or a collective."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Var, ...]
    source: Source = field(default_factory=Source)
    phase: Phase = "forward"

    @cached_property
    def operands(self) -> tuple[Var, ...]:
        """Tensor operands in slot order: args first, then kwargs, lists flattened, repeats kept."""
        return tuple(v for v in vars_in((self.args, self.kwargs)) if v.is_tensor)

    @cached_property
    def reads(self) -> tuple[Var, ...]:
        """All operands, numbers included."""
        return tuple(vars_in((self.args, self.kwargs)))

    def with_args(self, fn: Callable[[Var], Any], outs: tuple[Var, ...] | None = None) -> Eqn:
        return replace(
            self,
            args=map_vars(self.args, fn),
            kwargs=map_vars(self.kwargs, fn),
            outs=self.outs if outs is None else outs,
        )


@dataclass(frozen=True, eq=False)
class Graph:
    """inputs -> equations -> outputs. An output that is not a Var is a constant of the step."""

    inputs: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[Any, ...]

    def __str__(self) -> str:
        lines = [f"inputs {', '.join(f'{v}:{type_text(v)}' for v in self.inputs)}"]
        lines += [str_eqn(e) for e in self.eqns]
        return "\n".join([*lines, f"return {', '.join(map(str, self.outputs))}"])


@dataclass(frozen=True, eq=False)
class Scan:
    """A loop. Arguments: constants, initial carries, then arrays to iterate over along dim 0. The body maps
    (constants, carries, slices) to (new carries, per-iteration outputs); results are final carries, then stacked
    outputs. `reverse` runs the last slice first (stacking stays in index order)."""

    body: Graph
    num_consts: int
    num_carry: int
    length: int
    reverse: bool = False


@dataclass(frozen=True, eq=False)
class Pipeline(Scan):
    """A loop over microbatches that the ranks along `axis` run in pieces: each rank those of its stages, in its order.

    It means what the loop means. Its body calls F0, F1, ... (forward of a stage), I0, ... and W0, ... (the two halves
    of its backward); anything else in the body belongs to the call that it reads from.

    placement: the rank of every stage. rows: for every rank its actions (kind, stage, microbatch), sends and receives
    included. outside: by the name of an input of the body that is a constant or a carry, its state along `axis` where
    it enters and leaves.
    """

    axis: str = ""
    name: str = ""
    placement: tuple[int, ...] = ()
    rows: tuple[tuple[tuple[str, int, int], ...], ...] = ()
    outside: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Call:
    """A sub-program called once. `remat`: backward computes it again, wholly or by a policy; its equations must not be
    merged with those outside."""

    body: Graph
    name: str = "call"
    remat: Any = False


def equations(graph: Graph) -> Iterator[Eqn]:
    """Every equation in order, those of a sub-program after the one that runs it."""
    for e in graph.eqns:
        yield e
        if isinstance(e.op, (Scan, Call)):
            yield from equations(e.op.body)


def has_effect(e: Eqn) -> bool:
    """Whether an equation does more than make its results. One without results is there for what it does (it prints),
    and so is a sub-program that holds one: nobody may drop it, and it runs once however often its operands are made.
    """
    if isinstance(e.op, (Scan, Call)):
        return any(map(has_effect, e.op.body.eqns))
    return not e.outs


def variables(graph: Graph) -> Iterator[Var]:
    """Every Var in order of its making: inputs, then results; those of a sub-program before those of its equation."""
    yield from graph.inputs
    for e in graph.eqns:
        if isinstance(e.op, (Scan, Call)):
            yield from variables(e.op.body)
        yield from e.outs


def is_view(e: Eqn) -> bool:
    """Whether the result only shows its operand in another way. (`_unsafe_view` is a view that autograd does not know.)

    >>> x, y = Var("x", (2, 3), torch.float32), Var("y", (3, 2), torch.float32)
    >>> is_view(Eqn(torch.ops.aten.t.default, (x,), {}, (y,)))
    True
    """
    if e.op is torch.ops.aten._unsafe_view.default:
        return True
    return isinstance(e.op, torch._ops.OpOverload) and bool(e.op.is_view)


def type_text(v: Var) -> str:
    """`f32[8, 4]`."""
    return f"{dtype_text(v.dtype)}{list(v.shape)}"


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def dtype_text(dtype: Any) -> str:
    """Short name of a dtype: f32, bf16, i64, bool.

    >>> dtype_text(torch.float32), dtype_text(torch.bool)
    ('f32', 'bool')
    """
    name = (
        str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else getattr(dtype, "__name__", str(dtype))
    )
    for long in ("bfloat", "float", "uint", "int", "complex"):
        if name.startswith(long) and name[len(long) :].isdigit():
            return _SHORT[long] + name[len(long) :]
    return name


def op_name(op: Any) -> str:
    """`aten.mm`, `all_reduce`, ..."""
    if isinstance(op, torch._ops.OpOverload):
        return str(op).removesuffix(".default")
    return getattr(op, "name", None) or getattr(op, "__name__", None) or type(op).__name__


def str_eqn(e: Eqn) -> str:
    """`y:f32[4] = aten.exp(x)`, indented."""
    args = [repr(a) for a in e.args] + [f"{k}={v!r}" for k, v in e.kwargs.items()]
    outs = ", ".join(f"{v}:{type_text(v)}" for v in e.outs)
    return f"  {outs} = {op_name(e.op)}({', '.join(args)})"
