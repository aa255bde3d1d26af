"""What a rank of a pipeline does while it runs: the actions of its row, in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_fn.actions import Actions, Message
from vescale_fn.sharding.graph import Pipeline, Var
from vescale_fn.sharding.layout import Layout
from vescale_fn.site import Link, Receive, Send

Function = Callable[[list[Any], tuple[Any, ...]], Any]
Yields = Generator[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Part:
    """A function of the generated code, for one piece of a stage. Its arguments are what `reads` names; its results
    are values of the microbatch, then new carries.

    reads: (where, index), where is "const", "carry", "slice" or "value". communicates: whether it is a generator.
    """

    reads: tuple[tuple[str, int], ...]
    exports: tuple[int, ...]
    updates: tuple[int, ...]
    communicates: bool


@dataclass(frozen=True, eq=False)
class Row:
    """What one rank runs: actions as (kind, parts by place, or a link, microbatch), and how often each value of a
    microbatch is read there."""

    actions: tuple[tuple[str, tuple[int, ...] | Link, int], ...]
    readers: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Plan:
    """The rows of a pipeline over its parts. links: for each link the values that it carries."""

    num_consts: int
    num_carry: int
    parts: tuple[Part, ...]
    rows: tuple[Row, ...]
    carries: Mapping[Link, tuple[int, ...]]


def plan_of(actions: Actions, communicates: Sequence[bool], layouts: Mapping[Var, Layout]) -> Plan:
    """The plan of a pipeline, for layouts of its values. communicates: whether the code of each piece does."""
    op, body = actions.op, actions.op.body
    place = {v: i for i, v in enumerate(actions.makers)}
    first, split = op.num_consts, op.num_consts + op.num_carry
    where = {v: ("const", i) for i, v in enumerate(body.inputs[:first])}
    where |= {v: ("carry", i) for i, v in enumerate(body.inputs[first:split])}
    where |= {v: ("slice", i) for i, v in enumerate(body.inputs[split:])}
    where |= {v: ("value", i) for v, i in place.items()}
    pieces = list(actions.pieces.values())
    parts = tuple(
        Part(tuple(where[v] for v in p.graph.inputs), tuple(place[v] for v in p.exports), p.updates, c)
        for p, c in zip(pieces, communicates)
    )
    links = {key: _link(op, m, layouts) for key, m in actions.messages.items()}
    at = {p.name: i for i, p in enumerate(pieces)}
    rows = []
    for rank, row in enumerate(op.rows):
        done: list[tuple[str, tuple[int, ...] | Link, int]] = []
        for kind, s, k in row:
            if len(kind) == 1:
                done.append((kind, tuple(at[p.name] for p in actions.of(kind, s)), k))
            elif link := links.get(_source(kind, s)):
                done.append((kind, link, k))
        readers = {place[v]: n for (r, v), n in actions.readers.items() if r == rank}
        rows.append(Row(tuple(done), readers))
    carried = {links[key]: tuple(place[v] for v in m.values) for key, m in actions.messages.items()}
    return Plan(op.num_consts, op.num_carry, parts, tuple(rows), carried)


def _source(kind: str, stage: int) -> tuple[str, int]:
    """The message that an action sends or receives: its kind, and the stage that it comes from."""
    back = {"RECV_F": -1, "RECV_B": 1}
    return kind[-1], stage + back.get(kind, 0)


def _link(op: Pipeline, m: Message, layouts: Mapping[Var, Layout]) -> Link:
    ends = (f"{m.source}SEND_{m.kind}", f"{m.target}RECV_{m.kind}")
    dtypes = tuple(v.dtype for v in m.values)
    ranks = op.placement[m.source], op.placement[m.target]
    return Link(op.axis, *ranks, tuple(layouts[v] for v in m.values), dtypes, ends)


def run_row(
    plan: Plan,
    rank: int,
    device: torch.device,
    args: list[Any],
    k: tuple[Any, ...],
    functions: Sequence[Function],
) -> Yields:
    """Run a rank's actions. Returns what the loop carried, as this rank leaves it. Empties `args`."""
    row, n = plan.rows[rank], plan.num_consts
    run = _Microbatches(plan, row, args[:n], args[n : n + plan.num_carry], args[n + plan.num_carry :])
    args.clear()
    for kind, what, microbatch in row.actions:
        if isinstance(what, Link):
            places = plan.carries[what]
            if kind.startswith("SEND"):
                yield Send(what, microbatch), [run.take(v, microbatch) for v in places]
            else:
                for v, x in zip(places, (yield Receive(what, microbatch), ())):
                    run.keep(v, microbatch, x if x.device == device else x.to(device))
            continue
        for i in what:
            part = plan.parts[i]
            results = functions[i](run.arguments(part, microbatch), k)
            run.store(part, microbatch, (yield from results) if part.communicates else results)
            del results
    return run.carry


@dataclass(eq=False)
class _Microbatches:
    """What a rank holds."""

    plan: Plan
    row: Row
    consts: list[Any]
    carry: list[Any]
    slices: list[Any]

    def __post_init__(self) -> None:
        self.values: dict[tuple[int, int], Tensor] = {}  # by place and microbatch
        self.left: dict[tuple[int, int], int] = {}  # how often they will be read

    def keep(self, place: int, microbatch: int, x: Tensor) -> None:
        if readers := self.row.readers.get(place, 0):
            self.values[place, microbatch], self.left[place, microbatch] = x, readers

    def take(self, place: int, microbatch: int) -> Tensor:
        """A value, which is let go of when nobody else will read it."""
        at = place, microbatch
        self.left[at] -= 1
        if self.left[at]:
            return self.values[at]
        del self.left[at]
        return self.values.pop(at)

    def arguments(self, part: Part, microbatch: int) -> list[Any]:
        given: list[Any] = []
        for where, i in part.reads:
            if where == "const":
                given.append(self.consts[i])
            elif where == "carry":
                given.append(self.carry[i])
                if i in part.updates:
                    self.carry[i] = None
            elif where == "slice":
                given.append(self.slices[i][microbatch])
            else:
                given.append(self.take(i, microbatch))
        return given

    def store(self, part: Part, microbatch: int, results: list[Any]) -> None:
        n = len(part.exports)
        for place, x in zip(part.exports, results):
            self.keep(place, microbatch, x)
        for i, x in zip(part.updates, results[n:]):
            self.carry[i] = x
