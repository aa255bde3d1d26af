"""The shortest table that can be found for given costs and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vescale_fn.schedules.pipelines import generators, messages
from vescale_fn.schedules.pipelines.check import Limits, limits_for, memory_fault
from vescale_fn.schedules.pipelines.costs import Costs, fits
from vescale_fn.schedules.pipelines.greedy import Order, greedy
from vescale_fn.schedules.pipelines.names import NAMED, named
from vescale_fn.schedules.pipelines.search import Search, kinds_of
from vescale_fn.schedules.pipelines.simulate import Timeline, simulate
from vescale_fn.schedules.pipelines.table import Action, Table

EXACT_ACTIONS = 150  # tables of at most so many actions are searched for the optimum
NODES = 20_000  # of each such search: a few seconds at most

# What runs first where several actions could, by kinds, then by microbatch or by depth.
_ORDERS: tuple[Order, ...] = tuple(
    order
    for kinds in ("IBFW", "IWBF", "FIBW")
    for order in (
        lambda kind, s, k, kinds=kinds: (kinds.index(kind), k, -s),
        lambda kind, s, k, kinds=kinds: (kinds.index(kind), -s, k),
        lambda kind, s, k, kinds=kinds: (kinds.index(kind), s, k),
    )
)


@dataclass(frozen=True)
class Found:
    """A table, its time under the costs of the search, and whether none is shorter.

    `optimal` speaks of all tables with these stages on these ranks (or up and down again, if there are two chunks)
    whose backward is split everywhere, or nowhere.
    """

    table: Table
    timeline: Timeline
    optimal: bool


def auto(
    ranks: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    memory: Limits | None = None,
    chunks: int | None = None,
    nodes: int = NODES,
) -> Found:
    """Search for the table of the shortest makespan under `costs`, in which no rank holds more than `memory` (one
    number or one per rank, in the unit of `costs.activation`).

    Tries all named schedules of as many stages, then list scheduling by several orders, and, for tables of at most
    EXACT_ACTIONS actions, branch and bound over `nodes` nodes for each placement of stages. So the result is never
    longer than a named table under the same limit, and usually the optimum for up to 3 ranks and 4 microbatches.
    The same arguments give the same table, however fast the machine is.

    Raises ValueError when the stages do not divide over the ranks, or a limit has no room for one microbatch.

    >>> found = auto(2, 3, costs=Costs.of(2, forward=[1, 2]), memory=2)
    >>> print(found.timeline, found.optimal)
    auto: makespan 13, bubble 19.2%, peak activations 2, 2 True
    """
    costs = costs or Costs.of(ranks * (chunks or 1))
    _refuse(ranks, microbatches, costs, chunks)
    limits = limits_for(Table("auto", (), microbatches, ((),) * ranks), memory)
    placements = _placements(ranks, costs.stages // ranks)
    _refuse_limits(placements, costs, limits)
    tables = [t for t in _candidates(placements, microbatches, costs, limits) if not memory_fault(t, costs, limits)]
    best = min((simulate(t, costs) for t in tables), key=lambda line: line.makespan)
    optimal = True
    for placement in placements:
        for split in (True, False):
            search = Search(kinds_of(placement, costs, split), microbatches, limits, best.makespan, nodes)
            if search.bound() < best.makespan and len(search.kinds) * microbatches > EXACT_ACTIONS:
                optimal = False
                continue
            search.run()
            optimal = optimal and search.complete
            if search.rows:
                best = simulate(_table(placement, microbatches, search.rows), costs)
    best = replace(best, table=replace(best.table, name="auto"))
    return Found(best.table, best, optimal)


def _table(placement: tuple[int, ...], microbatches: int, rows: list[list[Action]]) -> Table:
    return Table("auto", placement, microbatches, tuple(map(tuple, rows)))


def _placements(ranks: int, chunks: int) -> list[tuple[int, ...]]:
    """Where the stages may live: round and round, or down and up again."""
    both = [generators.loop(ranks, chunks)]
    return [*both, generators.vee(ranks)] if chunks == 2 and ranks > 1 else both


def _candidates(
    placements: list[tuple[int, ...]], microbatches: int, costs: Costs, limits: tuple[float, ...]
) -> Iterator[Table]:
    ranks = len(limits)
    chunks = costs.stages // ranks
    for name, how in NAMED.items():
        if name != "forward_only" and how.chunks in (None, chunks) and how.fewest(ranks) <= microbatches:
            yield named(name, ranks, microbatches, chunks)
    for placement in placements:
        for split in (True, False):
            if not _room(placement, costs, limits, split):
                continue
            for order in _ORDERS:
                yield _table(
                    placement, microbatches, greedy(placement, microbatches, costs, limits, order, split=split)
                )


def _room(placement: tuple[int, ...], costs: Costs, limits: tuple[float, ...], split: bool) -> bool:
    """Whether list scheduling can always go on: every rank has room for one microbatch on all of its stages."""
    return all(fits(held, limit) for held, limit in zip(_of_one(placement, costs, split), limits))


def _of_one(placement: tuple[int, ...], costs: Costs, split: bool) -> list[float]:
    """What every rank holds of one microbatch, at most."""
    held: list[float] = [0] * (1 + max(placement))
    for s, rank in enumerate(placement):
        held[rank] += max(costs.activation[s], costs.kept[s]) if split else costs.activation[s]
    return held


def _refuse(ranks: int, microbatches: int, costs: Costs, chunks: int | None) -> None:
    for what, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(messages.too_few(what, value))
    if costs.stages % ranks or (chunks is not None and costs.stages != ranks * chunks):
        raise ValueError(messages.stages_and_ranks(costs.stages, ranks, chunks))


def _refuse_limits(placements: list[tuple[int, ...]], costs: Costs, limits: tuple[float, ...]) -> None:
    if any(_room(placement, costs, limits, split=False) for placement in placements):
        return
    held = _of_one(placements[0], costs, split=False)
    rank = next(r for r, (h, limit) in enumerate(zip(held, limits)) if not fits(h, limit))
    raise ValueError(messages.no_room(rank, held[rank], limits[rank]))
