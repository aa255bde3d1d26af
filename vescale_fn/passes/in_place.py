"""Optimizer updates write into donated state.

An update of a list of parameters is functional in the trace. Where every operand that it would write dies there and
belongs to the program (donated, or made inside), the in-place form takes its place: no second copy of parameters and
moments.
"""

from __future__ import annotations

from dataclasses import replace

from vescale_fn.fused import IN_PLACE, written
from vescale_fn.liveness import sole_readers
from vescale_fn.program import Program
from vescale_fn.sharding.graph import vars_in


def update_in_place(program: Program) -> Program:
    """The program with in-place updates wherever nobody can see the difference."""
    graph = program.graph
    owned = frozenset(v for i, v in enumerate(graph.inputs) if i in program.donated)
    updates = [e for e in graph.eqns if e.op in IN_PLACE]
    free = sole_readers(graph, updates, owned)
    eqns = tuple(
        replace(e, op=IN_PLACE[e.op]) if e in free and free[e].issuperset(vars_in(written(e.args))) else e
        for e in graph.eqns
    )
    return replace(program, graph=replace(graph, eqns=eqns))
