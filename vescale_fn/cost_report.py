"""What a program sends and computes, counted on the program itself: nothing runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from vescale_fn.actions import Message, actions_of
from vescale_fn.program import Program
from vescale_fn.sharding.comm import COLLECTIVES, COMMS, RaggedAllToAll, comm_name
from vescale_fn.sharding.cost import sent
from vescale_fn.sharding.graph import Call, Eqn, Graph, Pipeline, Scan, Source, Var, dtype_text, is_view, op_name
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import axes_text

aten = torch.ops.aten


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of a program.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, ragged_all_to_all, ppermute, broadcast, permute or
    exchange; `reduction` is its sum, max or min. Or send, from a stage of a pipeline to another (`reduction`: `0->1`).
    shape: local shape of the operand on the rank that holds most; of a bucket, its elements in one row.
    nbytes: bytes that one rank sends each time; of a ragged_all_to_all at most, sizes and offsets not counted.
    count: how often one step runs it (loops multiply).
    """

    kind: str
    reduction: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    phase: str
    source: Source
    count: int = 1
    operands: int = 1

    @property
    def total(self) -> int:
        """Bytes that one rank sends in one step."""
        return self.nbytes * self.count


class CollectiveTable(Sequence[CollectiveRow]):
    """The collectives of a program in the order in which they run. Prints as a table."""

    def __init__(self, rows: Sequence[CollectiveRow]) -> None:
        self.rows = tuple(rows)

    @overload
    def __getitem__(self, i: int) -> CollectiveRow: ...
    @overload
    def __getitem__(self, i: slice) -> CollectiveTable: ...
    def __getitem__(self, i: int | slice) -> CollectiveRow | CollectiveTable:
        return CollectiveTable(self.rows[i]) if isinstance(i, slice) else self.rows[i]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes that one rank sends in one step."""
        return sum(r.total for r in self.rows)

    def summary(self) -> str:
        """How many collectives of each kind one step runs, and the bytes that one rank sends in them."""
        if not self.rows:
            return "no collectives"
        groups: dict[tuple[str, ...], list[CollectiveRow]] = {}
        for r in self.rows:
            groups.setdefault((r.kind, r.reduction, axes_text(r.axes), r.phase), []).append(r)
        cells = [
            [*key[:3], f"{sum(r.count for r in rows):,} x", f"{sum(r.total for r in rows):,} B", key[3]]
            for key, rows in groups.items()
        ]
        return _aligned(cells, right={3, 4})

    def __str__(self) -> str:
        return _aligned([_cells(r) for r in self.rows], right={4}) if self.rows else "no collectives"

    __repr__ = __str__


def _aligned(cells: Sequence[Sequence[str]], right: set[int]) -> str:
    """A table; columns of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join(
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in cells
    )


def _cells(r: CollectiveRow) -> list[str]:
    bucket = f"bucket of {r.operands}" if r.operands > 1 else ""
    times = f" x{r.count}" if r.count > 1 else ""
    value = f"{dtype_text(r.dtype)}{list(r.shape)}"
    return [
        r.kind,
        r.reduction,
        axes_text(r.axes),
        value,
        f"{r.nbytes:,} B{times}",
        r.phase,
        bucket or r.source.short,
        r.source.code,
    ]


def collectives_of(program: Program) -> CollectiveTable:
    """Every collective of a program, those of sub-programs included, in the order in which they first run."""
    rows: list[CollectiveRow] = []
    for e, n in equations(program.graph, whole=True):
        if isinstance(e.op, Pipeline):
            rows += [_message_row(e, m, n * e.op.length, program.layouts) for m in actions_of(e.op).messages.values()]
        elif is_collective(e):
            rows.append(_row(e, n, program.layouts))
    return CollectiveTable(rows)


def _message_row(e: Eqn, m: Message, count: int, layouts: Mapping[Var, Layout]) -> CollectiveRow:
    shapes = [layouts[v].max_local_shape for v in m.values]
    return CollectiveRow(
        kind="send",
        reduction=f"{m.source}->{m.target}",
        axes=(e.op.axis,),
        dtype=m.values[0].dtype,
        shape=shapes[0] if len(shapes) == 1 else (sum(map(math.prod, shapes)),),
        nbytes=sum(math.prod(s) * v.dtype.itemsize for s, v in zip(shapes, m.values)),
        phase="forward" if m.kind == "F" else "backward",
        source=e.source,
        count=count,
        operands=len(shapes),
    )


def is_collective(e: Eqn) -> bool:
    """Whether an equation communicates."""
    return isinstance(e.op, COLLECTIVES) and bool(e.op.axes)


def equations(graph: Graph, count: int = 1, whole: bool = False) -> Iterator[tuple[Eqn, int]]:
    """Every equation of a graph and its sub-programs, and how often one step runs it. whole: the equation of a pipeline
    comes too, before those of its body."""
    for e in graph.eqns:
        if whole and isinstance(e.op, Pipeline):
            yield e, count
        if isinstance(e.op, (Scan, Call)):
            yield from equations(e.op.body, count * (e.op.length if isinstance(e.op, Scan) else 1), whole)
        else:
            yield e, count


def bytes_sent(e: Eqn, layouts: Mapping[Var, Layout]) -> int:
    """Bytes that a rank sends in one collective, by ring algorithms."""
    moved = e.operands[:1] if isinstance(e.op, RaggedAllToAll) else e.outs
    return sum(round(sent(e.op, layouts[v]) * v.dtype.itemsize) for v in moved)


