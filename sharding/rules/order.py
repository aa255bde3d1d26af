"""Operations that look along one dim as a whole: sorting, scanning, selecting by rank. Every other dim is free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import Entry, Slots, bound_args, form, parse_rule
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.rules.view import letters, replaced

aten = torch.ops.aten


def along(eqn: Eqn, linear: tuple[Slots, ...] = ()) -> Rule:
    """All operands have one shape; the argument `dim` must be whole, and may be dropped or resized in results."""
    rank = len(eqn.operands[0].shape)
    x = letters(rank)
    d = bound_args(eqn)["dim"] % rank if rank else 0
    left = replaced(x, d, f"!{x[d]}") if rank else x

    def result(shape: tuple[int, ...]) -> list[str]:
        if len(shape) < rank:
            return replaced(x, d)
        return left if shape == eqn.operands[0].shape else replaced(x, d, "!selected")

    operands = ", ".join([" ".join(left)] * len(eqn.operands))
    results = ", ".join(" ".join(result(v.shape)) for v in eqn.outs)
    return parse_rule(f"{operands} -> {results}", eqn, linear=linear)


def _scanned_sum(eqn: Eqn) -> Rule:
    return along(eqn, ({0},))


def _of_all(eqn: Eqn) -> Rule:
    """One number from all elements."""
    return parse_rule(" ".join(f"!{x}" for x in letters(len(eqn.operands[0].shape))) + " -> ", eqn)


def _searched(eqn: Eqn) -> Rule:
    """Positions in a sorted sequence: one sequence for all values, or one for each row of them. The position is the
    sum of the positions in parts of the sequence, unless a `sorter` says where its elements are."""
    whole = "" if bound_args(eqn)["sorter"] is None else "!"
    if len(eqn.operands[0].shape) == 1:
        return parse_rule(f"sorted_sequence: {whole}s, self: ..., sorter: {whole}s -> ...", eqn)
    return parse_rule(f"sorted_sequence: ... {whole}s, self: ... v, sorter: ... {whole}s -> ... v", eqn)


def _member(eqn: Eqn) -> Rule:
    """Whether each element is among others, all of which a rank must see."""
    among = " ".join(f"!among{i}" for i, _ in enumerate(eqn.operands[1].shape))
    x = " ".join(letters(len(eqn.operands[0].shape)))
    return parse_rule(f"{x}, {among} -> {x}", eqn)


_ALONG = [
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
    aten.topk.default,
    aten.kthvalue.default,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
]

ENTRIES: Mapping[Any, Entry] = {
    **dict.fromkeys(_ALONG, along),
    **dict.fromkeys([aten.median.default, aten.nanmedian.default], _of_all),
    aten.cumsum.default: _scanned_sum,
    aten.isin.Tensor_Tensor: _member,
    aten.searchsorted.Tensor: _searched,
    aten.bucketize.Tensor: form("self: ..., boundaries: n -> ..."),
}
