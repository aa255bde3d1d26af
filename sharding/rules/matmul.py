"""Products of matrices and vectors.

Where a bias is added in the same operation (addmm), the contracted letter must be whole: ranks that hold parts of
the product would each add the bias. Splitting those into a product and a sum comes before the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import Entry, form, operand_slots, parse_rule
from vescale_fn.sharding.rules.rule import Rule

aten = torch.ops.aten

_EACH = [{0}, {1}]  # linear in each factor alone


def _biased(factors: str, result: str) -> Entry:
    """bias + factors: the bias, operand 0, broadcasts to the result; linear in it together with either factor."""

    def entry(eqn: Eqn) -> Rule:
        letters = result.split()
        bias = letters[len(letters) - len(eqn.operands[0].shape) :]
        return parse_rule(f"{' '.join(bias)}, {factors} -> {result}", eqn, linear=[{0, 1}, {0, 2}])

    return entry


def _linear(eqn: Eqn) -> Rule:
    """input @ weight.T + bias, with or without the bias."""
    if "bias" not in operand_slots(eqn):
        return parse_rule("... k, n k -> ... n", eqn, linear=_EACH)
    return parse_rule("... !k, n !k, n -> ... n", eqn, linear=[{0, 2}, {1, 2}])


ENTRIES: Mapping[Any, Entry] = {
    aten.mm.default: form("m k, k n -> m n", linear=_EACH),
    aten.bmm.default: form("b m k, b k n -> b m n", linear=_EACH),
    aten.mv.default: form("m k, k -> m", linear=_EACH),
    aten.dot.default: form("k, k -> ", linear=_EACH),
    aten.vdot.default: form("k, k -> ", linear=_EACH),
    aten.outer.default: form("m, n -> m n", linear=_EACH),
    aten.ger.default: form("m, n -> m n", linear=_EACH),
    aten.addmm.default: _biased("m !k, !k n", "m n"),
    aten.baddbmm.default: _biased("b m !k, b !k n", "b m n"),
    aten.addbmm.default: _biased("!b m !k, !b !k n", "m n"),
    aten.addmv.default: _biased("m !k, !k", "m"),
    aten.addr.default: _biased("m, n", "m n"),
    aten.linear.default: _linear,
}
