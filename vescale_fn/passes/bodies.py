"""Passes on the bodies of loops and calls, as on programs of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vescale_fn.program import Program
from vescale_fn.sharding.graph import Call, Scan


def everywhere(run: Callable[[Program], Program], program: Program) -> Program:
    """The program with a pass applied to every body, and then to itself. No body owns what it is given."""
    eqns = []
    for e in program.graph.eqns:
        if isinstance(e.op, (Scan, Call)):
            body = everywhere(run, replace(program, graph=e.op.body, donated=frozenset()))
            program = replace(program, layouts=body.layouts, origin=body.origin)
            e = replace(e, op=replace(e.op, body=body.graph))
        eqns.append(e)
    return run(replace(program, graph=replace(program.graph, eqns=tuple(eqns))))
