"""One table by its name."""

from __future__ import annotations

from vescale_fn.schedules.pipelines import messages
from vescale_fn.schedules.pipelines.auto import auto
from vescale_fn.schedules.pipelines.check import Limits
from vescale_fn.schedules.pipelines.costs import Costs
from vescale_fn.schedules.pipelines.names import NAMED, named
from vescale_fn.schedules.pipelines.table import Table


def schedule(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory: Limits | None = None,
) -> Table:
    """The table of a schedule for `ranks` pipeline ranks and `microbatches` microbatches.

    `chunks` is how many stages live on a rank: 2 where nothing is said to 'interleaved' and 'looped_bfs', always 2
    for 'zbv' and 'dualpipev'. 'auto' searches with `costs` (equal ones if none are given) and under a limit of
    `memory`, see `auto`; the others have a fixed order.

    Raises ValueError when there is no such schedule, it needs more microbatches, cannot have so many chunks, or does
    not depend on an argument that is given.

    >>> print(schedule("1f1b", ranks=2, microbatches=3))
    1f1b: 2 ranks, 2 stages, 3 microbatches
    rank 0  0F0 0F1 0B0 0F2 0B1 0B2
    rank 1  1F0 1B0 1F1 1B1 1F2 1B2
    """
    if name == "auto":
        return auto(ranks, microbatches, costs=costs, memory=memory, chunks=chunks).table
    if name not in NAMED:
        raise ValueError(messages.unknown_schedule(name, [*NAMED, "auto"]))
    for argument, value in (("costs", costs), ("memory", memory)):
        if value is not None:
            raise ValueError(messages.only_for_search(name, argument))
    return named(name, ranks, microbatches, chunks)
