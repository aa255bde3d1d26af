"""When the values of a graph die, and which may share memory: what generated code frees, and what it may overwrite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch

from vescale_fn.sharding.comm import COLLECTIVES, COMMS, Slice
from vescale_fn.sharding.graph import Eqn, Graph, Var, vars_in

# Modules whose functions write nothing, and return nothing or memory of their own.
_CLEAN = frozenset({"vescale_fn.local_ops", "vescale_fn.local_print", "vescale_fn.nonfinite"})


def last_uses(graph: Graph) -> dict[int, tuple[Var, ...]]:
    """The Vars that nothing reads after equation i (-1: after the inputs arrive), in order of definition.

    Outputs of the graph never die. A result that is never read dies at its own equation.
    """
    last = dict.fromkeys(graph.inputs, -1)
    for i, e in enumerate(graph.eqns):
        last.update(dict.fromkeys((*e.reads, *e.outs), i))
    for v in vars_in(graph.outputs):
        last.pop(v, None)
    order = {v: i for i, v in enumerate((*graph.inputs, *(v for e in graph.eqns for v in e.outs)))}
    dying: dict[int, list[Var]] = {}
    for v in sorted(last, key=order.__getitem__):
        dying.setdefault(last[v], []).append(v)
    return {i: tuple(vs) for i, vs in dying.items()}


def overwritable(graph: Graph, owned_inputs: frozenset[Var] = frozenset()) -> dict[Eqn, tuple[bool, ...]]:
    """For each collective, which operands it may overwrite: nothing reads their memory afterwards.

    `owned_inputs`: inputs whose memory belongs to the program (donated).
    """
    free = sole_readers(graph, [e for e in graph.eqns if isinstance(e.op, COLLECTIVES)], owned_inputs)
    return {e: tuple(v in dying for v in e.operands) for e, dying in free.items()}


def sole_readers(graph: Graph, eqns: Iterable[Eqn], owned_inputs: frozenset[Var]) -> dict[Eqn, frozenset[Var]]:
    """For each of `eqns`, its operands whose memory it is the last to read, and which the program owns."""
    family = _families(graph)
    last: dict[Var, int] = {}
    for i, e in enumerate(graph.eqns):
        last.update(dict.fromkeys((family[v] for v in e.reads), i))
    kept = {family[v] for v in graph.inputs if v not in owned_inputs} | {family[v] for v in vars_in(graph.outputs)}
    position = {e: i for i, e in enumerate(graph.eqns)}

    def dying(e: Eqn) -> frozenset[Var]:
        reads = Counter(family[v] for v in e.operands)
        return frozenset(
            v for v in e.operands if family[v] not in kept and last[family[v]] == position[e] and reads[family[v]] == 1
        )

    return {e: dying(e) for e in eqns}


def waits(graph: Graph) -> dict[Eqn, int]:
    """Collectives with local work between their start and the first need of their results, and the equation before
    which each must be finished: one that reads a result, or that may write to an operand."""
    family, n = _families(graph), len(graph.eqns)
    first_read: dict[Var, int] = {}
    writes: list[tuple[int, set[Var]]] = []  # equations that may write, and what they may write to
    work = [0]  # local equations before each equation
    for i, e in enumerate(graph.eqns):
        for v in e.reads:
            first_read.setdefault(v, i)
        if may_write(e.op):
            writes.append((i, {family[v] for v in e.operands}))
        work.append(work[-1] + (not isinstance(e.op, COLLECTIVES)))
    found = {}
    for i, e in enumerate(graph.eqns):
        if isinstance(e.op, COLLECTIVES):
            operands = {family[v] for v in e.operands}
            written = next((j for j, touched in writes if j > i and touched & operands), n)
            end = min([written, *(first_read.get(v, n) for v in e.outs)])
            if work[end] > work[i + 1]:
                found[e] = end
    return found


def _families(graph: Graph) -> Mapping[Var, Var]:
    """For each Var a representative of all Vars that may share its memory."""
    parent: dict[Var, Var] = {v: v for v in graph.inputs}

    def root(v: Var) -> Var:
        while parent[v] is not v:
            v = parent[v]
        return v

    for e in graph.eqns:
        shared = [root(v) for v in _shared(e)]
        parent.update((o, shared[0] if shared else o) for o in e.outs)
        parent.update((v, shared[0]) for v in shared)
    return {v: root(v) for v in parent}


def _shared(e: Eqn) -> tuple[Var, ...]:
    """Operands whose memory the results of e may share."""
    if not may_alias(e.op):
        return ()
    if isinstance(e.op, torch._ops.OpOverload) and torch.Tag.maybe_aliasing_or_mutating not in e.op.tags:
        arguments = e.op._schema.arguments
        given = {**dict(zip((a.name for a in arguments), e.args)), **e.kwargs}
        declared = [given[a.name] for a in arguments if a.alias_info is not None and a.name in given]
        return tuple(vars_in(declared)) if declared else e.operands
    return e.operands


@cache
def may_alias(op: Any) -> bool:
    """Whether results of `op` may share memory with its operands. Functions that we do not know: yes."""
    if isinstance(op, torch._ops.OpOverload):
        views = any(r.alias_info is not None for r in op._schema.returns)
        return views or op is torch.ops.aten._unsafe_view.default or torch.Tag.maybe_aliasing_or_mutating in op.tags
    return not isinstance(op, (*COLLECTIVES, Slice)) and not _makes_new(op)


@cache
def may_write(op: Any) -> bool:
    """Whether `op` may write to its operands. Functions that we do not know: yes."""
    if isinstance(op, torch._ops.OpOverload):
        return bool(op._schema.is_mutable)
    return not isinstance(op, COMMS) and not _makes_new(op)


def _makes_new(op: Any) -> bool:
    """Whether `op` writes nothing and returns memory of its own."""
    return getattr(op, "__module__", "") in _CLEAN
