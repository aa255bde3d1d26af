"""Equations whose results nobody reads are dropped."""

from __future__ import annotations

from dataclasses import replace

from vescale_fn.dead_code import drop_dead
from vescale_fn.program import Program


def drop_dead_equations(program: Program) -> Program:
    """The program without equations, and without parts of sub-programs, that no output needs."""
    return replace(program, graph=drop_dead(program.graph))