def _row(e: Eqn, count: int, layouts: Mapping[Var, Layout]) -> CollectiveRow:
    moved = e.operands[: len(e.outs)]  # what says where rows go is no operand of a bucket
    shapes = [layouts[v].max_local_shape for v in moved]
    shape = shapes[0] if len(shapes) == 1 else (sum(map(math.prod, shapes)),)
    return CollectiveRow(
        kind=comm_name(e.op),
        reduction=getattr(e.op, "kind", ""),
        axes=e.op.axes,
        dtype=e.operands[0].dtype,
        shape=shape,
        nbytes=bytes_sent(e, layouts),
        phase=e.phase,
        source=e.source,
        count=count,
        operands=len(shapes),
    )


@dataclass(frozen=True)
class Cost:
    """What one rank does in one step.

    flops: floating-point operations of matrix products, attention and convolutions (a multiply-add counts as two).
    bytes_accessed: bytes that local operations read and write. bytes_sent: bytes sent, by the axes they travel along.
    """

    flops: int
    bytes_accessed: int
    bytes_sent: Mapping[tuple[str, ...], int]

    def __str__(self) -> str:
        lines = [f"flops           {self.flops:,}", f"bytes accessed  {self.bytes_accessed:,}"]
        lines += [f"bytes sent      {n:,} along {axes_text(axes)}" for axes, n in self.bytes_sent.items()]
        return "\n".join(lines)


def cost_analysis(program: Program) -> Cost:
    """Operations and bytes of the rank that holds most, and bytes sent along each group of axes."""
    return _cost(program.graph, program)


def _cost(graph: Graph, program: Program) -> Cost:
    flops = accessed = 0
    along: dict[tuple[str, ...], int] = {}

    def add(cost: Cost, count: int) -> None:
        nonlocal flops, accessed
        flops, accessed = flops + count * cost.flops, accessed + count * cost.bytes_accessed
        for axes, n in cost.bytes_sent.items():
            along[axes] = along.get(axes, 0) + count * n

    for e in graph.eqns:
        if isinstance(e.op, Pipeline):
            add(_cost_of_pipeline(e.op, program), e.op.length)
        elif isinstance(e.op, (Scan, Call)):
            add(_cost(e.op.body, program), e.op.length if isinstance(e.op, Scan) else 1)
        elif is_collective(e):
            add(Cost(0, 0, {e.op.axes: bytes_sent(e, program.layouts)}), 1)
        else:
            add(Cost(flops_of(e, program.layouts), _bytes_accessed(e, program.layouts), {}), 1)
    return Cost(flops, accessed, along)


def _cost_of_pipeline(op: Pipeline, program: Program) -> Cost:
    """What the rank along the axis with most to compute does for a microbatch, and sends."""
    actions = actions_of(op)
    costs = []
    for rank in range(len(op.rows)):
        eqns = [e for p in actions.pieces.values() if op.placement[p.stage] == rank for e in p.graph.eqns]
        cost = _cost(Graph((), tuple(eqns), ()), program)
        sent = [m for m in actions.messages.values() if op.placement[m.source] == rank]
        nbytes = sum(program.local_bytes(v) for m in sent for v in m.values)
        costs.append(Cost(cost.flops, cost.bytes_accessed, {**cost.bytes_sent, (op.axis,): nbytes}))
    return max(costs, key=lambda c: (c.flops, c.bytes_accessed))


def _bytes_accessed(e: Eqn, layouts: Mapping[Var, Layout]) -> int:
    if is_view(e):
        return 0
    tensors = [*e.operands, *(o for o in e.outs if o.is_tensor)]
    return sum(layouts[v].max_local_numel * v.dtype.itemsize for v in tensors)


Shapes = list[tuple[int, ...]]


def flops_of(e: Eqn, layouts: Mapping[Var, Layout]) -> int:
    """Floating-point operations of an equation on the rank that holds most."""
    name = op_name(e.op).split(".")[:2]
    count = _FLOPS.get(".".join(name))
    if count is None or isinstance(e.op, COMMS):
        return 0
    flops: int = count([layouts[v].max_local_shape for v in e.operands], [layouts[v].max_local_shape for v in e.outs])
    return flops


def _product(first: int) -> Any:
    """A matrix product whose left operand is in slot `first`."""
    return lambda ins, outs: 2 * math.prod(outs[0]) * ins[first][-1]


def _attention(products: int, query: int) -> Any:
    """Attention of `products` matrix products over query, key and value, which stand in slots from `query` on."""

    def flops(ins: Shapes, outs: Shapes) -> int:
        q, k, v = ins[query : query + 3]
        return products * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])

    return flops


def _convolution(ins: Shapes, outs: Shapes) -> int:
    return 2 * math.prod(outs[0]) * math.prod(ins[1][1:])


def _convolution_backward(ins: Shapes, outs: Shapes) -> int:
    return 2 * 2 * math.prod(ins[0]) * math.prod(ins[2][1:])


_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_FLOPS: dict[str, Any] = {
    "aten.mm": _product(0),
    "aten.bmm": _product(0),
    "aten.addmm": _product(1),
    "aten.baddbmm": _product(1),
    "aten.mv": _product(0),
    "aten.dot": lambda ins, outs: 2 * math.prod(ins[0]),
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    **{f"aten._scaled_dot_product_{kind}": _attention(2, 0) for kind in _ATTENTION},
    **{f"aten._scaled_dot_product_{kind}_backward": _attention(5, 1) for kind in _ATTENTION},
}
