"""A per-rank program as text: one line an equation, local shapes, collectives standing out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vescale_fn.cost_report import bytes_sent
from vescale_fn.program import AxisIndex, LocalDim, Owned, Program
from vescale_fn.sharding.comm import COLLECTIVES, COMMS, Broadcast, Permute, PPermute, RaggedAllToAll, comm_name
from vescale_fn.sharding.digits import factors
from vescale_fn.sharding.graph import Call, Eqn, Graph, Pipeline, Scan, Var, dtype_text, op_name
from vescale_fn.sharding.layout import Layout, Ragged
from vescale_fn.sharding.mesh import axes_text

_PAIRS = 8  # of a ppermute, that are shown


def program_text(program: Program) -> str:
    """The program of one rank, the same for all. `f32[8/dp, 64]` is 8 rows divided over dp; `{sum: tp}` a pending sum;
    `(3 64/tp)` a dim whose inner factor is divided; `5~/dp` an uneven division.

    Collectives are marked with `>>` and say their axes and the bytes that a rank sends.
    """
    lines = [f"program on mesh {program.mesh}"]
    inputs = program.graph.inputs
    width = max((len(v.name) for v in inputs), default=0)
    for i, v in enumerate(inputs):
        donated = "  donated" if i in program.donated else ""
        lines.append(f"   {v.name:<{width}} : {value_text(v, program.layouts)}{donated}")
    lines += _body(program.graph, program, "")
    return "\n".join(lines)


def _body(graph: Graph, program: Program, indent: str) -> list[str]:
    """The equations of a graph, aligned, those of sub-programs indented below them."""
    rows: list[tuple[str, str, str]] = []  # result, expression, the user's line
    phase = None
    for e in graph.eqns:
        if e.phase != phase:
            phase = e.phase
            rows.append((f"{indent}-- {phase}", "", ""))
        rows += [(indent + left, right, comment) for left, right, comment in _equation(e, program)]
        if isinstance(e.op, (Scan, Call)):
            inputs = ", ".join(f"{v.name} : {value_text(v, program.layouts)}" for v in e.op.body.inputs)
            rows.append((f"{indent}      body {inputs}", "", ""))
            rows += [(line, "", "") for line in _body(e.op.body, program, indent + "      ")]
    left = max((min(len(a), 44) for a, b, _ in rows if b), default=0)
    lines = [(f"{a:<{left}} {b}" if b else a, c) for a, b, c in rows]
    right = max((min(len(a), 108) for a, c in lines if c), default=0)
    text = [f"{a:<{right}}  # {c}" if c else a for a, c in lines]
    return [*text, *_wrapped(f"{indent}   return {', '.join(map(_argument, graph.outputs))}")]


def _equation(e: Eqn, program: Program) -> Iterator[tuple[str, str, str]]:
    """Rows of one equation: results one below the other, the expression beside the last."""
    mark = ">>" if isinstance(e.op, COLLECTIVES) else "  "
    results = [f"{v.name} : {value_text(v, program.layouts)}" for v in e.outs] or [""]
    for first in results[:-1]:
        yield f"{mark} {first}", "", ""
        mark = "  "
    first, *rest = _wrapped(f"= {_call_text(e, program)}")
    yield f"{mark} {results[-1]}", first, e.source.short
    for more in rest:
        yield "", more, ""


def _wrapped(text: str) -> list[str]:
    """Text broken at spaces, continued further in."""
    inside = " " * (len(text) - len(text.lstrip()) + 4)
    return textwrap.wrap(text, 108, subsequent_indent=inside, break_long_words=False, break_on_hyphens=False)


def _call_text(e: Eqn, program: Program) -> str:
    if isinstance(e.op, COMMS):
        most = "up to " if isinstance(e.op, RaggedAllToAll) else ""
        sent = f"  sends {most}{bytes_sent(e, program.layouts):,} B" if isinstance(e.op, COLLECTIVES) else ""
        return f"{comm_text(e.op)} ({', '.join(map(_argument, e.args))}){sent}"
    if isinstance(e.op, Pipeline):
        name = f"pipeline {e.op.name} x{e.op.length} over {e.op.axis}"
    elif isinstance(e.op, Scan):
        name = f"scan x{e.op.length}" + (" reversed" if e.op.reverse else "")
    else:
        name = op_name(e.op) if not hasattr(e.op, "__name__") or hasattr(e.op, "_schema") else e.op.__name__
    arguments = [*map(_argument, e.args), *(f"{k}={_argument(a)}" for k, a in e.kwargs.items())]
    return f"{name}({', '.join(arguments)})"


def comm_text(op: Any) -> str:
    """`all_reduce sum tp`, `all_gather dim 0 tp`, `all_to_all dim 1 -> 0 (dp tp)`.

    >>> from vescale_fn.sharding.comm import AllGather
    >>> comm_text(AllGather(("dp", "tp"), 1))
    'all_gather dim 1 (dp tp)'
    """
    name = comm_name(op)
    if isinstance(op, Permute):
        return f"permute {axes_text(op.src)} -> {axes_text(op.dst)}"
    if isinstance(op, PPermute):
        return f"{name} {pairs_text(op.pairs)} {axes_text(op.axes)}"
    if isinstance(op, Broadcast):
        return f"{name} from {op.source} {axes_text(op.axes)}"
    if hasattr(op, "split_dim"):
        return f"{name} dim {op.concat_dim} -> {op.split_dim} {axes_text(op.axes)}"
    dim = f" dim {op.dim}" if hasattr(op, "dim") else ""
    return f"{name}{dim} {op.kind} {axes_text(op.axes)}" if hasattr(op, "kind") else f"{name}{dim} {axes_text(op.axes)}"


def pairs_text(pairs: Sequence[tuple[int, int]]) -> str:
    """Who sends to whom, as the paths that follow one rank to the next; of long paths the beginning.

    >>> pairs_text([(2, 0), (0, 1), (1, 2), (4, 3)])
    '4->3 0->1->2->0'
    >>> pairs_text([(i, (i + 1) % 16) for i in range(16)])
    '0->1->2->3->4->5->6->7->8->... (16 pairs)'
    """
    to = dict(pairs)
    targets = set(to.values())
    paths: list[list[int]] = []
    shown = 0
    for start in (*sorted(to.keys() - targets), *sorted(to)):  # open paths, then circles
        if start in to and shown < _PAIRS:
            path = [start]
            while path[-1] in to and shown < _PAIRS:
                path.append(to.pop(path[-1]))
                shown += 1
            paths.append(path)
    text = " ".join("->".join(map(str, path)) for path in paths)
    return (f"{text}->... ({len(pairs)} pairs)" if to else text) or "nothing"


def value_text(v: Var, layouts: Mapping[Var, Layout]) -> str:
    """Type of a value on a rank: `f32[8/dp, 64] {sum: tp}`."""
    if not v.is_tensor:
        return dtype_text(v.dtype)
    return f"{dtype_text(v.dtype)}{layout_text(layouts[v])}"


def layout_text(layout: Layout) -> str:
    """A layout, dims divided by axes.

    >>> from vescale_fn.sharding.layout import Partial, Shard
    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> m = MeshShape(("dp", "tp"), (2, 4))
    >>> layout_text(Layout.of(m, (8, 24), {"dp": Shard(0), "tp": Shard(1, 3)}))
    '[8/dp, (3 8/tp)]'
    >>> layout_text(Layout.of(m, (8, 24), {"dp": Shard(0), "tp": Partial()}))
    '[8/dp, 24] {sum: tp}'
    """
    pending = ", ".join(f"{kind}: {axis}" for axis, kind in layout.partial)
    flat = layout.flat
    return f"[{', '.join(_dim_text(flat, d) for d in range(flat.ndim))}]" + (f" {{{pending}}}" if pending else "")


def _dim_text(layout: Layout, dim: int) -> str:
    size = layout.shape[dim]
    for axis, state in zip(layout.mesh.names, layout.states):
        if isinstance(state, Ragged) and state.dim == dim:
            return f"{size}~{list(state.units)}/{axis}"
    parts = [f"{n}{'~' * uneven}" + (f"/{axes_text(axes)}" if axes else "") for n, axes, uneven in factors(layout, dim)]
    return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"


def _argument(a: Any) -> str:
    """An argument as text; unbound constants as what they mean."""
    match a:
        case Var():
            return a.name
        case LocalDim():
            return _dim_text(a.layout, a.dim)
        case Owned():
            return f"owned({_dim_text(a.layout, a.dim)})"
        case AxisIndex():
            return f"index({axes_text(a.axes)})"
        case list():
            return f"[{', '.join(map(_argument, a))}]"
        case tuple():
            return f"({', '.join(map(_argument, a))})"
    return str(a).removeprefix("torch.") if type(a).__module__ == "torch" else repr(a)
