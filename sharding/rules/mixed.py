"""Operations that take their elements in order, or by their place among all: those dims are whole, the others free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.layout import Kind
from vescale_fn.sharding.rules.registry import Entry, Slots, bound_args, operand_slots, parse_rule
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.rules.view import letters, replaced

aten = torch.ops.aten

_MAX = 2  # of the modes of embedding bags


def _whole(*linear: Slots, through: Slots = ()) -> Callable[[Eqn], Rule]:
    """Every dim whole, and none tied to another."""

    def entry(eqn: Eqn) -> Rule:
        left = [" ".join(f"!x{i}_{d}" for d, _ in enumerate(v.shape)) for i, v in enumerate(eqn.operands)]
        right = [" ".join(f"!y{i}_{d}" for d, _ in enumerate(v.shape)) for i, v in enumerate(eqn.outs)]
        return parse_rule(f"{', '.join(left)} -> {', '.join(right)}", eqn, linear=linear, through=through)

    return entry


def _block_diag(eqn: Eqn) -> Rule:
    """Zeros around its operands: linear in all of them together."""
    return _whole(range(len(eqn.operands)))(eqn)


def _renorm(eqn: Eqn) -> Rule:
    """Each slice along `dim` by its own norm."""
    rank = len(eqn.operands[0].shape)
    d = bound_args(eqn)["dim"] % rank
    x = " ".join(a if i == d else f"!{a}" for i, a in enumerate(letters(rank)))
    return parse_rule(f"{x} -> {x}", eqn)


def _histc(eqn: Eqn) -> Rule:
    """Counts of parts add up where the bins are given; else the smallest and the largest element say what they are."""
    args = bound_args(eqn)
    whole = "!" if args["min"] == args["max"] else ""
    return parse_rule(f"{' '.join(whole + a for a in letters(len(eqn.operands[0].shape)))} -> !bin", eqn)


def _index_reduce(eqn: Eqn) -> Rule | None:
    """Rows reduced into those that an index names; the rows' own dims are free."""
    x, index, source = eqn.operands
    if not x.shape or len(source.shape) != len(x.shape):
        return None
    args, tokens = bound_args(eqn), letters(len(x.shape))
    d = args["dim"] % len(tokens)
    data, rows = (" ".join(replaced(tokens, d, name)) for name in ("!row", "!at"))
    linear: list[Slots] = [{"self", "source"}] if args["reduce"] == "mean" else []
    return parse_rule(f"{data}, {'!at' if index.shape else ''}, {rows} -> {data}", eqn, linear=linear)


# --- bags of embeddings -------------------------------------------------------------------------------------------

_BAG_OPERANDS = {
    "grad": "!bag feature",
    "weight": "!row feature",
    "indices": "!i",
    "offsets": "!offset",
    "per_sample_weights": "!i",
    "offset2bag": "!place",
    "bag_size": "!size",
}


def _bags(eqn: Eqn, results: list[str], linear: Sequence[Slots] = (), **reduces: Kind) -> Rule:
    args, slots = bound_args(eqn), operand_slots(eqn)
    largest = "!bag feature" if args["mode"] == _MAX else "!none"
    names = {**_BAG_OPERANDS, "maximum_indices": largest}
    left = ", ".join(f"{name}: {dims}" for name, dims in names.items() if name in slots)
    right = ", ".join(r or largest for r in results)
    return parse_rule(f"{left} -> {right}", eqn, linear=linear, reduces=reduces)


def _embedding_bag(eqn: Eqn) -> Rule:
    """Features are free. The other results say what is in which bag: all ranks have the same, which is its maximum.
    They are not sums, so that what is partial is reduced first."""
    return _bags(eqn, ["!bag feature", "!place", "!size", ""], feature="max")


def _embedding_bag_backward(eqn: Eqn) -> Rule:
    return _bags(eqn, ["!row feature"], [{"grad"}])


def _bag_weights_backward(eqn: Eqn) -> Rule:
    """Each weight by a product over features."""
    return _bags(eqn, ["!i"], [{"grad"}, {"weight"}])


ENTRIES: Mapping[Any, Entry] = {
    aten.masked_scatter.default: _whole({"self", "source"}),
    aten.masked_scatter_backward.default: _whole(through={"grad_output"}),  # what is masked, then zeros
    aten.put.default: _whole({"self", "source"}),
    aten.block_diag.default: _block_diag,
    aten.renorm.default: _renorm,
    aten.histc.default: _histc,
    aten.index_reduce.default: _index_reduce,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._embedding_bag_dense_backward.default: _embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: _bag_weights_backward,
}
