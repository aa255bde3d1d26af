"""What is wrong with a table: one action, and the reason."""

from __future__ import annotations

from dataclasses import dataclass

from vescale_fn.schedules.pipelines.table import Action


@dataclass(frozen=True)
class Fault:
    """The first thing found that is wrong with a table: an action of a rank, and the reason with the fix."""

    table: str
    rank: int
    action: Action
    reason: str

    def __str__(self) -> str:
        return f"{self.table}: rank {self.rank}, {self.action}: {self.reason}"


class ScheduleError(ValueError):
    """A table that cannot run to the right result; `.fault` says which action and why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault
