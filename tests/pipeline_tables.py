"""Random tables for tests of pipelines, mutations of them, and an executor that shares nothing with the library's
checker: it runs numbers through the rows, and looks whether the right ones come out."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vescale_fn.schedules.pipelines import Action, Table

KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")


# ---- random tables


def legal_table(rng: random.Random, stages: int, ranks: int, microbatches: int, trains: bool = True) -> Table:
    """Any table without transfers that can run: stages on any ranks, actions in any order that their inputs allow."""
    placement = tuple(rng.randrange(ranks) for _ in range(stages))
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    able = [Action("F", 0, k) for k in range(microbatches)]
    while able:
        a = able.pop(rng.randrange(len(able)))
        rows[placement[a.stage]].append(a)
        back = rng.choice("BI")
        if a.kind == "F":
            if a.stage + 1 < stages:
                able.append(a._replace(stage=a.stage + 1))
            elif trains:
                able.append(a._replace(kind=back))
        elif a.kind in "BI":
            if a.kind == "I":
                able.append(a._replace(kind="W"))
            if a.stage:
                able.append(a._replace(kind=back, stage=a.stage - 1))
    return Table("table", placement, microbatches, tuple(map(tuple, rows)))


def mutate(rng: random.Random, table: Table) -> Table:
    """A change of one action: left out, doubled, moved, or another action in its place."""
    rows = [list(row) for row in table.rows]
    rank = rng.choice([r for r, row in enumerate(rows) if row])
    at = rng.randrange(len(rows[rank]))
    a = rows[rank].pop(at)
    target, place = rank, rng.randrange(len(rows[rank]) + 1)
    match rng.randrange(8):
        case 0:
            return replace(table, rows=tuple(map(tuple, rows)))
        case 1:
            rows[rank].insert(at, a)
        case 2:
            target = rng.randrange(len(rows))
            place = rng.randrange(len(rows[target]) + 1)
        case 3:
            a, place = a._replace(kind=rng.choice(KINDS if table.has_transfers else KINDS[:4])), at
        case 4:
            a, place = a._replace(microbatch=rng.randrange(table.microbatches)), at
        case 5:
            a, place = a._replace(stage=rng.randrange(table.stages)), at
        case 6:
            place = max(0, min(len(rows[rank]), at + rng.choice((-1, 1))))
    rows[target].insert(place, a)
    return replace(table, rows=tuple(map(tuple, rows)))


# ---- the executor


class Wrong(Exception):
    """The rows ask for something that is not there."""


@dataclass
class Rank:
    """What a rank holds. Everything is taken away by whoever uses it."""

    at: int = 0
    inputs: dict[tuple[int, int], int] = field(default_factory=dict)
    outputs: dict[tuple[int, int], int] = field(default_factory=dict)
    saved: dict[tuple[int, int], int] = field(default_factory=dict)
    gradients: dict[tuple[int, int], int] = field(default_factory=dict)  # of outputs, by the stage that has them
    upstream: dict[tuple[int, int], int] = field(default_factory=dict)  # of inputs, to be sent
    halves: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


def take(d: dict[Any, Any], key: Any) -> Any:
    if key not in d:
        raise Wrong
    return d.pop(key)


class Executor:
    """Stages y = weight * x of integers: forward also counts its inputs, as a batch norm would, so that a forward too
    many shows; the loss weighs every microbatch differently."""

    def __init__(self, table: Table, weights: list[int], data: list[int], factors: list[int], engine: str) -> None:
        self.table, self.weights, self.data, self.factors = table, weights, data, factors
        self.blocking, self.named = engine == "blocking", not table.has_transfers
        self.ranks = [Rank() for _ in table.rows]
        self.channels: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.loss = 0
        self.counts, self.grads = [0] * table.stages, [0] * table.stages
        self.input_grads: dict[int, int] = defaultdict(int)
        self.peak = [0] * table.ranks

    def run(self) -> tuple[Any, ...]:
        """The results, or Wrong."""
        moved = True
        while moved:
            moved = any(self.step(r) for r in range(self.table.ranks))
        if any(state.at < len(row) for state, row in zip(self.ranks, self.table.rows)) or any(self.channels.values()):
            raise Wrong
        return self.loss, self.counts, self.grads, dict(self.input_grads)

    def current(self, rank: int) -> Action | None:
        row, at = self.table.rows[rank], self.ranks[rank].at
        return row[at] if at < len(row) else None

    def step(self, rank: int) -> bool:
        """Run the next action of a rank, if it need not wait."""
        a = self.current(rank)
        if a is None:
            return False
        if a.kind in KINDS[:4]:
            if self.table.placement[a.stage] != rank:
                raise Wrong
            if self.named and not self.here(rank, a):
                return False
            self.compute(a.kind)(self.ranks[rank], a.stage, a.microbatch)
            held = self.ranks[rank]
            self.peak[rank] = max(self.peak[rank], len(held.saved) + len(held.halves))
        elif not self.transfer(rank, a):
            return False
        self.ranks[rank].at += 1
        return True

    def compute(self, kind: str) -> Callable[[Rank, int, int], None]:
        return {"F": self.forward, "B": self.backward, "I": self.input_half, "W": self.weight_half}[kind]

    def here(self, rank: int, a: Action) -> bool:
        """Without transfers in the rows, values arrive by themselves, and an action waits for them."""
        state, key = self.ranks[rank], (a.stage, a.microbatch)
        if a.kind == "F":
            return a.stage == 0 or key in state.inputs
        return a.kind == "W" or key in state.gradients

    def transfer(self, rank: int, a: Action) -> bool:
        state, key = self.ranks[rank], (a.stage, a.microbatch)
        if self.table.placement[a.stage] != rank:
            raise Wrong
        peer = self.peer(a)
        if a.kind.startswith("SEND"):
            if not self.blocking:
                self.channels[rank, peer].append(self.sent(state, a))
            return not self.blocking
        if self.blocking:
            there = self.current(peer)
            if there is None or not there.kind.startswith("SEND") or self.peer(there) != rank:
                return False
            value = self.sent(self.ranks[peer], there)
            self.ranks[peer].at += 1
        elif not self.channels[peer, rank]:
            return False
        else:
            value = self.channels[peer, rank].popleft()
        (state.inputs if a.kind == "RECV_F" else state.gradients)[key] = value
        return True

    def sent(self, state: Rank, a: Action) -> int:
        value = take(state.outputs if a.kind == "SEND_F" else state.upstream, (a.stage, a.microbatch))
        assert isinstance(value, int)
        return value

    def peer(self, a: Action) -> int:
        stage = a.stage + (1 if a.kind in ("SEND_F", "RECV_B") else -1)
        if not 0 <= stage < self.table.stages:
            raise Wrong
        return self.table.placement[stage]

    def deliver(self, s: int, k: int, other: int, value: int, name: str, waiting: dict[tuple[int, int], int]) -> None:
        """To the stage on this rank or, without transfers, on any; else wait for the send."""
        here = self.table.placement[s] == self.table.placement[other]
        if here or self.named:
            getattr(self.ranks[self.table.placement[other]], name)[other, k] = value
        else:
            waiting[s, k] = value

    def forward(self, state: Rank, s: int, k: int) -> None:
        x = self.data[k] if s == 0 else take(state.inputs, (s, k))
        self.counts[s] += x
        y = x * self.weights[s]
        state.saved[s, k] = x
        if s + 1 < self.table.stages:
            self.deliver(s, k, s + 1, y, "inputs", state.outputs)
        else:
            self.loss += y * self.factors[k]
            state.gradients[s, k] = self.factors[k]

    def input_half(self, state: Rank, s: int, k: int) -> None:
        x, g = take(state.saved, (s, k)), take(state.gradients, (s, k))
        state.halves[s, k] = x, g
        if s:
            self.deliver(s, k, s - 1, g * self.weights[s], "gradients", state.upstream)
        else:
            self.input_grads[k] += g * self.weights[s]

    def weight_half(self, state: Rank, s: int, k: int) -> None:
        x, g = take(state.halves, (s, k))
        self.grads[s] += x * g

    def backward(self, state: Rank, s: int, k: int) -> None:
        self.input_half(state, s, k)
        self.weight_half(state, s, k)


def runs_right(table: Table, engine: str = "buffered", memory: int | None = None, seed: int = 0) -> bool:
    """Whether executing the table gives what the chain of stages gives, microbatch after microbatch."""
    rng = random.Random(seed)
    sizes = (table.stages, table.microbatches, table.microbatches)
    weights, data, factors = ([rng.randrange(2, 10**6) for _ in range(n)] for n in sizes)
    executor = Executor(table, weights, data, factors, engine)
    try:
        result = executor.run()
    except Wrong:
        return False
    return result == expected(weights, data, factors, table.trains) and max(executor.peak) <= (memory or 10**9)


def expected(weights: list[int], data: list[int], factors: list[int], trains: bool) -> tuple[Any, ...]:
    loss, counts, grads, input_grads = 0, [0] * len(weights), [0] * len(weights), {}
    for k, x in enumerate(data):
        xs = [x]
        for w in weights:
            xs.append(xs[-1] * w)
        loss += xs[-1] * factors[k]
        g = factors[k]
        for s in reversed(range(len(weights))):
            counts[s] += xs[s]
            grads[s] += xs[s] * g
            g *= weights[s]
        input_grads[k] = g
    return (loss, counts, grads, input_grads) if trains else (loss, counts, [0] * len(weights), {})
