"""Softmax and normalisations: what is normalised over must be whole. When the user shards it, `vescale_fn.decompose`
writes the operation as sums and maxima, which may be pending."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.order import along
from vescale_fn.sharding.rules.registry import Entry, Slots, bound_args, parse_rule
from vescale_fn.sharding.rules.rule import Rule

aten = torch.ops.aten


def results_text(eqn: Eqn, texts: Iterable[str]) -> str:
    """The right side of a rule; results that the call does not make (masked gradients) have no dims."""
    return ", ".join(t if v.is_tensor else "" for t, v in zip(texts, eqn.outs))


def _bound(eqn: Eqn, operands: Mapping[str, str], results: Iterable[str], linear: Iterable[Slots] = ()) -> Rule:
    left = ", ".join(f"{name}: {dims}" for name, dims in operands.items())
    return parse_rule(f"{left} -> {results_text(eqn, results)}", eqn, linear=linear)


def _softmax_backward(eqn: Eqn) -> Rule:
    return along(eqn, ({0},))


def _trailing(eqn: Eqn) -> Rule:
    """Normalisation over the last dims: layer norm and RMS norm, and their backward."""
    names = [f"!n{i}" for i, _ in enumerate(bound_args(eqn)["normalized_shape"])]
    x, row, scale = " ".join(["...", *names]), " ".join(["...", *["1"] * len(names)]), " ".join(names)
    operands = {"grad_out": x, "input": x, "mean": row, "rstd": row, "weight": scale, "bias": scale}
    if "grad_out" in bound_args(eqn):
        return _bound(eqn, operands, [x, scale, scale], [{"grad_out"}])
    return _bound(eqn, operands, [x, row, row])


def _grouped(eqn: Eqn) -> Rule:
    """Group norm: `b (group channel) spatial...`."""
    group = bound_args(eqn)["group"]
    space = " ".join(f"!s{i}" for i, _ in enumerate(eqn.operands[0].shape[2:]))
    x, scale = f"b (g !c) {space}", "(g !c)"
    names = {"grad_out": x, "input": x, "mean": "b g", "rstd": "b g", "weight": scale, "bias": scale}
    backward = "grad_out" in bound_args(eqn)
    left = ", ".join(f"{name}: {dims}" for name, dims in names.items())
    right = results_text(eqn, [x, scale, scale] if backward else [x, "b g", "b g"])
    return parse_rule(f"{left} -> {right}", eqn, linear=[{"grad_out"}] if backward else [], sizes={"g": group})


def _batched(eqn: Eqn) -> Rule:
    """Batch norm: with statistics of this batch everything but the channels is whole; with running statistics it is
    pointwise. Saved statistics that were not made are empty."""
    args = bound_args(eqn)
    whole = "!" if args.get("training", args.get("train", True)) else ""
    space = " ".join(f"{whole}s{i}" for i, _ in enumerate(eqn.operands[0].shape[2:]))
    x, saved = f"{whole}b c {space}", "c" if whole else "!none"
    channel = ("weight", "bias", "running_mean", "running_var")
    operands = {"grad_out": x, "input": x, **dict.fromkeys(channel, "c"), "save_mean": saved, "save_invstd": saved}
    if "grad_out" in args:
        return _bound(eqn, operands, [x, "c", "c"], [{"grad_out"}])
    return _bound(eqn, operands, [x, saved, saved, "c", "c"])


_SOFTMAX = [aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default]
_SOFTMAX_BACKWARD = [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default]
_TRAILING = [
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
]
_BATCHED = [
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
]

ENTRIES: Mapping[Any, Entry] = {
    **dict.fromkeys(_SOFTMAX, along),
    **dict.fromkeys(_SOFTMAX_BACKWARD, _softmax_backward),
    **dict.fromkeys(_TRAILING, _trailing),
    **dict.fromkeys([aten.native_group_norm.default, aten.native_group_norm_backward.default], _grouped),
    **dict.fromkeys(_BATCHED, _batched),
}
