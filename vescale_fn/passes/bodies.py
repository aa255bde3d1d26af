"""Passes on the bodies of loops and calls, as on programs of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vescale_fn.program import Program
from vescale_fn.sharding.graph import Call, Pipeline, Scan


def everywhere(run: Callable[[Program], Program], program: Program) -> Program:
    """The program with a pass applied to every body, and then to itself. No body owns what it is given. The equations
    of a pipeline's body run on different ranks at different times: nothing is moved or merged among them."""
    return run(_inside(run, program))


def _inside(run: Callable[[Program], Program], program: Program) -> Program:
    """The program with a pass applied to every body."""
    eqns = []
    for e in program.graph.eqns:
        if isinstance(e.op, (Scan, Call)):
            deeper = _inside if isinstance(e.op, Pipeline) else everywhere
            body = deeper(run, replace(program, graph=e.op.body, donated=frozenset()))
            program = replace(program, layouts=body.layouts, origin=body.origin)
            e = replace(e, op=replace(e.op, body=body.graph))
        eqns.append(e)
    return replace(program, graph=replace(program.graph, eqns=tuple(eqns)))
