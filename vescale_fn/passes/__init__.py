"""Optimization: program to program, each pass value preserving and on its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vescale_fn.passes.ahead import gather_ahead
from vescale_fn.passes.apart import update_apart
from vescale_fn.passes.bodies import everywhere
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
from vescale_fn.passes.turns import move_in_turn
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
    move_in_turn,
    overwrite_operands,
    update_in_place,
)


IN_PLACE = (overwrite_operands, update_in_place)

# What only writes to memory that nobody reads any more needs to see the whole program.
WHOLE = frozenset((reduce_wide, drop_dead_equations, *IN_PLACE))


def optimize(program: Program, *, keep: int | None = None, in_place: bool = True) -> Program:
    """Every pass, in order, in the bodies of loops and calls too.

    keep: bytes of gathered parameters that a rank keeps for backward, which gathers the others anew; None keeps all.
    in_place: operations may write over their operands.
    """
    again: list[Callable[[Program], Program]] = [] if keep is None else [partial(regather, budget=keep)]
    for run in (*PASSES[:2], *again, *PASSES[2:]):
        if in_place or run not in IN_PLACE:
            program = run(program) if run in WHOLE else everywhere(run, program)
    return program


__all__ = [
    "PASSES",
    "bucket",
    "drop_dead_equations",
    "finish_last",
    "gather_ahead",
    "hide_waits",
    "move_in_turn",
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
