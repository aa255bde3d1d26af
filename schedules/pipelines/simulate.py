"""When every action runs, for given costs: makespan, bubble and memory of a table, and its pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TextIO

from vescale_fn.schedules.pipelines import gantt
from vescale_fn.schedules.pipelines.check import costs_for, order_fault
from vescale_fn.schedules.pipelines.costs import Costs
from vescale_fn.schedules.pipelines.faults import ScheduleError
from vescale_fn.schedules.pipelines.order import walk
from vescale_fn.schedules.pipelines.structure import structure_fault
from vescale_fn.schedules.pipelines.table import Table


@dataclass(frozen=True)
class Timeline:
    """A table in time: `starts[rank][i]` is when the i-th action of a rank begins, in the unit of the costs."""

    table: Table
    costs: Costs
    starts: gantt.Times

    @cached_property
    def ends(self) -> gantt.Times:
        durations = self.costs.durations()
        return tuple(
            tuple(start + durations[a.kind][a.stage] for a, start in zip(row, starts))
            for row, starts in zip(self.table.rows, self.starts)
        )

    @cached_property
    def makespan(self) -> float:
        """From the first action of any rank to the last."""
        return max(row[-1] for row in self.ends if row)

    @cached_property
    def period(self) -> float:
        """The longest time from the first action of a rank to its last: what a step takes when steps follow each
        other without a barrier, as in "Zero Bubble Pipeline Parallelism", whose tables are parallelograms."""
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends) if ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        durations = self.costs.durations()
        return tuple(sum(durations[a.kind][a.stage] for a in row) for row in self.table.rows)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time of the makespan in which each rank does not compute."""
        return tuple(self.makespan - b for b in self.busy)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they do not compute, 0 to 1."""
        return sum(self.idle) / (self.makespan * self.table.ranks) if self.makespan else 0.0

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """The most that each rank holds of activations, in the unit of `costs.activation`."""
        growth = self.costs.growth()
        return tuple(max(accumulate((growth[a.kind][a.stage] for a in row), initial=0.0)) for row in self.table.rows)

    def plot(self, path: str | Path, width: int = 1200) -> None:
        """Draw the Gantt chart to a .svg or .png file (see `plot` for several in one picture)."""
        gantt.plot(self, path, width)

    def show(self, width: int = 100, file: TextIO | None = None) -> None:
        """Print the Gantt chart, at most `width` columns wide, in colour if it goes to a terminal.

        >>> simulate(Table.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], name="mine")).show(40)
        mine: makespan 9, bubble 33.3%, peak activations 2, 1
        rank 0  F0 F1 ······B0    ···B1
        rank 1  ···F0 B0    F1 B1    ······
        """
        gantt.show(self, width, file)

    def __str__(self) -> str:
        return (
            f"{self.table.name}: makespan {self.makespan:g}, bubble {self.bubble:.1%}, "
            f"peak activations {', '.join(f'{p:g}' for p in self.peaks)}"
        )


def simulate(table: Table, costs: Costs | None = None) -> Timeline:
    """Run the table in simulated time: each rank in its order, an action as soon as its inputs are there.

    Transfers take their time but keep no rank busy (those that the table has are left out). Raises ScheduleError when
    an action is missing, doubled or waits forever, and ValueError when the costs are of other stages.

    >>> print(simulate(Table.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], name="mine")))
    mine: makespan 9, bubble 33.3%, peak activations 2, 1
    """
    costs = costs_for(table, costs)
    table = table.without_transfers()
    if fault := structure_fault(table) or order_fault(table):
        raise ScheduleError(fault)
    return Timeline(table, costs, walk(table, costs).starts)
