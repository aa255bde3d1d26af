"""The schedules that have a name and a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vescale_fn.schedules.pipelines import generators, messages
from vescale_fn.schedules.pipelines.table import Table


@dataclass(frozen=True)
class Named:
    """How a schedule's rows are made. `chunks`: stages on a rank, if only one number is possible; `vee`: stages go
    down the ranks and up again; `fewest(ranks)`: microbatches that it needs."""

    rows: Callable[[int, int, int], generators.Rows]
    chunks: int | None = None
    vee: bool = False
    fewest: Callable[[int], int] = lambda ranks: 1


NAMED = {
    "gpipe": Named(generators.gpipe, chunks=1),
    "1f1b": Named(generators.one_f_one_b, chunks=1),
    "interleaved": Named(generators.interleaved),
    "looped_bfs": Named(generators.looped_bfs),
    "zb_h1": Named(generators.zb_h1, chunks=1),
    "zb_h2": Named(generators.zb_h2, chunks=1),
    "zbv": Named(generators.zbv, chunks=2, vee=True),
    "dualpipev": Named(generators.dualpipev, chunks=2, vee=True, fewest=lambda ranks: 2 * ranks),
    "forward_only": Named(generators.forward_only),
}

USUAL_CHUNKS = {"interleaved": 2, "looped_bfs": 2, "forward_only": 1}


def named(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Table:
    """The table of a schedule in NAMED; raises ValueError as `schedule` does."""
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value is not None and value < 1:
            raise ValueError(messages.too_few(what, value))
    how = NAMED[name]
    if chunks is not None and how.chunks not in (None, chunks):
        raise ValueError(messages.fixed_chunks(name, how.chunks or 1, chunks))
    if microbatches < (fewest := how.fewest(ranks)):
        raise ValueError(messages.needs_microbatches(name, fewest, ranks, microbatches))
    v = chunks or how.chunks or USUAL_CHUNKS[name]
    placement = generators.vee(ranks) if how.vee else generators.loop(ranks, v)
    rows = how.rows(ranks, microbatches, v)
    return Table(name, placement, microbatches, tuple(map(tuple, rows)))
