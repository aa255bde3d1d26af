"""The shortest table, by branch and bound over the orders in which the ranks can run.

Microbatches are alike, so in some shortest table every rank runs each kind of action of each stage in the order of
microbatches: if two are swapped, relabelling from there on changes no time. What is left to choose is, for every rank,
which kind of which stage comes next.

The branching is that of Giffler and Thompson (1960): of all actions that can be placed, take the one that ends first;
the next action of its rank is one of those that could start before that end. Holding a forward back can leave room for
one of another chunk, so where a rank has several stages (or where an input half adds to memory) all its placeable
actions are tried, and one branch leaves the rank waiting for an action that is not placeable yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vescale_fn.schedules.pipelines.costs import Costs, fits
from vescale_fn.schedules.pipelines.table import Action

_KEPT = 32  # states remembered for each count of placed actions


@dataclass(frozen=True)
class Kind:
    """All actions of one kind of one stage, which run in order of microbatches."""

    kind: str
    stage: int
    rank: int
    duration: float
    growth: float
    tail: float  # time from its end to the end of the run, at least
    needs: tuple[tuple[int, float], ...]  # (index of a Kind that must have run the microbatch, time of the transfer)


def kinds_of(placement: Sequence[int], costs: Costs, split: bool) -> list[Kind]:
    """The kinds of actions, in an order in which each comes after what it needs."""
    last = len(placement) - 1
    durations, growth = costs.durations(), costs.growth()
    back = "I" if split else "B"

    def lag(s: int) -> float:
        return costs.transfer[s] if placement[s] != placement[s + 1] else 0

    back_tail: list[float] = []
    for s in range(last + 1):
        weights = costs.backward_weight[s] if split else 0
        back_tail.append(max(weights, lag(s - 1) + durations[back][s - 1] + back_tail[s - 1]) if s else weights)
    tails = [durations[back][last] + back_tail[last]]
    for s in reversed(range(last)):
        tails.insert(0, lag(s) + durations["F"][s + 1] + tails[0])

    kinds = []
    for s in range(last + 1):
        needs = ((s - 1, lag(s - 1)),) if s else ()
        kinds.append(Kind("F", s, placement[s], durations["F"][s], growth["F"][s], tails[s], needs))
    for i, s in enumerate(reversed(range(last + 1)), last + 1):
        needs = ((s, 0), *(((i - 1, lag(s)),) if s < last else ()))
        kinds.append(Kind(back, s, placement[s], durations[back][s], growth[back][s], back_tail[s], needs))
    if split:
        for i, s in enumerate(reversed(range(last + 1)), last + 1):
            kinds.append(Kind("W", s, placement[s], durations["W"][s], growth["W"][s], 0, ((i, 0),)))
    return kinds


@dataclass
class Search:
    """Branch and bound. `run` finds rows shorter than `best`, if there are any; `complete` says that it proved so
    within the limit of `nodes`."""

    kinds: list[Kind]
    microbatches: int
    limits: Sequence[float]
    best: float
    nodes: int
    rows: list[list[Action]] | None = None
    complete: bool = True
    ends: list[list[float]] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    barred: dict[int, frozenset[int]] = field(default_factory=dict)  # a waiting rank -> kinds it does not run next
    placed: list[int] = field(default_factory=list)
    seen: dict[tuple[int, ...], list[tuple[float, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = 1 + max(k.rank for k in self.kinds)
        self.ends = [[] for _ in self.kinds]
        self.free, self.held = [0] * ranks, [0] * ranks
        self.on = [[i for i, k in enumerate(self.kinds) if k.rank == r] for r in range(ranks)]
        self.users = [[j for j, k in enumerate(self.kinds) if i in dict(k.needs)] for i in range(len(self.kinds))]
        alone = all(sum(self.kinds[i].kind == "F" for i in on) == 1 for on in self.on)
        self.active = alone and all(k.growth <= 0 for k in self.kinds if k.kind != "F")

    def run(self) -> None:
        if self.bound() < self.best:
            self._branch()

    # ---- what can be placed

    def _start(self, i: int) -> float | None:
        """When the next action of kind i can start, or None if something that it needs is not placed."""
        kind, k = self.kinds[i], len(self.ends[i])
        if k == self.microbatches:
            return None
        start = self.free[kind.rank]
        for need, lag in kind.needs:
            if len(self.ends[need]) <= k:
                return None
            start = max(start, self.ends[need][k] + lag)
        return start

    def _placeable(self) -> list[tuple[float, int]]:
        """(start, kind) of every action that can come next on its rank."""
        able = []
        for rank, on in enumerate(self.on):
            barred = self.barred.get(rank, ())
            for i in on:
                if i in barred or not fits(self.held[rank] + self.kinds[i].growth, self.limits[rank]):
                    continue
                if (start := self._start(i)) is not None:
                    able.append((start, i))
        return able

    # ---- the tree

    def _branch(self) -> None:
        if self.nodes <= 0:
            self.complete = False
            return
        self.nodes -= 1
        able = self._placeable()
        if not able:
            if all(len(e) == self.microbatches for e in self.ends):
                self.best, self.rows = max(self.free), self._rows()
            return
        if not self.barred and self._dominated():
            return
        end, first = min((start + self.kinds[i].duration, i) for start, i in able)
        rank = self.kinds[first].rank
        choices = [
            (start, i)
            for start, i in able
            if self.kinds[i].rank == rank and (start < end or i == first or not self.active)  # first may take no time
        ]
        for _, i in sorted(choices, key=lambda c: (c[0], self.kinds[c[1]].kind == "W", -self.kinds[c[1]].tail)):
            self._place(i)
        if not self.active:
            self._wait(rank, frozenset(i for _, i in choices))

    def _place(self, i: int) -> None:
        kind = self.kinds[i]
        start, free, barred = self._start(i), self.free[kind.rank], self.barred.pop(kind.rank, None)
        assert start is not None  # it was placeable
        self.free[kind.rank] = start + kind.duration
        self.held[kind.rank] += kind.growth
        self.ends[i].append(start + kind.duration)
        self.placed.append(i)
        if self.bound() < self.best:
            self._branch()
        self.placed.pop()
        self.ends[i].pop()
        self.held[kind.rank] -= kind.growth
        self.free[kind.rank] = free
        if barred is not None:
            self.barred[kind.rank] = barred

    def _wait(self, rank: int, kinds: frozenset[int]) -> None:
        before = self.barred.get(rank, frozenset())
        self.barred[rank] = before | kinds
        self._branch()
        if before:
            self.barred[rank] = before
        else:
            del self.barred[rank]

    # ---- what need not be tried

    def bound(self) -> float:
        """No run that begins with what is placed is shorter."""
        begin: list[float] = []  # of the next action of each kind, at least
        work, chain, early = [0.0] * len(self.on), [0.0] * len(self.on), [float("inf")] * len(self.on)
        tail = [float("inf")] * len(self.on)
        least = 0.0
        for i, kind in enumerate(self.kinds):
            k, r = len(self.ends[i]), kind.rank
            left = self.microbatches - k
            at = self.free[r]
            if left:
                for need, lag in kind.needs:
                    there = len(self.ends[need])
                    ready = (
                        self.ends[need][k] if k < there else begin[need] + (k - there + 1) * self.kinds[need].duration
                    )
                    at = max(at, ready + lag)
                least = max(least, at + left * kind.duration + kind.tail)
                work[r] += left * kind.duration
                early[r] = min(early[r], at)
                if kind.kind != "W":
                    chain[r] += left * kind.duration
                if kind.kind in "IB":
                    tail[r] = min(tail[r], kind.tail)
            begin.append(at)
        for r, begun in enumerate(early):
            if work[r]:
                least = max(least, begun + work[r], begun + chain[r] + tail[r] if chain[r] else 0)
        return max(least, *self.free)

    def _dominated(self) -> bool:
        """Whether the same actions were placed before, and nothing was later then."""
        counts = tuple(map(len, self.ends))
        now = (*self.free, *self._awaited(counts))
        seen = self.seen.setdefault(counts, [])
        if any(all(a <= b for a, b in zip(old, now)) for old in seen):
            return True
        seen[:] = [old for old in seen if not all(b <= a for a, b in zip(old, now))][-_KEPT:]
        seen.append(now)
        return False

    def _awaited(self, counts: tuple[int, ...]) -> Iterator[float]:
        """When the values are there that have not been used by all who need them."""
        for i, ends in enumerate(self.ends):
            yield from ends[min((counts[j] for j in self.users[i]), default=counts[i]) :]

    def _rows(self) -> list[list[Action]]:
        rows: list[list[Action]] = [[] for _ in self.on]
        counts = [0] * len(self.kinds)
        for i in self.placed:
            kind = self.kinds[i]
            rows[kind.rank].append(Action(kind.kind, kind.stage, counts[i]))
            counts[i] += 1
        return rows
