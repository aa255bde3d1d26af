"""Operations that put tensors together, or move elements within a dim or between dims."""

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


def _rot90(eqn: Eqn) -> Rule:
    """A quarter turn exchanges two dims and reverses one of them; a dim that is reversed must be whole."""
    args, x = bound_args(eqn), letters(len(eqn.operands[0].shape))
    i, j = (d % len(x) for d in args["dims"])
    reversed_dims = ((), (j,), (i, j), (i,))[args["k"] % 4]
    left = [f"!{a}" if d in reversed_dims else a for d, a in enumerate(x)]
    right = list(left)
    if args["k"] % 2:
        right[i], right[j] = left[j], left[i]
    return parse_rule(arrow(left, right), eqn, through=[0])


def _glu(eqn: Eqn) -> Rule:
    """Forward halves a dim, backward doubles it again."""
    d = bound_args(eqn)["dim"] % len(eqn.outs[0].shape)
    x = letters(len(eqn.outs[0].shape))
    half, full = (" ".join(replaced(x, d, token)) for token in ("!half", "!full"))
    if eqn.op is aten.glu.default:
        return parse_rule(f"{full} -> {half}", eqn)
    return parse_rule(f"{half}, {full} -> {full}", eqn, linear=[{"grad_output"}])


def _pixel_shuffle(eqn: Eqn) -> Rule:
    r = bound_args(eqn)["upscale_factor"]
    return parse_rule("... (c !i !j) h w -> ... c (h !i) (w !j)", eqn, through=[0], sizes={"i": r, "j": r})


def _pixel_unshuffle(eqn: Eqn) -> Rule:
    r = bound_args(eqn)["downscale_factor"]
    return parse_rule("... c (h !i) (w !j) -> ... (c !i !j) h w", eqn, through=[0], sizes={"i": r, "j": r})


_PADDED = [" ".join(["...", *[f"!padded{i}" for i in range(n)]]) for n in (1, 2, 3)]
_INNER = [" ".join(["...", *[f"!inner{i}" for i in range(n)]]) for n in (1, 2, 3)]
_PADS = [
    [aten.reflection_pad1d.default, aten.replication_pad1d.default],
    [aten.reflection_pad2d.default, aten.replication_pad2d.default],
    [aten.reflection_pad3d.default, aten.replication_pad3d.default],
]
_PADS_BACKWARD = [
    [aten.reflection_pad1d_backward.default, aten.replication_pad1d_backward.default],
    [aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default],
    [aten.reflection_pad3d_backward.default, aten.replication_pad3d_backward.default],
]
_TRIANGLE = form("... !row !column -> ... !row !column", through=[0])

ENTRIES: Mapping[Any, Entry] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    **{op: form(f"{i} -> {p}", through=[0]) for i, p, ops in zip(_INNER, _PADDED, _PADS) for op in ops},
    **{op: form(f"{p}, {i} -> {i}", linear=[{0}]) for i, p, ops in zip(_INNER, _PADDED, _PADS_BACKWARD) for op in ops},
    aten.flip.default: _moved_along,
    aten.roll.default: _moved_along,
    aten.repeat.default: _repeat,
    aten.rot90.default: _rot90,
    aten.glu.default: _glu,
    aten.glu_backward.default: _glu,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.im2col.default: form("... c !h !w -> ... (c !window) !position", through=[0]),
    aten.col2im.default: form("... (c !window) !position -> ... c !h !w", linear=[{0}]),
    aten.tril.default: _TRIANGLE,
    aten.triu.default: _TRIANGLE,
}
