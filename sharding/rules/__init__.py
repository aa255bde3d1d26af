"""The table of factor rules: families combined into one mapping, and the look-up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules import (
    attention,
    conv,
    factory,
    fft,
    index,
    linalg,
    loss,
    matmul,
    mixed,
    norm,
    order,
    pointwise,
    reduce,
    shape,
    view,
)
from vescale_fn.sharding.rules.registry import Entry
from vescale_fn.sharding.rules.rule import Rule

FAMILIES = (
    pointwise,
    reduce,
    matmul,
    view,
    shape,
    factory,
    fft,
    linalg,
    loss,
    norm,
    order,
    index,
    attention,
    conv,
    mixed,
)

RULES: Mapping[Any, Entry] = MappingProxyType({op: entry for f in FAMILIES for op, entry in f.ENTRIES.items()})


def rule_for(eqn: Eqn, extra: Mapping[Any, Entry] = MappingProxyType({})) -> Rule | None:
    """The rule of an equation, bound to its shapes, or None for an operation without one (its operands and results
    are whole on every rank). `extra`: entries the user registered, which come first."""
    entry = extra.get(eqn.op) or RULES.get(eqn.op)
    if entry is None and pointwise.is_pointwise(eqn.op):
        entry = pointwise.elementwise
    return entry(eqn) if entry else None
