"""Reading and writing at positions: one that is fixed, or those in a tensor of indices.

A dim that is indexed is `masked`: its ranks hold ranges of positions, and each rank looks up (or writes) those that
it holds. A look-up then is a partial sum, since one rank has the row and the others zeros. Where indices write into
a tensor that is given, their own dims are whole, or each rank would start from that tensor again;
`vescale_fn.decompose` splits an accumulation into a sum of its own when the user shards them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.rules.registry import Entry, Slots, bound_args, form, parse_rule
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.rules.view import letters, replaced

aten = torch.ops.aten

_ADDED: Slots = {"self", "src"}


def _join(*layouts: Sequence[str]) -> str:
    return ", ".join(" ".join(x) for x in layouts)


def _all_whole(eqn: Eqn) -> Rule:
    """For scalars among the tensors, which torch takes for vectors of one element."""
    operands = [["!n"] if v.shape else [] for v in eqn.operands]
    return parse_rule(f"{_join(*operands)} -> {_join(*[['!r'] if v.shape else [] for v in eqn.outs])}", eqn)


# --- one position -------------------------------------------------------------------------------------------------


def _select(eqn: Eqn) -> Rule:
    x = letters(len(eqn.operands[0].shape))
    d = bound_args(eqn)["dim"] % len(x)
    text = f"{_join(replaced(x, d, 'row'))} -> {_join(replaced(x, d))}"
    return parse_rule(text, eqn, through=[0], masked=["row"])


def _select_backward(eqn: Eqn) -> Rule:
    x, rank = letters(len(eqn.operands[0].shape)), len(eqn.outs[0].shape)
    d = bound_args(eqn)["dim"] % rank
    return parse_rule(f"{_join(x)} -> {_join([*x[:d], 'row', *x[d:]])}", eqn, through=[0], masked=["row"])


# --- rows of a table --------------------------------------------------------------------------------------------


def _embedding_backward(eqn: Eqn) -> Rule:
    """Counts of the indices scale the gradient on request; then a rank must see all of them."""
    args = bound_args(eqn)
    whole = "!" if args["scale_grad_by_freq"] else ""
    i = [f"{whole}{x}" for x in letters(len(args["indices"].shape))]
    return parse_rule(f"{_join([*i, 'feature'], i)} -> row feature", eqn, linear=[{"grad_output"}], masked=["row"])


# --- one index per element --------------------------------------------------------------------------------------


def _aligned(shapes: Sequence[tuple[int, ...]], d: int) -> list[list[str]]:
    """Tokens for tensors of one rank that are read position by position, but for dim d. Where an index is shorter
    than what it indexes, it covers the first positions only, and the dim must be whole."""
    rank = len(shapes[0])
    out: list[list[str]] = [[] for _ in shapes]
    for i, x in enumerate(letters(rank)):
        same = len({s[i] for s in shapes}) == 1
        for k, tokens in enumerate(out):
            tokens.append(x if same or i == d else f"!{x}_{k}")
    return out


def _gather(eqn: Eqn) -> Rule:
    x, index = eqn.operands
    rank = len(x.shape)
    if not rank or not index.shape:
        return _all_whole(eqn)
    d = bound_args(eqn)["dim"] % rank
    data, at = _aligned([x.shape, index.shape], d)
    data, at = replaced(data, d, "row"), replaced(at, d, "at")
    return parse_rule(f"{_join(data, at)} -> {_join(at)}", eqn, linear=[{"self"}], through=["self"], masked=["row"])


def _scatter(*linear: Slots) -> Entry:
    """self, index[, src] -> self: a rank writes what falls on the positions it holds."""

    def entry(eqn: Eqn) -> Rule:
        rank = len(eqn.operands[0].shape)
        shapes = [v.shape for v in eqn.operands]
        if not rank or not all(shapes):
            return _all_whole(eqn)
        d = bound_args(eqn)["dim"] % rank
        tokens = _aligned(shapes, d)
        written = [replaced(t, d, f"!at{s[d]}") for t, s in zip(tokens[1:], shapes[1:])]
        data = replaced(tokens[0], d, "row")
        return parse_rule(f"{_join(data, *written)} -> {_join(data)}", eqn, linear=linear, masked=["row"])

    return entry


def _scatter_reduce(eqn: Eqn) -> Rule | None:
    linear = {"sum": [_ADDED], "mean": [_ADDED]}.get(bound_args(eqn)["reduce"], [])
    return _scatter(*linear)(eqn)


def _scatter_with(eqn: Eqn) -> Rule | None:
    """scatter that multiplies what is there, or adds to it; a number is added once, not by every rank."""
    args = bound_args(eqn)
    if args["reduce"] == "multiply":
        return _scatter({"self"})(eqn)
    return _scatter(*[_ADDED] if "src" in args else [])(eqn)


def _zero_keeps_sums(entry: Callable[..., Entry]) -> Entry:
    """Writing a number is linear when it is zero."""

    def chosen(eqn: Eqn) -> Rule | None:
        return entry(*[{"self"}] if bound_args(eqn)["value"] == 0 else [])(eqn)

    return chosen


# --- one index for whole rows -----------------------------------------------------------------------------------


def _index_select(eqn: Eqn) -> Rule:
    x, index = eqn.operands
    if not x.shape:
        return _all_whole(eqn)
    tokens = letters(len(x.shape))
    d = bound_args(eqn)["dim"] % len(tokens)
    at = ["at"] if index.shape else []
    out = replaced(tokens, d, *at or ["1"])
    return parse_rule(
        f"{_join(replaced(tokens, d, 'row'), at)} -> {_join(out)}",
        eqn,
        linear=[{"self"}],
        through=["self"],
        masked=["row"],
    )


def _index_write(*linear: Slots) -> Entry:
    """index_add, index_copy, index_fill: self, index[, source] -> self."""

    def entry(eqn: Eqn) -> Rule | None:
        x, index, *source = eqn.operands
        if not x.shape or (source and len(source[0].shape) != len(x.shape)):
            return None
        tokens = letters(len(x.shape))
        d = bound_args(eqn)["dim"] % len(tokens)
        data, rows = replaced(tokens, d, "row"), replaced(tokens, d, "!at")
        at = ["!at"] if index.shape else []
        text = f"{_join(data, at, *[rows] * len(source))} -> {_join(data)}"
        return parse_rule(text, eqn, linear=linear, masked=["row"])

    return entry


# --- several indices that broadcast -----------------------------------------------------------------------------


def _indexed(eqn: Eqn, whole: str) -> tuple[list[str], list[list[str]], list[str], list[str]] | None:
    """Tokens of self, of each index, and of self[indices], and the letters that are indexed. The indexed dims become
    the dims of the broadcast indices, in their place when they are next to each other, else in front. None for masks
    of booleans, whose results have no static shape."""
    args = bound_args(eqn)
    indices: list[Var | None] = list(args["indices"])
    given = [v for v in indices if v is not None]
    if not given or any(v.dtype in (torch.bool, torch.uint8) for v in given):
        return None
    data = letters(len(args["self"].shape))
    where = [d for d, v in enumerate(indices) if v is not None]
    rows = [f"row{d}" for d in where]
    picked = [f"{whole}at{i}" for i in range(max(len(v.shape) for v in given))]
    kept = [x for d, x in enumerate(data) if d not in where]
    start = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    for d, row in zip(where, rows):
        data[d] = row
    at = [picked[len(picked) - len(v.shape) :] for v in given]
    return data, at, [*kept[:start], *picked, *kept[start:]], rows


def _index(eqn: Eqn) -> Rule | None:
    found = _indexed(eqn, "")
    if found is None:
        return None
    data, at, out, rows = found
    return parse_rule(f"{_join(data, *at)} -> {_join(out)}", eqn, linear=[{"self"}], through=["self"], masked=rows)


def _index_put(eqn: Eqn) -> Rule | None:
    found = _indexed(eqn, "!")
    if found is None:
        return None
    data, at, out, rows = found
    values = out[len(out) - len(bound_args(eqn)["values"].shape) :]
    return parse_rule(f"{_join(data, *at, values)} -> {_join(data)}", eqn, linear=[{"self", "values"}], masked=rows)


def _take(eqn: Eqn) -> Rule:
    """Indices into the flattened tensor, which must be whole."""
    x, index = eqn.operands
    at = [f"at{i}" for i, _ in enumerate(index.shape)]
    return parse_rule(
        f"{_join([f'!{a}' for a in letters(len(x.shape))], at)} -> {_join(at)}",
        eqn,
        linear=[{"self"}],
        through=["self"],
    )


_FROM_SOURCE: Slots = {"self", "source"}

ENTRIES: Mapping[Any, Entry] = {
    aten.embedding.default: form(
        "weight: row feature, indices: ... -> ... feature", linear=[{"weight"}], through=["weight"], masked=["row"]
    ),
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter(_ADDED),
    aten.scatter.value: _zero_keeps_sums(_scatter),
    aten.scatter.reduce: _scatter_with,
    aten.scatter.value_reduce: _scatter_with,
    aten.scatter_add.default: _scatter(_ADDED),
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_select.default: _index_select,
    aten.index_add.default: _index_write(_FROM_SOURCE),
    aten.index_copy.default: _index_write(_FROM_SOURCE),
    aten.index_fill.int_Scalar: _zero_keeps_sums(_index_write),
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.take.default: _take,
}
