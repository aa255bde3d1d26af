"""Whether a table has the right actions, whatever their order: each once, none missing, each where its stage lives."""

from __future__ import annotations

from collections.abc import Iterator

from vescale_fn.schedules.pipelines import messages
from vescale_fn.schedules.pipelines.faults import Fault
from vescale_fn.schedules.pipelines.table import Action, Table


def structure_fault(table: Table) -> Fault | None:
    """The first action that is doubled, missing, or in the wrong place.

    Every stage runs every microbatch forward once, and, if the table trains, backward once: as a B, or as an I and
    a W. If the table has transfers, every value that changes ranks is sent and received once.
    """
    seen: set[Action] = set()
    for rank, a in table.actions():
        if (reason := _misplaced(table, rank, a)) or (a in seen and (reason := _doubled(table.rows[rank], a))):
            return Fault(table.name, rank, a, reason)
        seen.add(a)
    return _missing_computation(table, seen) or (_missing_transfer(table, seen) if table.has_transfers else None)


def _misplaced(table: Table, rank: int, a: Action) -> str:
    if not 0 <= a.stage < table.stages:
        return messages.outside("stage", a.stage, table.stages)
    if not 0 <= a.microbatch < table.microbatches:
        return messages.outside("microbatch", a.microbatch, table.microbatches)
    if table.placement[a.stage] != rank:
        return messages.wrong_rank(a.stage, table.placement[a.stage])
    if len(a.kind) > 1 and (other := a.stage + _TOWARDS[a.kind]) in (-1, table.stages):
        return messages.no_such_transfer(a.stage, "is the first" if other < 0 else "is the last")
    if len(a.kind) > 1 and table.placement[other] == rank:
        return messages.no_such_transfer(a.stage, f"and stage {other} live on one rank")
    return ""


def _doubled(row: tuple[Action, ...], a: Action) -> str:
    first = row.index(a)
    return messages.doubled(first, row.index(a, first + 1))


def _missing_computation(table: Table, seen: set[Action]) -> Fault | None:
    trains = table.trains
    for stage, rank in enumerate(table.placement):
        for k in range(table.microbatches):
            f, b, i, w = (Action(kind, stage, k) for kind in "FBIW")
            if f not in seen:
                reason = messages.missing(f"microbatch {k} never runs forward on stage {stage}", rank)
                return Fault(table.name, rank, f, reason)
            if not trains:
                continue
            whole, halves = b in seen, (i in seen, w in seen)
            if whole and any(halves):
                return Fault(table.name, rank, b, messages.whole_and_half(b, i if halves[0] else w))
            if not whole and halves != (True, True):
                what = f"microbatch {k} never runs {_PART[halves]} on stage {stage}"
                return Fault(table.name, rank, _LACKS[halves](stage, k), messages.missing(what, rank))
    return None


_PART = {
    (False, False): "backward",
    (True, False): "the weight half of backward",
    (False, True): "the input half of backward",
}
_LACKS = {
    (False, False): lambda s, k: Action("B", s, k),
    (True, False): lambda s, k: Action("W", s, k),
    (False, True): lambda s, k: Action("I", s, k),
}

# The stage at the other end of a transfer, seen from the action's own.
_TOWARDS = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}


def _missing_transfer(table: Table, seen: set[Action]) -> Fault | None:
    for a, rank in _transfers(table):
        if a not in seen:
            what = f"stage {a.stage + _TOWARDS[a.kind]} lives on another rank than stage {a.stage}"
            return Fault(table.name, rank, a, messages.missing(what, rank))
    return None


def _transfers(table: Table) -> Iterator[tuple[Action, int]]:
    """Every transfer that the table must have, and its rank."""
    for s, (here, there) in enumerate(zip(table.placement, table.placement[1:])):
        if here == there:
            continue
        for k in range(table.microbatches):
            yield Action("SEND_F", s, k), here
            yield Action("RECV_F", s + 1, k), there
            if table.trains:
                yield Action("SEND_B", s + 1, k), there
                yield Action("RECV_B", s, k), here
