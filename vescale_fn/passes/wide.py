"""Sums that go on in a wider dtype are made in it.

The solver reduces where it costs the fewest bytes: before a cast to a wider dtype. Where the step asks for it, with
`cast`, the parts are cast first and added up afterwards, so that no rounding of the narrow dtype enters the sum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from vescale_fn.cast import WIDEN
from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllReduce, ReduceScatter
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var, is_view, vars_in
from vescale_fn.sharding.layout import Layout

_TO = torch.ops.aten._to_copy.default


def reduce_wide(program: Program) -> Program:
    """Every cast that asks for it before the reduction whose result it casts, sub-programs included."""
    widener = _Widener(dict(program.layouts), dict(program.origin))
    graph = widener.graph(program.graph)
    return replace(program, graph=graph, layouts=widener.layouts, origin=widener.origin)


@dataclass(eq=False)
class _Widener:
    layouts: dict[Var, Layout]
    origin: dict[Var, Var]
    wide: dict[Var, Var] = field(default_factory=dict)  # what is read -> the value in the wide dtype to read instead

    def graph(self, graph: Graph) -> Graph:
        makers = {v: e for e in graph.eqns for v in e.outs}
        readers = Counter(v for e in graph.eqns for v in e.reads)
        readers.update(vars_in(graph.outputs))
        dtypes: dict[Eqn, torch.dtype] = {}  # of the equations that are to run in the wide dtype
        for e in graph.eqns:
            if e.op is WIDEN:
                dtypes.update(dict.fromkeys(_chain(e.operands[0], makers, readers), e.outs[0].dtype))
        eqns: list[Eqn] = []
        for e in graph.eqns:
            dtype, e = dtypes.get(e), e.with_args(lambda v: self.wide.get(v, v))
            if dtype is not None:
                eqns += self.widened(e, dtype)
            elif e.op is WIDEN:
                eqns += self.cast(e)
            elif isinstance(e.op, (Scan, Call)):
                eqns.append(replace(e, op=replace(e.op, body=self.graph(e.op.body))))
            else:
                eqns.append(e)
        outputs = tuple(self.wide.get(v, v) if isinstance(v, Var) else v for v in graph.outputs)
        return Graph(graph.inputs, tuple(eqns), outputs)

    def widened(self, e: Eqn, dtype: torch.dtype) -> list[Eqn]:
        """A reduction, or a view of one, in the wide dtype; the cast comes before a reduction."""
        (operand,) = e.operands
        out = self.wide[e.outs[0]] = self.like(e.outs[0], dtype)
        if operand.dtype == dtype:
            return [replace(e, outs=(out,))]
        part = self.like(operand, dtype)
        cast = replace(e, op=_TO, args=(operand,), kwargs={"dtype": dtype}, outs=(part,))
        return [cast, e.with_args(lambda v: part, (out,))]

    def cast(self, e: Eqn) -> list[Eqn]:
        """A cast, unless it has moved: then its result is what arrives wide already."""
        (operand,), (out,) = e.operands, e.outs
        if operand.dtype == out.dtype:
            self.wide[out] = operand
            return []
        return [replace(e, op=_TO, args=(operand,), kwargs={"dtype": out.dtype})]

    def like(self, v: Var, dtype: torch.dtype) -> Var:
        new = Var(f"{v.name}_wide", v.shape, dtype)
        self.layouts[new] = self.layouts[v]
        if v in self.origin:
            self.origin[new] = self.origin[v]
        return new


def _chain(v: Var, makers: dict[Var, Eqn], readers: Counter[Var]) -> list[Eqn]:
    """The reduction that made v, and the views of it on the way, if nothing else reads them."""
    found: list[Eqn] = []
    while readers[v] == 1 and (e := makers.get(v)) is not None and len(e.operands) == 1:
        if isinstance(e.op, (AllReduce, ReduceScatter)):
            return [*found, e]
        if not is_view(e):
            break
        found.append(e)
        (v,) = e.operands
    return []
