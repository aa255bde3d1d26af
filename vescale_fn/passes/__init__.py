"""Optimization: program to program, each pass value preserving and on its own."""

from __future__ import annotations

from vescale_fn.passes.ahead import gather_ahead
from vescale_fn.passes.apart import update_apart
from vescale_fn.passes.bucket import bucket
from vescale_fn.passes.common import share_common
from vescale_fn.passes.dead import drop_dead_equations
from vescale_fn.passes.early import reduce_early
from vescale_fn.passes.finish import finish_last
from vescale_fn.passes.first import reduce_first
from vescale_fn.passes.hide import hide_waits
from vescale_fn.passes.in_place import update_in_place
from vescale_fn.passes.late import view_late
from vescale_fn.passes.overwrite import overwrite_operands
from vescale_fn.passes.regather import regather
from vescale_fn.passes.watch import watch_values
from vescale_fn.passes.wide import reduce_wide
from vescale_fn.program import Program

PASSES = (
    reduce_wide,
    share_common,
    drop_dead_equations,
    gather_ahead,
    reduce_early,
    reduce_first,
    bucket,
    update_apart,
    finish_last,
    view_late,
    hide_waits,
    overwrite_operands,
    update_in_place,
)


IN_PLACE = (overwrite_operands, update_in_place)


def optimize(program: Program, *, gather_again: bool = False, in_place: bool = True) -> Program:
    """Every pass, in order. `gather_again`: backward gathers parameters anew instead of keeping forward's. `in_place`:
    operations may write over their operands."""
    for run in (*PASSES[:2], regather, *PASSES[2:]) if gather_again else PASSES:
        if in_place or run not in IN_PLACE:
            program = run(program)
    return program


__all__ = [
    "PASSES",
    "bucket",
    "drop_dead_equations",
    "finish_last",
    "gather_ahead",
    "hide_waits",
    "optimize",
    "overwrite_operands",
    "reduce_early",
    "reduce_first",
    "reduce_wide",
    "regather",
    "share_common",
    "update_apart",
    "update_in_place",
    "view_late",
    "watch_values",
]
