"""Losses of each element: none keeps the elements, sum leaves a partial sum; a mean wants everything whole, since the
ranks would divide by the size of their own part (written as a sum and a division, it does not)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import Entry, bound_args, parse_rule
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.rules.view import letters

aten = torch.ops.aten

_NONE, _MEAN = 0, 1  # values of `reduction`


def _loss(eqn: Eqn) -> Rule:
    """Forward and backward alike: every tensor broadcasts against the elements."""
    reduction = bound_args(eqn)["reduction"]
    rank = max(len(v.shape) for v in eqn.operands)
    elements = [f"!{x}" if reduction == _MEAN else x for x in letters(rank)]

    def aligned(shape: tuple[int, ...]) -> str:
        return " ".join(elements[rank - len(shape) :])

    text = f"{', '.join(aligned(v.shape) for v in eqn.operands)} -> {aligned(eqn.outs[0].shape)}"
    return parse_rule(text, eqn, linear=[{"grad_output"}])


ENTRIES: Mapping[Any, Entry] = dict.fromkeys(
    [
        aten.mse_loss.default,
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss.default,
        aten.smooth_l1_loss_backward.default,
        aten.huber_loss.default,
        aten.huber_loss_backward.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_backward.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.soft_margin_loss.default,
        aten.soft_margin_loss_backward.default,
    ],
    _loss,
)
