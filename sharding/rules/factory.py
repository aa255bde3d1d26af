"""Tensors made inside the step: every rank makes its own part. (zeros_like and its kin are `full` by now.)

Random numbers are not here: a draw belongs to a key, not to a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import Entry, bound_args, parse_rule
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.rules.view import letters

aten = torch.ops.aten


def _filled(value: str | float) -> Entry:
    """The same number everywhere, given or in the argument of that name. Zeros are a partial sum for free."""

    def entry(eqn: Eqn) -> Rule:
        number = bound_args(eqn)[value] if isinstance(value, str) else value
        zero = isinstance(number, (int, float, complex)) and number == 0
        return replace(parse_rule("- -> ...", eqn, linear=[()] if zero else []), merges="alike")

    return entry


def _by_position(eqn: Eqn) -> Rule:
    """Elements depend on where they are."""
    x = letters(len(eqn.outs[0].shape))
    return replace(parse_rule(f"- -> {' '.join(x)}", eqn, masked=x), merges="alike")


_POSITIONAL = [
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.tril_indices.default,
    aten.triu_indices.default,
]

ENTRIES: Mapping[Any, Entry] = {
    **dict.fromkeys(_POSITIONAL, _by_position),
    aten.full.default: _filled("fill_value"),
    aten.scalar_tensor.default: _filled("s"),
    aten.zeros.default: _filled(0),
    aten.ones.default: _filled(1),
    aten.empty.memory_format: _filled(1),
}
