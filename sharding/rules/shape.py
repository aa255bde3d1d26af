"""Operations that put tensors together or move elements along a dim: cat, stack, pad, flip, roll, repeat, tril."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import Entry, bound_args, form, parse_rule
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.rules.view import arrow, equal_pieces, letters, replaced

aten = torch.ops.aten


def _cat(eqn: Eqn) -> Rule:
    """Equal parts make a dim `(piece within)`, whose minor factor may be sharded. An empty vector among tensors of
    higher rank takes no part."""
    rank = len(eqn.outs[0].shape)
    d, x = bound_args(eqn)["dim"] % rank, letters(rank)
    joined = [v.shape[d] for v in eqn.operands if len(v.shape) == rank]
    whole, tokens = equal_pieces(joined)
    pieces = iter(tokens)
    left = [replaced(x, d, next(pieces)) if len(v.shape) == rank else ["!none"] for v in eqn.operands]
    text = f"{', '.join(' '.join(t) for t in left)} -> {' '.join(replaced(x, d, whole))}"
    return parse_rule(text, eqn, linear=[range(len(left))])


def _stack(eqn: Eqn) -> Rule:
    n, rank = len(eqn.operands), len(eqn.outs[0].shape)
    d, x = bound_args(eqn)["dim"] % rank, letters(rank - 1)
    text = f"{', '.join([' '.join(x)] * n)} -> {' '.join([*x[:d], '!piece', *x[d:]])}"
    return parse_rule(text, eqn, linear=[range(n)])


def _pad(eqn: Eqn) -> Rule:
    """Padded dims are whole. Zeros added to every part do not change sums, maxima or minima of the parts."""
    args, rank = bound_args(eqn), len(eqn.operands[0].shape)
    pairs = list(zip(args["pad"][::2], args["pad"][1::2]))
    padded = {rank - 1 - i for i, pair in enumerate(pairs) if any(pair)}
    x = letters(rank)
    left = [f"!{a}" if d in padded else a for d, a in enumerate(x)]
    right = [f"!padded{d}" if d in padded else a for d, a in enumerate(x)]
    return parse_rule(arrow(left, right), eqn, through=[0] if args["value"] == 0 else [])


def _moved_along(eqn: Eqn) -> Rule:
    """flip, roll: the dims named must be whole; a roll that names none is one of the flattened tensor."""
    rank = len(eqn.operands[0].shape)
    moved = {d % rank for d in bound_args(eqn)["dims"]} or (set(range(rank)) if eqn.op is aten.roll.default else set())
    x = [f"!{a}" if d in moved else a for d, a in enumerate(letters(rank))]
    return parse_rule(arrow(x, x), eqn, through=[0])


def _repeat(eqn: Eqn) -> Rule:
    """A repeated dim is `(copy within)`; the copies are whole, what is repeated may be sharded."""
    x, times = letters(len(eqn.operands[0].shape)), bound_args(eqn)["repeats"]
    new = len(times) - len(x)
    right = [
        f"!copy{d}" if d < new else x[d - new] if n == 1 else f"(!copy{d} {x[d - new]})" for d, n in enumerate(times)
    ]
    return parse_rule(arrow(x, right), eqn, through=[0], sizes={f"copy{d}": n for d, n in enumerate(times)})


_TRIANGLE = form("... !row !column -> ... !row !column", through=[0])

ENTRIES: Mapping[Any, Entry] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    aten.flip.default: _moved_along,
    aten.roll.default: _moved_along,
    aten.repeat.default: _repeat,
    aten.tril.default: _TRIANGLE,
    aten.triu.default: _TRIANGLE,
}
