"""Partition: from a global graph and its plan to the program of one rank.

Each equation gets its operands in the layouts the plan asks for (collectives are inserted where a value has another,
once per value and layout) and is rewritten for local tensors by its handler. Sub-programs are partitioned in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vescale_fn.localize import HANDLERS, Builder, Context
from vescale_fn.names import Names
from vescale_fn.primitives import RESHARD
from vescale_fn.program import Program
from vescale_fn.regions.lower import OPS as REGION_OPS
from vescale_fn.regions.lower import localize as localize_region
from vescale_fn.remat import NAMED
from vescale_fn.sharding.cost import chain_bytes
from vescale_fn.sharding.graph import Call, Eqn, Graph, Pipeline, Scan, Source, Var
from vescale_fn.sharding.layout import MANUAL, Layout, shifted
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.reshard import plan as plan_reshard


def partition(plan: Plan) -> Program:
    """The program of one rank for a solved graph."""
    layouts: dict[Var, Layout] = {}
    origin: dict[Var, Var] = {}
    graph = _Partitioner(plan, layouts, Names(), origin).graph(plan.graph, plan.outputs)
    return Program(plan.mesh, graph, layouts, origin, messages=plan.messages)


def slice_layout(layout: Layout) -> Layout:
    """The layout of x[i] for x of `layout`, whose dim 0 is whole."""
    states = {a: shifted(s, -1) for a, s in zip(layout.mesh.names, layout.states)}
    return Layout.of(layout.mesh, layout.shape[1:], states)


@dataclass(eq=False)
class _Partitioner:
    plan: Plan
    layouts: dict[Var, Layout]  # of every local Var, shared with sub-programs
    names: Names
    origin: dict[Var, Var]
    local: dict[Var, Var] = field(default_factory=dict)  # global Var -> local Var in its own layout
    obtained: dict[Var, list[Var]] = field(default_factory=dict)  # global Var -> the same value in all layouts at hand
    makers: dict[Var, Eqn] = field(default_factory=dict)
    builder: Builder = field(init=False)
    is_body: bool = False  # whether the graph is that of a sub-program

    def __post_init__(self) -> None:
        self.builder = Builder(self.layouts, self.names)

    def graph(self, graph: Graph, outputs: Sequence[Layout | None]) -> Graph:
        inputs = tuple(
            self.define(v, self.builder.var(v.name, v.shape, v.dtype, self.plan.values.get(v))) for v in graph.inputs
        )
        for e in graph.eqns:
            self.equation(e)
        last = graph.eqns[-1] if graph.eqns else None
        source, phase = (last.source, last.phase) if last else (Source(), "forward")
        results = tuple(
            self.convert(v, to, source, phase) if isinstance(v, Var) and to is not None else self.local.get(v, v)
            for v, to in zip(graph.outputs, outputs)
        )
        return Graph(inputs, tuple(self.builder.eqns), results)

    def define(self, v: Var, local: Var) -> Var:
        self.local[v] = local
        self.obtained[v] = [local]
        self.origin[local] = v
        return local

    def convert(self, v: Var, to: Layout, source: Source, phase: str) -> Var:
        """The local Var that holds v in layout `to`, from the cheapest layout in which v is at hand."""
        have = self.obtained[v]
        for h in have:
            if self.layouts[h] == to:
                return h
        start = min(have, key=lambda h: chain_bytes(plan_reshard(self.layouts[h], to), v.dtype))
        if self.layouts[start].partial and v in self.makers:  # a reduction belongs to what made the sum
            source, phase = self.makers[v].source, self.makers[v].phase
        steps = self.builder.reshard(start, to, source, phase)
        self.origin.update(dict.fromkeys(steps, v))
        have += steps
        return have[-1]

    def equation(self, e: Eqn) -> None:
        ins = self.plan.operands[e]
        slots = iter(zip(e.operands, ins))

        def deliver(v: Var) -> Any:
            if not v.is_tensor:
                return self.local[v]
            operand, layout = next(slots)
            return self.convert(operand, layout, e.source, e.phase)

        local = e.with_args(deliver)
        scalar = Layout.of(self.plan.mesh, ())  # stands for results that are numbers, or not made
        outs = tuple(self.plan.values[v] if v.is_tensor else scalar for v in e.outs)
        ctx = Context(self.builder, e, ins, outs, self.plan.letters.get(e, {}))
        for v, result in zip(e.outs, self.rewrite(ctx, local), strict=True):
            self.define(v, result)
            self.makers[v] = e

    def rewrite(self, ctx: Context, local: Eqn) -> tuple[Var, ...]:
        """Local equations for one global equation; its results."""
        e = ctx.eqn
        if isinstance(e.op, (Scan, Call)):
            return ctx.emit(self.sub_program(e), local.args, local.kwargs)
        if e.op in (RESHARD, NAMED):  # has done its work: the operand arrives in its layout
            return (local.args[0],)
        if e.op in REGION_OPS:
            return localize_region(ctx, local.args)
        handler = HANDLERS.get(e.op)
        if handler is None or (e.outs and not (ctx.letters or _has_state(ctx))):
            # A body, or a region, was traced on contiguous tensors; what it is given need not be.
            strided = self.is_body or any(MANUAL in x.states for x in ctx.ins)
            views = strided and e.op is torch.ops.aten.view.default
            return ctx.emit(torch.ops.aten.reshape.default if views else e.op, local.args, local.kwargs)
        return handler(ctx, local.args, local.kwargs)

    def sub_program(self, e: Eqn) -> Scan | Call:
        """The sub-program of e with a body of local equations."""
        op: Scan | Call = e.op
        outs = [self.plan.values.get(v) for v in e.outs]
        if isinstance(op, Scan):
            outs[op.num_carry :] = [slice_layout(x) if x is not None else None for x in outs[op.num_carry :]]
        if isinstance(op, Pipeline):  # a sum belongs to the rank that adds it up
            outs = [x if x is None else x.with_state(op.axis, MANUAL) for x in outs]
        inside = _Partitioner(self.plan, self.layouts, self.names, self.origin, is_body=True)
        body = inside.graph(op.body, outs)
        return replace(op, body=body)


def _has_state(ctx: Context) -> bool:
    return not all(x.is_local for x in (*ctx.ins, *ctx.outs))
