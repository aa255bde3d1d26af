"""Fourier transforms: the dims transformed are whole, and the transform is linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import Entry, bound_args, parse_rule
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.rules.view import arrow, letters

aten = torch.ops.aten


def _transform(eqn: Eqn) -> Rule:
    rank = len(eqn.operands[0].shape)
    dims = {d % rank for d in bound_args(eqn)["dim"]}
    x = letters(rank)
    left = [f"!{a}" if d in dims else a for d, a in enumerate(x)]
    right = [f"!frequency{d}" if d in dims else a for d, a in enumerate(x)]
    return parse_rule(arrow(left, right), eqn, linear=[{0}])


ENTRIES: Mapping[Any, Entry] = dict.fromkeys(
    [aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default],
    _transform,
)
