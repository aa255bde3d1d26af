"""Reductions start as soon as their operand exists.

Partition puts a reduction where its result is first read: for a gradient that is the optimizer, after the whole
backward pass. Early, it overlaps the rest of backward, and a reduce_scatter frees memory sooner.
"""

from __future__ import annotations

from dataclasses import replace

from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllReduce, ReduceScatter
from vescale_fn.sharding.graph import Eqn, Var


def reduce_early(program: Program) -> Program:
    """Every AllReduce and ReduceScatter right behind the equation that makes its operand."""
    waiting: dict[Var, list[Eqn]] = {}
    for e in program.graph.eqns:
        if _is_reduction(e):
            waiting.setdefault(e.operands[0], []).append(e)
    eqns: list[Eqn] = []

    def place(e: Eqn) -> None:
        eqns.append(e)
        for v in e.outs:
            for reduction in waiting.pop(v, ()):
                place(reduction)

    for v in program.graph.inputs:
        for reduction in waiting.pop(v, ()):
            place(reduction)
    for e in program.graph.eqns:
        if not _is_reduction(e):
            place(e)
    return replace(program, graph=replace(program.graph, eqns=tuple(eqns)))


def _is_reduction(e: Eqn) -> bool:
    return isinstance(e.op, (AllReduce, ReduceScatter)) and len(e.operands) == 1
