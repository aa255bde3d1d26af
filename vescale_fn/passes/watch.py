"""Checks that values are finite, behind every equation that computes: what `vf.debug(nans=True)` adds to a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from vescale_fn.nonfinite import ArgumentCheck, check_of, worth_checking
from vescale_fn.program import AxisIndex, Program
from vescale_fn.sharding.comm import COMMS, AllReduce, ReduceScatter
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, is_view


def watch_values(program: Program, step: str, paths: Sequence[str], infs: bool) -> Program:
    """The program with checks. It must not write in place: a check reads operands after the equation has run.

    paths: what its inputs are called, as far as they are arguments.
    """
    graph = _watched(program.graph, program, step, infs, count(1))
    names = [*paths, *["a captured value"] * (len(graph.inputs) - len(paths))]
    given = [(name, v) for name, v in zip(names, graph.inputs) if v.is_tensor and v.dtype.is_floating_point]
    first = ArgumentCheck(step, program.mesh, [name for name, _ in given])
    check = Eqn(first, (AxisIndex(program.mesh.names), [v for _, v in given]), {}, ())
    return replace(program, graph=replace(graph, eqns=(check, *graph.eqns)))


def _watched(graph: Graph, program: Program, step: str, infs: bool, order: Iterator[int]) -> Graph:
    eqns: list[Eqn] = []
    for e in graph.eqns:
        if isinstance(e.op, (Scan, Call)):
            eqns.append(replace(e, op=replace(e.op, body=_watched(e.op.body, program, step, infs, order))))
            continue
        eqns.append(e)
        if not _moves(e) and worth_checking(e):
            check, results, operands = check_of(e, program, step, infs, next(order))
            eqns.append(Eqn(check, (AxisIndex(program.mesh.names), results, operands), {}, (), e.source, e.phase))
    return replace(graph, eqns=tuple(eqns))


def _moves(e: Eqn) -> bool:
    """Whether an equation only moves values."""
    return is_view(e) or (isinstance(e.op, COMMS) and not isinstance(e.op, (AllReduce, ReduceScatter)))
