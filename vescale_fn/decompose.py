"""Rewriting equations as elementary ones.

`decompose_eqn` makes the small graph of one equation, and `splice` puts such graphs in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from vescale_fn.fx_graph import graph_of_fx
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var, map_vars


def decompose_eqn(eqn: Eqn, decomposition: Callable[..., Any], device: str = "cpu") -> Graph | None:
    """The graph of `decomposition` on the types of `eqn`: inputs are its tensor operands in slot order, outputs its
    results, None for those that are not made. None where the decomposition leaves the equation as it is, or where an
    argument is a number that varies.

    >>> x, y = Var("x", (4, 8), torch.float32), Var("y", (4,), torch.float32)
    >>> from vescale_fn.decompositions import ALWAYS
    >>> mean = torch.ops.aten.mean.dim
    >>> print(decompose_eqn(Eqn(mean, (x, [1]), {}, (y,)), ALWAYS[mean]))
    inputs x0:f32[4, 8]
      sum:f32[4] = aten.sum.dim_IntList(x0, [1])
      div:f32[4] = aten.div.Tensor(sum, 8)
    return div
    """
    if len(eqn.reads) != len(eqn.operands):
        return None
    applies = True

    def run(*tensors: torch.Tensor) -> Any:
        nonlocal applies
        rest = iter(tensors)
        args, kwargs = map_vars((eqn.args, eqn.kwargs), lambda _: next(rest))
        out = decomposition(*args, **kwargs)
        applies = out is not NotImplemented
        if not applies:
            return []
        results = out if isinstance(out, (tuple, list)) else [out]
        return [_as(t, v) for t, v in zip(results, eqn.outs, strict=True)]

    with FakeTensorMode():
        operands = [torch.empty(v.shape, dtype=v.dtype, device=device) for v in eqn.operands]
        gm = make_fx(run)(*operands)
    return graph_of_fx(gm, [f"x{i}" for i in range(len(operands))]) if applies else None


def _as(t: torch.Tensor | None, v: Var) -> torch.Tensor | None:
    """A result in the dtype and shape that the operation gives it."""
    if t is None:
        return None
    t = t.to(v.dtype)
    return t if t.shape == v.shape else t.reshape(v.shape)


def splice(graph: Graph, replacements: Mapping[Eqn, Graph]) -> Graph:
    """`graph`, sub-programs included, with each of the given equations replaced by a graph; the new equations take
    the source line and phase of the old. Results that a replacement does not make must not be read."""
    renamed: dict[Var, Any] = {}
    eqns: list[Eqn] = []

    def rename(v: Var) -> Any:
        return renamed.get(v, v)

    for e in graph.eqns:
        if e in replacements:
            body = replacements[e]
            operands = [rename(v) for v in e.operands]
            inner: dict[Var, Any] = dict(zip(body.inputs, operands, strict=True))
            for step in body.eqns:
                outs = tuple(replace(v) for v in step.outs)
                eqns.append(replace(step.with_args(inner.__getitem__, outs), source=e.source, phase=e.phase))
                inner |= dict(zip(step.outs, outs))
            renamed |= {v: inner[r] for v, r in zip(e.outs, body.outputs) if isinstance(r, Var)}
        elif isinstance(e.op, (Scan, Call)):
            body = splice(e.op.body, replacements)
            op = e.op if body is e.op.body else replace(e.op, body=body)
            eqns.append(replace(e.with_args(rename), op=op) if renamed or op is not e.op else e)
        else:
            eqns.append(e.with_args(rename) if renamed else e)
    return replace(graph, eqns=tuple(eqns), outputs=tuple(map_vars(list(graph.outputs), rename)))
