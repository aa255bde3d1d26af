"""The body of a pipeline's loop in pieces: what each call of a stage runs, and what passes between them.

Every equation belongs to a call: itself, or the last one that it depends on. What depends on none is computed again for
every call that reads it, but for an update of a carry, which belongs to the first call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from vescale_fn.sharding.graph import Call, Eqn, Graph, Pipeline, Var

_CALL = re.compile(r"([FIW])(\d+)")


@dataclass(frozen=True, eq=False)
class Piece:
    """What one call of a stage runs for a microbatch, as a graph. Its inputs are constants, carries and slices of the
    loop, and results of other pieces; its outputs are what other pieces read, then the carries that it updates, whose
    indices are `updates`."""

    kind: str
    stage: int
    graph: Graph
    exports: tuple[Var, ...]
    updates: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}{self.stage}"


@dataclass(frozen=True, eq=False)
class Message:
    """What goes from one stage to the next, or back, for each microbatch: results of piece `kind` of stage `source`
    that stage `target`, on another rank, reads."""

    kind: str  # "F" | "B"
    source: int
    target: int
    values: tuple[Var, ...]

    def __str__(self) -> str:
        what = "output" if self.kind == "F" else "gradient of its input"
        return f"{what} of stage {self.source}, to stage {self.target}"


@dataclass(frozen=True, eq=False)
class Actions:
    """A pipeline's body in pieces, by name, in the order of the loop."""

    op: Pipeline
    pieces: Mapping[str, Piece]

    @cached_property
    def makers(self) -> dict[Var, Piece]:
        return {v: p for p in self.pieces.values() for v in p.exports}

    @cached_property
    def messages(self) -> dict[tuple[str, int], Message]:
        """By kind and source."""
        found: dict[tuple[str, int], dict[Var, None]] = {}
        place = self.op.placement
        for p in self.pieces.values():
            for v in p.graph.inputs:
                maker = self.makers.get(v)
                if maker is None or place[maker.stage] == place[p.stage]:
                    continue
                kind, step = ("F", 1) if maker.kind == "F" else ("B", -1)
                if p.stage != maker.stage + step:
                    raise AssertionError(f"{p.name} reads {v} of {maker.name}, which is not beside it")
                found.setdefault((kind, maker.stage), {})[v] = None
        return {k: Message(*k, k[1] + (1 if k[0] == "F" else -1), tuple(vs)) for k, vs in found.items()}

    @cached_property
    def readers(self) -> dict[tuple[int, Var], int]:
        """By rank and value: how many pieces of a microbatch read it there, and messages take it from there."""
        place = self.op.placement
        found = Counter((place[p.stage], v) for p in self.pieces.values() for v in p.graph.inputs if v in self.makers)
        found.update((place[m.source], v) for m in self.messages.values() for v in m.values)
        return found

    def of(self, kind: str, stage: int) -> list[Piece]:
        """The pieces that an action runs. (Backward is its two halves; what nobody needs is not there.)"""
        return [self.pieces[n] for k in ("IW" if kind == "B" else kind) if (n := f"{k}{stage}") in self.pieces]


def actions_of(op: Pipeline) -> Actions:
    """The pieces of a pipeline, whose body may be global or that of a rank."""
    body = op.body
    calls = [e for e in body.eqns if isinstance(e.op, Call) and _CALL.fullmatch(e.op.name)]
    order = {e: i for i, e in enumerate(calls)}
    owner = _owners(body, order, body.inputs[op.num_consts : op.num_consts + op.num_carry])
    members: list[list[Eqn]] = [[] for _ in calls]
    for e in body.eqns:
        if e in owner:
            members[owner[e]].append(e)
    free = {v: e for e in body.eqns if e not in owner for v in e.outs}
    position = {e: i for i, e in enumerate(body.eqns)}
    whole = [sorted({*eqns, *_needed(eqns, free)}, key=position.__getitem__) for eqns in members]
    pieces = _Pieces(op, whole, {v: i for i, eqns in enumerate(members) for e in eqns for v in e.outs})
    return Actions(op, {e.op.name: pieces.of(i, e.op.name) for e, i in order.items()})


def _owners(body: Graph, calls: Mapping[Eqn, int], carries: Iterable[Var]) -> dict[Eqn, int]:
    """The call that each equation belongs to, by its place, for those that belong to one."""
    of_value: dict[Var, int] = {}
    owner: dict[Eqn, int] = {}
    carried = set(carries)
    for e in body.eqns:
        found = [of_value[v] for v in e.reads if v in of_value]
        if e in calls:
            owner[e] = calls[e]
        elif found or not carried.isdisjoint(e.reads):
            owner[e] = max(found, default=0)
        else:
            continue
        of_value.update(dict.fromkeys(e.outs, owner[e]))
    return owner


def _needed(eqns: Iterable[Eqn], free: Mapping[Var, Eqn]) -> set[Eqn]:
    """The equations that belong to no call, and that these need."""
    found: set[Eqn] = set()
    queue = [v for e in eqns for v in e.reads]
    for v in queue:
        if v in free and free[v] not in found:
            found.add(free[v])
            queue += free[v].reads
    return found


@dataclass(eq=False)
class _Pieces:
    op: Pipeline
    members: list[list[Eqn]]
    maker: Mapping[Var, int]  # which piece makes a value
    read_by: dict[Var, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i, eqns in enumerate(self.members):
            for e in eqns:
                for v in e.reads:
                    self.read_by.setdefault(v, set()).add(i)

    def of(self, i: int, name: str) -> Piece:
        eqns = self.members[i]
        made = {v for e in eqns for v in e.outs}
        inputs = tuple(dict.fromkeys(v for e in eqns for v in e.reads if v not in made))
        exports = tuple(v for e in eqns for v in e.outs if self.maker.get(v) == i and self.read_by.get(v, set()) - {i})
        carries = self.op.body.inputs[self.op.num_consts : self.op.num_consts + self.op.num_carry]
        updated = [
            (j, v)
            for j, (before, v) in enumerate(zip(carries, self.op.body.outputs))
            if v is not before and self.maker.get(v) == i
        ]
        outputs = (*exports, *(v for _, v in updated))
        found = _CALL.fullmatch(name)
        assert found is not None
        return Piece(
            found[1], int(found[2]), Graph(inputs, tuple(eqns), outputs), exports, tuple(j for j, _ in updated)
        )
