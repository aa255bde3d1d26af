"""Equal equations are computed once.

Sub-programs are left alone: a rematerialised body is there to be computed twice. What backward computes again is not
kept since forward either, but for views, which cost no memory, and for what a reshard brings: that is asked for
by `keep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vescale_fn.program import Program
from vescale_fn.sharding.comm import COMMS
from vescale_fn.sharding.graph import Eqn, Var, is_view, map_vars
from vescale_fn.sharding.layout import MANUAL, Layout


def share_common(program: Program) -> Program:
    """One equation for every set of equal pure equations; later readers take the first one's results."""
    seen: dict[Any, Eqn] = {}
    same: dict[Var, Var] = {}
    eqns = []
    for e in program.graph.eqns:
        e = e.with_args(lambda v: same.get(v, v))
        key = _key(e, program.layouts)
        first = seen.setdefault(key, e) if key is not None else e
        if first is e:
            eqns.append(e)
        else:
            same.update(zip(e.outs, first.outs))
    outputs = tuple(same.get(v, v) if isinstance(v, Var) else v for v in program.graph.outputs)
    return replace(program, graph=replace(program.graph, eqns=tuple(eqns), outputs=outputs))


def _key(e: Eqn, layouts: Mapping[Var, Layout]) -> Any:
    """Equal keys mean equal results, as parts of equal global values; None when the equation must stay."""
    if not (is_pure(e.op) or isinstance(e.op, COMMS)):
        return None
    results = tuple((v.shape, v.dtype, layouts.get(v)) for v in e.outs)
    kept = is_view(e) or (isinstance(e.op, COMMS) and not any(MANUAL in layouts[v].states for v in e.outs))
    key = ("" if kept else e.phase, e.op, _frozen(map_vars(e.args, _Ref)), _frozen(map_vars(e.kwargs, _Ref)), results)
    try:
        hash(key)
    except TypeError:
        return None
    return key


class _Ref:
    """A Var as part of a key: equal only to itself."""

    def __init__(self, var: Var) -> None:
        self.var = var

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ref) and self.var is other.var

    def __hash__(self) -> int:
        return id(self.var)


def is_pure(op: Any) -> bool:
    """Whether an operation writes nothing and draws nothing: it may run at any time, and as often as we like."""
    known = isinstance(op, torch._ops.OpOverload)
    return known and not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def _frozen(tree: Any) -> Any:
    """`tree` as nested tuples; numbers keep their type (1 and 1.0 and True are different arguments)."""
    if isinstance(tree, (list, tuple)):
        return (type(tree), *map(_frozen, tree))
    if isinstance(tree, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in tree.items()))
    return (type(tree), str(tree)) if isinstance(tree, float) else (type(tree), tree)
