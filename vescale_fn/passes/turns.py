"""State that lies in host memory is on the device part by part.

The trace moves all of it at the start of an update and back at its end. Here each tensor is moved just before it is
read, and back as soon as it is there; an update of many parameters is made in parts, so that a device holds the state
of one part at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from vescale_fn.fused import IN_PLACE
from vescale_fn.host import TO_DEVICE, TO_HOST
from vescale_fn.passes.apart import rows_of
from vescale_fn.program import Program
from vescale_fn.sharding.graph import Eqn, Var, vars_in

PART = 32 << 20  # bytes of state on the device at a time, unless a parameter has more


def move_in_turn(program: Program) -> Program:
    """The program with host memory moved in parts."""
    moves = {e.outs[0]: e for e in program.graph.eqns if e.op is TO_DEVICE}
    if not moves:
        return program
    parts = (p for e in program.graph.eqns for p in (_parts(program, e, moves) if e.op in IN_PLACE else (e,)))
    return replace(program, graph=replace(program.graph, eqns=tuple(_near(tuple(parts), moves))))


def _parts(program: Program, e: Eqn, moves: Mapping[Var, Eqn]) -> Iterator[Eqn]:
    """An update of a list of parameters as updates of as many as have PART bytes of state that is moved."""
    lists = [a for a in e.args if isinstance(a, (list, tuple)) and a]
    rows: list[list[int]] = [[]]
    held = 0
    for i in range(len(lists[0]) if lists else 0):
        moved = sum(program.local_bytes(v) for v in vars_in([a[i] for a in lists]) if v in moves)
        if rows[-1] and held + moved > PART:
            rows.append([])
            held = 0
        rows[-1].append(i)
        held += moved
    yield from rows_of(e, rows)


def _near(eqns: tuple[Eqn, ...], moves: Mapping[Var, Eqn]) -> Iterator[Eqn]:
    """Moves to the device before what reads them first, those to the host after what they read is made."""
    back: dict[Var, list[Eqn]] = {}
    for e in eqns:
        if e.op is TO_HOST:
            back.setdefault(e.operands[0], []).append(e)
    made = {v for e in eqns for v in e.outs}
    waiting = dict(moves)

    def placed(e: Eqn) -> Iterator[Eqn]:
        for v in e.reads:
            if v in waiting:
                yield from placed(waiting.pop(v))
        yield e
        for v in e.outs:
            for b in back.get(v, ()):
                yield from placed(b)

    for e in eqns:
        if e.op is not TO_DEVICE and not (e.op is TO_HOST and e.operands[0] in made):
            yield from placed(e)
    while waiting:
        yield from placed(waiting.pop(next(iter(waiting))))
