"""Views are taken when somebody reads them.

A view of what a collective brings would end the wait for it, long before its values are needed: the transposed
gradient of a weight, which only the update reads.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vescale_fn.program import Program
from vescale_fn.sharding.graph import Eqn, Var, is_view, vars_in

# Views too, as far as memory allows.
_RESHAPES = {torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default}


def view_late(program: Program) -> Program:
    """Every view right before the first equation that reads it and is no view itself."""
    graph = program.graph
    waiting: dict[Var, Eqn] = {}
    eqns: list[Eqn] = []

    def take(values: tuple[Var, ...]) -> None:
        for v in values:
            if v in waiting:
                e = waiting[v]
                for out in e.outs:
                    del waiting[out]
                take(e.reads)
                eqns.append(e)

    for e in graph.eqns:
        if shows(e):
            waiting.update(dict.fromkeys(e.outs, e))
        else:
            take(e.reads)
            eqns.append(e)
    take(tuple(vars_in(graph.outputs)))
    return replace(program, graph=replace(graph, eqns=tuple(eqns)))


def shows(e: Eqn) -> bool:
    """Whether e only shows its operand in another shape, as far as memory allows."""
    return is_view(e) or e.op in _RESHAPES
