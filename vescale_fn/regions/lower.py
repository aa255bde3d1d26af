"""What solver and partition need to know about regions.

Along a manual axis every value in a region is `Manual`: the solver leaves it alone. Along the other axes the edges of a
region, and its collectives, have rules like any operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from vescale_fn.program import AxisIndex
from vescale_fn.regions import ops
from vescale_fn.regions.moves import MOVES
from vescale_fn.regions.ops import boundary_layout, group_of
from vescale_fn.sharding import comm
from vescale_fn.sharding.candidates import Strategy
from vescale_fn.sharding.graph import Call, Eqn, Graph, Pipeline, Scan, Var, equations, variables
from vescale_fn.sharding.layout import MANUAL, Layout, State
from vescale_fn.sharding.problem import Regions
from vescale_fn.sharding.rules.rule import Dims, Rule

# ---- for the solver


def regions_of(graph: Graph) -> Regions:
    """Which values are manual along which axes, and what the edges of regions ask for."""
    manual: dict[Var, frozenset[str]] = {}
    boundary: dict[Eqn, Mapping[str, Strategy]] = {}
    _collect(graph, manual, boundary)
    outside: dict[Var, Mapping[str, State]] = {}
    for e in equations(graph):
        if isinstance(e.op, Pipeline):
            for v in variables(e.op.body):
                manual[v] = manual.get(v, frozenset()) | {e.op.axis}
            outside.update((v, {e.op.axis: s}) for v in e.op.body.inputs if (s := e.op.outside.get(v.name)) is not None)
    return Regions(manual, boundary, outside)


def _collect(graph: Graph, manual: dict[Var, frozenset[str]], boundary: dict[Eqn, Mapping[str, Strategy]]) -> None:
    for e in graph.eqns:
        axes = frozenset[str]().union(*(manual.get(v, ()) for v in e.operands))
        if e.op is ops.TO_LOCAL:
            layout = _edge_layout(e, e.operands[0])
            boundary[e] = {a: Strategy((layout[a],), (MANUAL,)) for a in layout.mesh.names}
            axes |= frozenset(layout.mesh.names)
        elif e.op is ops.TO_GLOBAL:
            layout = _edge_layout(e, e.outs[0])
            boundary[e] = {a: Strategy((MANUAL,), (layout[a],)) for a in layout.mesh.names}
            axes -= frozenset(layout.mesh.names)
        elif e.op is ops.AXIS_INDEX:
            axes |= frozenset(group_of(e.args[0]).names)
        results = [axes] * len(e.outs)
        if isinstance(e.op, (Scan, Call)):
            results = _enter(e, manual, boundary)
        manual.update((v, a) for v, a in zip(e.outs, results) if a)


def _enter(
    e: Eqn, manual: dict[Var, frozenset[str]], boundary: dict[Eqn, Mapping[str, Strategy]]
) -> list[frozenset[str]]:
    """The manual axes of the results of a sub-program. A carry is manual where the loop makes it so."""
    body, none = e.op.body, frozenset[str]()
    manual.update((v, manual[a]) for v, a in zip(body.inputs, e.args) if isinstance(a, Var) and a in manual)
    first = e.op.num_consts if isinstance(e.op, Scan) else 0
    carries = body.inputs[first : first + e.op.num_carry] if isinstance(e.op, Scan) else ()
    while True:
        _collect(body, manual, boundary)
        results = [manual.get(v, none) if isinstance(v, Var) else none for v in body.outputs]
        grown = {v: manual.get(v, none) | axes for v, axes in zip(carries, results)}
        if all(manual.get(v, none) == axes for v, axes in grown.items()):
            return results
        manual.update(grown)


def _edge_layout(e: Eqn, outside: Var) -> Layout:
    return boundary_layout(e.args[2], e.args[1], outside.shape)


# ---- rules, for the axes that are not manual


def _edge_rule(e: Eqn) -> Rule:
    """Dims pass the edge of a region; the digits that its axes take out of a dim stay outside."""
    inward = e.op is ops.TO_LOCAL
    outside = e.operands[0] if inward else e.outs[0]
    layout = _edge_layout(e, outside)
    sizes: dict[str, int] = {}
    outer: list[tuple[str, ...]] = []
    inner: list[tuple[str, ...]] = []
    for d, size in enumerate(outside.shape):
        kept: list[str] = []
        every: list[str] = []
        done = 1
        for axis, shard in layout.shards(d):
            n = layout.mesh[axis]
            if shard.pre > done:
                _add(sizes, f"d{d}_{len(every)}", shard.pre // done, every, kept)
            _add(sizes, f"{axis}_{d}", n, every)
            done = shard.pre * n
        _add(sizes, f"d{d}_{len(every)}", size // done, every, kept)
        outer.append(tuple(every))
        inner.append(tuple(kept))
    taken = frozenset(x for dims in outer for x in dims) - frozenset(x for dims in inner for x in dims)
    sides: list[Dims] = [tuple(outer), tuple(inner)]
    operand, result = sides if inward else sides[::-1]
    return Rule((operand,), (result,), sizes, whole=taken, linear=(frozenset({0}),), through=frozenset({0}))


def _add(sizes: dict[str, int], letter: str, size: int, *dims: list[str]) -> None:
    if size > 1:
        sizes[letter] = size
        for d in dims:
            d.append(letter)


def _collective_rule(*busy: int) -> Callable[[Eqn], Rule]:
    """Dims pass a collective, but for those it works on (arguments at these places), which must be whole."""

    def rule(e: Eqn) -> Rule:
        dims = {e.args[i] for i in busy}
        (x,), (y,) = e.operands, e.outs
        operand = [((f"d{i}",) if i not in dims else (f"in{i}",)) if n > 1 else () for i, n in enumerate(x.shape)]
        result = [((f"d{i}",) if i not in dims else (f"out{i}",)) if n > 1 else () for i, n in enumerate(y.shape)]
        sizes = {d[0]: n for d, n in zip((*operand, *result), (*x.shape, *y.shape)) if d}
        whole = frozenset(x for x in sizes if not x.startswith("d"))
        linear = () if e.op is ops.ALL_REDUCE and e.args[2] != "sum" else (frozenset({0}),)
        return Rule((tuple(operand),), (tuple(result),), sizes, whole=whole, linear=linear)

    return rule


RULES: Mapping[Any, Callable[[Eqn], Rule]] = {
    ops.TO_LOCAL: _edge_rule,
    ops.TO_GLOBAL: _edge_rule,
    **dict.fromkeys([ops.CAST, ops.KEEP, ops.ALL_REDUCE, ops.PPERMUTE, ops.BROADCAST], _collective_rule()),
    **dict.fromkeys([ops.ALL_GATHER, ops.REDUCE_SCATTER, ops.OWN_SLICE], _collective_rule(2)),
    ops.ALL_TO_ALL: _collective_rule(2, 3),
}

# ---- local equations


def _names(axes: str) -> tuple[str, ...]:
    return group_of(axes).names


COLLECTIVES: Mapping[Any, Callable[..., Any]] = {
    ops.ALL_REDUCE: lambda axes, kind, _: comm.AllReduce(_names(axes), kind),
    ops.ALL_GATHER: lambda axes, dim, _: comm.AllGather(_names(axes), dim),
    ops.REDUCE_SCATTER: lambda axes, dim, _: comm.ReduceScatter(_names(axes), dim),
    ops.OWN_SLICE: lambda axes, dim, _: comm.Slice(_names(axes), dim),
    ops.ALL_TO_ALL: lambda axes, split, concat, _: comm.AllToAll(_names(axes), split, concat),
    ops.PPERMUTE: lambda axes, pairs, _: comm.PPermute(_names(axes), tuple(zip(pairs[::2], pairs[1::2]))),
    ops.BROADCAST: lambda axes, source, _: comm.Broadcast(_names(axes), source),
}


ZEROS = torch.ops.aten.zeros_like.default


def localize(ctx: Any, args: tuple[Any, ...]) -> tuple[Var, ...]:
    """Local equations of an operation of a region."""
    op = ctx.eqn.op
    if op in COLLECTIVES:
        operand, axes, *rest = args
        if not several(axes):
            return ctx.emit(ZEROS, (operand,)) if is_silent(op, rest) else (operand,)
        return ctx.emit(COLLECTIVES[op](axes, *rest), (operand,))  # type: ignore[no-any-return]
    if op is ops.AXIS_INDEX:
        index = AxisIndex(_names(args[0]))
        kwargs = {"dtype": torch.int64, "device": args[1]}
        return ctx.emit(torch.ops.aten.full.default, ((), index), kwargs)  # type: ignore[no-any-return]
    if op is ops.RAGGED_ALL_TO_ALL:
        return ctx.emit(comm.RaggedAllToAll(_names(args[6])), args[:6])  # type: ignore[no-any-return]
    if op is ops.KEEP and several(args[1]):
        from vescale_fn.local_ops import keep

        return ctx.emit(keep, (args[0], AxisIndex(_names(args[1])), args[2]))  # type: ignore[no-any-return]
    if op is ops.CAST or op is ops.KEEP:  # the same tensor in another state
        return (args[0],)
    return ctx.emit(torch.ops.aten.alias.default, (args[0],))  # type: ignore[no-any-return]


def several(axes: str) -> bool:
    """Whether more than one rank takes part."""
    return prod(group_of(axes).sizes) > 1


def is_silent(op: Any, rest: Sequence[Any]) -> bool:
    """Whether a collective of one rank leaves it without its own value: it does not even send to itself."""
    return op is ops.PPERMUTE and not rest[0]


OPS = frozenset({*MOVES, ops.AXIS_INDEX, ops.RAGGED_ALL_TO_ALL})
