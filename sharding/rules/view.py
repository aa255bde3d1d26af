"""Views: operations that only rename, split, merge, drop or repeat dims. Partial values of any kind pass through.

A letter that selects (the piece of a split) must be whole: it would otherwise be missing
from the result, which means a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from math import gcd
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.notation import fresh_letters
from vescale_fn.sharding.rules.registry import Entry, bound_args, form, parse_rule
from vescale_fn.sharding.rules.rule import Rule

aten = torch.ops.aten


def letters(n: int) -> list[str]:
    """The first n letters, one for each dim: tokens of the notation."""
    return list(islice(fresh_letters(), n))


def arrow(left: Sequence[str], *right: Sequence[str]) -> str:
    """`left -> right, right` of tokens."""
    return f"{' '.join(left)} -> {', '.join(' '.join(r) for r in right)}"


def replaced(tokens: Sequence[str], at: int, *by: str) -> list[str]:
    """Tokens with the one at `at` replaced by any number of others."""
    return [*tokens[:at], *by, *tokens[at + 1 :]]


# --- reshaping --------------------------------------------------------------------------------------------------


@cache
def match_factors(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[str, Mapping[str, int]]:
    """The rule of a reshape, and the sizes of its letters.

    Both shapes are read from the major end; where the products of what was read are equal, the greatest common
    divisor of what remains of the two dims is a shared factor. Where they cross, dims are whole until they meet.

    >>> match_factors((6, 5), (2, 3, 5))[0]
    '(a b) c -> a b c'
    >>> match_factors((6, 4), (4, 6))[0]
    '(a !b) !e -> (a !c) !d'
    """
    names, sizes = fresh_letters(), dict[str, int]()
    factors: tuple[list[list[str]], list[list[str]]] = ([[] for _ in old], [[] for _ in new])
    if 0 in old:
        return arrow(*[[f"!{next(names)}" for _ in shape] for shape in (old, new)]), _zero_sizes(old, new)
    rest = (list(old), list(new))
    at = [0, 0]

    def take(side: int, n: int, letter: str) -> None:
        sizes[letter.removeprefix("!")] = n
        factors[side][at[side]].append(letter)
        rest[side][at[side]] //= n

    def skip_ones() -> bool:
        for side in (0, 1):
            while at[side] < len(rest[side]) and rest[side][at[side]] == 1:
                at[side] += 1
        return at[0] < len(old)

    while skip_ones():
        common = gcd(rest[0][at[0]], rest[1][at[1]])
        if common > 1:
            letter = next(names)
            take(0, common, letter)
            take(1, common, letter)
            continue
        crossed = [1, 1]
        while crossed == [1, 1] or crossed[0] != crossed[1]:
            side = 0 if crossed[0] <= crossed[1] else 1
            n = rest[side][at[side]]
            crossed[side] *= n
            take(side, n, f"!{next(names)}")
            skip_ones()
    return arrow(*[[_token(f) for f in side] for side in factors]), sizes


def _token(factors: Sequence[str]) -> str:
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


def _zero_sizes(old: tuple[int, ...], new: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(letters(len(old) + len(new)), old + new))


def _reshape(eqn: Eqn) -> Rule:
    text, sizes = match_factors(eqn.operands[0].shape, eqn.outs[0].shape)
    return replace(parse_rule(text, eqn, through=[0], sizes=sizes), merges="freely")


def _expand(eqn: Eqn) -> Rule:
    return replace(parse_rule("... -> ...", eqn, through=[0]), merges="alike")


# --- one operand, dims moved or cut -------------------------------------------------------------------------------


Text = Callable[[list[str], dict[str, Any], Eqn], str]  # of a token per dim, the arguments and the equation


def _passing(build: Text) -> Entry:
    """An entry for an operation of one tensor through which every partial value passes."""

    def entry(eqn: Eqn) -> Rule:
        return parse_rule(build(letters(len(eqn.operands[0].shape)), bound_args(eqn), eqn), eqn, through=[0])

    return entry


def _summing(build: Text) -> Entry:
    """An entry for an operation of one tensor that adds elements up: sums pass, maxima do not."""

    def entry(eqn: Eqn) -> Rule:
        return parse_rule(build(letters(len(eqn.operands[0].shape)), bound_args(eqn), eqn), eqn, linear=[{0}])

    return entry


def _permute(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    return arrow(x, [x[d] for d in args["dims"]])


def _transpose(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    out = list(x)
    if x:
        i, j = args["dim0"], args["dim1"]
        out[i], out[j] = x[j], x[i]
    return arrow(x, out)


def _t(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    return arrow(x, x[::-1])


def _slice(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    d = args["dim"] % len(x)
    whole, part = cut_tokens(eqn.operands[0].shape[d], eqn.outs[0].shape[d], args["start"], args["step"])
    return arrow(replaced(x, d, whole), replaced(x, d, part))


def _slice_backward(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    d = args["dim"] % len(x)
    whole, part = cut_tokens(eqn.outs[0].shape[d], eqn.operands[0].shape[d], args["start"], args["step"])
    return arrow(replaced(x, d, part), replaced(x, d, whole))


def cut_tokens(size: int, length: int, start: int | None, step: int) -> tuple[str, str]:
    """Tokens of a dim and of a slice of it: the same letter if all of it is taken; one of equal pieces; or whole."""
    first = min(max(start + size if (start or 0) < 0 else start, 0), size) if start is not None else 0
    if length == size and step == 1:
        return "all", "all"
    if step == 1 and length and size % length == 0 and first % length == 0:
        return "(!piece within)", "within"
    return "!full", "!part"


def _split(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    d = args["dim"] % len(x)
    parts = [v.shape[d] for v in eqn.outs]
    whole, tokens = equal_pieces(parts)
    return arrow(replaced(x, d, whole), *[replaced(x, d, t) for t in tokens])


def equal_pieces(parts: Sequence[int]) -> tuple[str, list[str]]:
    """Tokens of a dim and of the pieces it is made of: equal pieces share a letter, others are whole."""
    if len(set(parts)) == 1 and (parts[0] or len(parts) == 1):
        return ("within" if len(parts) == 1 else "(!piece within)"), ["within"] * len(parts)
    return "!full", [f"!part{i}" for i in range(len(parts))]


def _unbind(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    d = args["dim"] % len(x)
    return arrow(replaced(x, d, f"!{x[d]}"), *[replaced(x, d)] * len(eqn.outs))


def _diagonal(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    dims = {args["dim1"] % len(x), args["dim2"] % len(x)}
    left = [f"!{a}" if d in dims else a for d, a in enumerate(x)]
    return arrow(left, [*(a for d, a in enumerate(x) if d not in dims), "!diagonal"])


def _diagonal_backward(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    rank = len(eqn.outs[0].shape)
    dims, kept = {args["dim1"] % rank, args["dim2"] % rank}, iter(x)
    return arrow([*x[:-1], f"!{x[-1]}"], [f"!new{d}" if d in dims else next(kept) for d in range(rank)])


def _unfold(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    d = args["dimension"] % len(x) if x else 0
    return arrow(replaced(x, d, f"!{x[d]}"), [*replaced(x, d, "!windows"), "!window"])


def _unfold_backward(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    d = args["dim"] % len(eqn.outs[0].shape)
    return arrow([*replaced(x, d, "!windows")[:-1], "!window"], replaced(x, d, "!new")[:-1])


def _as_strided(x: list[str], args: dict[str, Any], eqn: Eqn) -> str:
    return arrow([f"!{a}" for a in x], [f"!new{d}" for d in range(len(eqn.outs[0].shape))])


# --- writing into a part ------------------------------------------------------------------------------------------


def _slice_scatter(eqn: Eqn) -> Rule:
    (x, part), args = eqn.operands, bound_args(eqn)
    tokens, d = letters(len(x.shape)), args["dim"] % len(x.shape)
    if x.shape[d] == part.shape[d]:
        return parse_rule("..., ... -> ...", eqn, linear=[{0, 1}], through=[1])
    full, piece = " ".join(replaced(tokens, d, "!full")), " ".join(replaced(tokens, d, "!part"))
    return parse_rule(f"{full}, {piece} -> {full}", eqn, linear=[{0, 1}])


def _select_scatter(eqn: Eqn) -> Rule:
    tokens = letters(len(eqn.operands[0].shape))
    d = bound_args(eqn)["dim"] % len(tokens)
    full = " ".join(replaced(tokens, d, f"!{tokens[d]}"))
    return parse_rule(f"{full}, {' '.join(replaced(tokens, d))} -> {full}", eqn, linear=[{0, 1}])


_RESHAPES = [
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
]
_SPLITS = [
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default,
]

ENTRIES: Mapping[Any, Entry] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_SPLITS, _passing(_split)),
    aten.expand.default: _expand,
    aten.permute.default: _passing(_permute),
    aten.transpose.int: _passing(_transpose),
    aten.t.default: _passing(_t),
    aten.t_copy.default: _passing(_t),
    aten.slice.Tensor: _passing(_slice),
    aten.slice_backward.default: _passing(_slice_backward),
    aten.unbind.int: _passing(_unbind),
    aten.unbind_copy.int: _passing(_unbind),
    aten.diagonal.default: _passing(_diagonal),
    aten.diagonal_copy.default: _passing(_diagonal),
    aten.diagonal_backward.default: _passing(_diagonal_backward),
    aten.unfold.default: _passing(_unfold),
    aten.diag_embed.default: _passing(_diagonal_backward),
    aten.unfold_backward.default: _summing(_unfold_backward),
    aten.as_strided.default: _passing(_as_strided),
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.view_as_real.default: form("... -> ... !parts", linear=[{0}]),
    aten.view_as_complex.default: form("... !parts -> ...", linear=[{0}]),
}
