"""Reductions that need no heavy work start with the step.

How many targets a batch has depends on the data alone. Where it is counted behind the model, everything waits there for
the sum over all ranks; counted first, it travels while the model computes.
"""

from __future__ import annotations

from dataclasses import replace

from vescale_fn.passes.common import is_pure
from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllReduce, ReduceScatter
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var
from vescale_fn.sharding.work import is_heavy

SMALL = 2**20  # bytes that may live longer for it


def reduce_first(program: Program) -> Program:
    """At the front, every reduction whose operand comes from inputs by local operations that are not heavy, if heavy
    work follows there that it can hide behind. What makes the operand moves along; when that would keep more than
    `SMALL` bytes of other values alive, the reduction stays."""
    graph = program.graph
    first_heavy = next((i for i, e in enumerate(graph.eqns) if hides(e)), len(graph.eqns))
    makers = _light(graph)
    moved: set[Eqn] = set()
    for e in graph.eqns[first_heavy:]:
        if isinstance(e.op, (AllReduce, ReduceScatter)) and all(v in makers or v in graph.inputs for v in e.operands):
            together = {e, *_ancestors(e, makers)}
            if _kept_bytes(program, together) <= SMALL:
                moved |= together
    front = [e for e in graph.eqns if e in moved]
    return replace(program, graph=replace(graph, eqns=(*front, *(e for e in graph.eqns if e not in moved))))


def hides(e: Eqn) -> bool:
    """Whether an equation takes long enough to hide a transfer: it is heavy, or a sub-program."""
    return is_heavy(e) or isinstance(e.op, (Scan, Call))


def _light(graph: Graph) -> dict[Var, Eqn]:
    """Values that come from inputs by light local operations, each with the equation that makes it."""
    makers: dict[Var, Eqn] = {}
    known = set(graph.inputs)
    for e in graph.eqns:
        if is_pure(e.op) and not is_heavy(e) and known.issuperset(e.reads):
            known.update(e.outs)
            makers.update(dict.fromkeys(e.outs, e))
    return makers


def _ancestors(e: Eqn, makers: dict[Var, Eqn]) -> set[Eqn]:
    """What makes the operands of e."""
    found: set[Eqn] = set()
    left = [makers[v] for v in e.reads if v in makers]
    while left:
        maker = left.pop()
        if maker not in found:
            found.add(maker)
            left += [makers[v] for v in maker.reads if v in makers]
    return found


def _kept_bytes(program: Program, moved: set[Eqn]) -> int:
    """Bytes of what the equations that stay behind read of the results of `moved`."""
    made = {v for e in moved for v in e.outs}
    others = {v for e in program.graph.eqns if e not in moved for v in e.reads}
    return sum(map(program.local_bytes, made & others))
