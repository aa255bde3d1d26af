"""What goes from rank to rank: sends and receives in the rows of a table, and whether they can run.

Messages between two ranks arrive in the order in which they were sent, and carry no name. Two engines are thought of:
a buffered one, whose sends return at once, and a blocking one, where a send waits for its receive. What runs blocking
runs buffered: it is the same order with fewer waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from vescale_fn.schedules.pipelines import messages
from vescale_fn.schedules.pipelines.costs import Costs
from vescale_fn.schedules.pipelines.faults import Fault
from vescale_fn.schedules.pipelines.order import walk
from vescale_fn.schedules.pipelines.table import Action, Table

Engine = Literal["blocking", "buffered"]

_OTHER_END = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}


def with_transfers(table: Table) -> Table:
    """The table with its sends and receives, which must have none yet.

    A value is sent right after it is computed, and received at the same moment of a run with equal costs. Every row
    is then a part of one common order of all actions in which each send stands beside its receive; therefore no
    engine, not even a blocking one, can deadlock, and messages match in order.

    >>> print(with_transfers(Table.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])))
    table: 2 ranks, 2 stages, 2 microbatches
    rank 0  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1  1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    rows: list[list[Action]] = [[] for _ in table.rows]
    for _, _, rank, _, a in sorted(_moments(table)):
        rows[rank].append(a)
        if len(a.kind) > 1:
            kind, step = _OTHER_END[a.kind]
            rows[table.placement[a.stage + step]].append(Action(kind, a.stage + step, a.microbatch))
    return replace(table, rows=tuple(map(tuple, rows)))


def _moments(table: Table) -> Iterator[tuple[float, bool, int, int, Action]]:
    """Computations when they start and sends when their value is there, as (time, computes, rank, place, action)."""
    costs = Costs.of(table.stages)  # no time is zero: sorting keeps what depends on each other in order
    durations = costs.durations()
    home, last = table.placement, table.stages - 1
    for rank, (row, starts) in enumerate(zip(table.rows, walk(table, costs).starts)):
        for place, (a, start) in enumerate(zip(row, starts)):
            yield start, True, rank, place, a
            other = a.stage + 1 if a.kind == "F" else a.stage - 1
            if a.kind != "W" and 0 <= other <= last and home[other] != rank:
                send = Action("SEND_F" if a.kind == "F" else "SEND_B", a.stage, a.microbatch)
                yield start + durations[a.kind][a.stage], False, rank, place, send


def transfer_fault(table: Table, engine: Engine) -> Fault | None:
    """The first action at which an engine stops: an input is not there yet, another message arrives, or a deadlock.

    The table must have the right actions (`structure_fault`), transfers included.
    """
    return _Run(table, engine).fault()


class _Run:
    """One execution of the rows, a rank at a time until it waits for another."""

    def __init__(self, table: Table, engine: Engine) -> None:
        self.table, self.blocking = table, engine == "blocking"
        self.at = [0] * table.ranks
        self.have: list[set[tuple[str, int, int]]] = [set() for _ in table.rows]  # outputs F and gradients B, by stage
        self.sent: dict[tuple[int, int], deque[Action]] = defaultdict(deque)  # and not received, by (from, to)
        self.todo = deque(range(table.ranks))

    def fault(self) -> Fault | None:
        while self.todo:
            rank = self.todo.popleft()
            row, have = self.table.rows[rank], self.have[rank]
            while self.at[rank] < len(row):
                a = row[self.at[rank]]
                if needed := self._missing(have, a):
                    return self._fault(rank, a, messages.before_its_input(needed))
                if a.kind in ("F", "B", "I"):
                    have.add(("F" if a.kind == "F" else "B", a.stage, a.microbatch))
                elif a.kind.startswith("SEND") and not self._send(rank, a):
                    break
                elif a.kind.startswith("RECV"):
                    peer, twin = self._other_end(a)
                    if not self.sent[peer, rank]:
                        break
                    if (arrives := self.sent[peer, rank][0]) != twin:
                        return self._fault(rank, a, messages.order_of_messages(arrives, peer, twin))
                    self._receive(rank, peer)
                self.at[rank] += 1
        return self._deadlock()

    def _fault(self, rank: int, a: Action, reason: str) -> Fault:
        return Fault(self.table.name, rank, a, reason)

    def _missing(self, have: set[tuple[str, int, int]], a: Action) -> Action | None:
        """An action of the same rank that must stand before this one, and does not."""
        kind, s, k = a
        place, last = self.table.placement, self.table.stages - 1
        if kind == "F" and s and ("F", s - 1, k) not in have:
            return Action("F", s - 1, k) if place[s - 1] == place[s] else Action("RECV_F", s, k)
        if kind in ("SEND_F", "B", "I") and ("F", s, k) not in have:
            return Action("F", s, k)
        if kind in ("B", "I") and s < last and ("B", s + 1, k) not in have:
            return input_gradient(self.table, s + 1, k) if place[s + 1] == place[s] else Action("RECV_B", s, k)
        if kind in ("SEND_B", "W") and ("B", s, k) not in have:
            return input_gradient(self.table, s, k)
        return None

    def _other_end(self, a: Action) -> tuple[int, Action]:
        kind, step = _OTHER_END[a.kind]
        return self.table.placement[a.stage + step], Action(kind, a.stage + step, a.microbatch)

    def _send(self, rank: int, a: Action) -> bool:
        """Whether a send returns at once. A blocking one waits until the receiver has taken it."""
        peer, _ = self._other_end(a)
        if self.blocking and self.sent[rank, peer]:
            return False
        self.sent[rank, peer].append(a)
        self.todo.append(peer)
        return not self.blocking

    def _receive(self, rank: int, peer: int) -> None:
        message = self.sent[peer, rank].popleft()
        self.have[rank].add((message.kind[-1], message.stage, message.microbatch))
        if self.blocking:
            self.at[peer] += 1
            self.todo.append(peer)

    def _deadlock(self) -> Fault | None:
        waits = {}
        for rank, row in enumerate(self.table.rows):
            if self.at[rank] < len(row):
                a = row[self.at[rank]]
                waits[rank] = (a, *self._other_end(a))
        return deadlock_fault(self.table, waits)


def input_gradient(table: Table, stage: int, k: int) -> Action:
    """The action that makes the gradient of this stage's input: B, or I where backward is split."""
    half = Action("I", stage, k)
    return half if half in table.rows[table.placement[stage]] else Action("B", stage, k)


def deadlock_fault(table: Table, waits: dict[int, tuple[Action, int, Action]]) -> Fault | None:
    """The circle of waiting ranks, at its lowest rank. `waits` is rank -> (its action, the other rank, what of it)."""
    if not waits:
        return None
    rank, path = min(waits), list[int]()
    while rank not in path:
        path.append(rank)
        rank = waits[rank][1]
    circle = path[path.index(rank) :]
    first = circle.index(min(circle))
    circle = circle[first:] + circle[:first]
    links = [messages.waits(r, waits[r][0], waits[r][2], waits[r][1]) for r in circle]
    return Fault(table.name, circle[0], waits[circle[0]][0], messages.deadlock(links))
