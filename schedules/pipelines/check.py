"""The proof that a table runs to the right result, or the action at which it does not."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_fn.schedules.pipelines import messages
from vescale_fn.schedules.pipelines.costs import Costs, fits
from vescale_fn.schedules.pipelines.faults import Fault, ScheduleError
from vescale_fn.schedules.pipelines.order import walk
from vescale_fn.schedules.pipelines.structure import structure_fault
from vescale_fn.schedules.pipelines.table import Table
from vescale_fn.schedules.pipelines.transfers import Engine, deadlock_fault, input_gradient, transfer_fault

Limits = float | Sequence[float]


def check(
    table: Table, *, memory: Limits | None = None, costs: Costs | None = None, engine: Engine = "blocking"
) -> Table:
    """Prove a table, and return it.

    * Every stage runs every microbatch forward once, and backward once, whole or as its two halves; a table without
      any backward is for inference.
    * Every action stands after what it needs, on its rank and over ranks.
    * Sends match receives, in order, on every pair of ranks; nothing deadlocks, with buffered transfers, nor (unless
      `engine="buffered"`) with blocking ones. A table without transfers gets those of `with_transfers`, which can do
      neither wrong.
    * No rank holds more than `memory` (one number, or one per rank), in the unit of `costs.activation`; without costs
      in activations of a stage for a microbatch.

    Raises ScheduleError, which names the action and the reason, and ValueError when costs or limits are of other
    sizes than the table.

    >>> check(Table.of([["0F0", "0F1", "0B0", "0B1"]]), memory=1)
    Traceback (most recent call last):
    ...
    vescale_fn.schedules.pipelines.faults.ScheduleError: table: rank 0, 0F1: it would make the rank hold 2 of \
activations, and the limit is 1. Run a backward before it, or raise memory.
    """
    if fault := find_fault(table, memory=memory, costs=costs, engine=engine):
        raise ScheduleError(fault)
    return table


def find_fault(
    table: Table, *, memory: Limits | None = None, costs: Costs | None = None, engine: Engine = "blocking"
) -> Fault | None:
    """What `check` raises for, as a value."""
    costs = costs_for(table, costs)
    limits = limits_for(table, memory)
    if fault := structure_fault(table):
        return fault
    fault = transfer_fault(table, engine) if table.has_transfers else order_fault(table)
    return fault or memory_fault(table, costs, limits)


def costs_for(table: Table, costs: Costs | None) -> Costs:
    """The costs given, or equal ones. Raises ValueError when they are of another number of stages."""
    costs = costs or Costs.of(table.stages)
    if costs.stages != table.stages:
        raise ValueError(messages.costs_of_other_stages(costs.stages, table.name, table.stages))
    return costs


def limits_for(table: Table, memory: Limits | None) -> tuple[float, ...]:
    """A limit for every rank. Raises ValueError when there are more or fewer than ranks."""
    if memory is None or isinstance(memory, (int, float)):
        return (float("inf") if memory is None else memory,) * table.ranks
    if len(memory) != table.ranks:
        raise ValueError(messages.wrong_memory(len(memory), table.ranks))
    return tuple(memory)


def order_fault(table: Table) -> Fault | None:
    """The first action that stands before what it needs, or that waits in a circle of ranks."""
    done = walk(table, Costs.of(table.stages))
    waits = {}
    for rank, (kind, stage, k) in sorted(done.stuck.items()):
        at = table.rows[rank][len(done.starts[rank])]
        needed = type(at)("F", stage, k) if kind == "F" else input_gradient(table, stage, k)
        if table.placement[stage] == rank:
            return Fault(table.name, rank, at, messages.before_its_input(needed))
        waits[rank] = (at, table.placement[stage], needed)
    return deadlock_fault(table, waits)


def memory_fault(table: Table, costs: Costs, limits: Sequence[float]) -> Fault | None:
    """The first action that makes its rank hold more than its limit."""
    growth = costs.growth()
    for rank, row in enumerate(table.without_transfers().rows):
        held: float = 0
        for a in row:
            held += growth[a.kind][a.stage]
            if not fits(held, limits[rank]):
                return Fault(table.name, rank, a, messages.over_limit(held, limits[rank]))
    return None
