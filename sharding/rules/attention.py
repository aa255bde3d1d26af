"""Scaled dot-product attention, CPU and CUDA kernels.

Query heads are `(k g)`: k key/value heads, each serving a group of g query heads. Both may be sharded, and the batch.
Without a causal mask queries do not see each other, so their sequence may be sharded too; keys must be whole, since
the softmax runs over them. The backward is linear in the gradient, and what a rank's queries (or a part of a group)
give to keys and values is a partial sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.rules.registry import Entry, bound_args, parse_rule
from vescale_fn.sharding.rules.rule import Rule

aten = torch.ops.aten

_MASK_NAMES = ("attn_mask", "attn_bias")


def _attention(eqn: Eqn) -> Rule | None:
    """One rule for all kernels, which differ in what else they take and return. Attention with dropout has no rule:
    ranks would draw the same mask for different parts."""
    args = bound_args(eqn)
    if args["dropout_p"]:
        return None
    query, key = args["query"], args["key"]
    s = "!s" if args["is_causal"] else "s"
    q, kv = f"b (k g) {s} !e", "b k !t !e"
    known = {"query": q, "key": kv, "value": "b k !t !v", "out": f"b (k g) {s} !v"}
    known |= {"grad_out": known["out"], "grad_out_": known["out"]}
    for name in _MASK_NAMES:
        mask = args.get(name)
        if isinstance(mask, Var) and len(mask.shape) > 1:  # an empty vector says that there is none
            known[name] = _mask_dims(mask, s)
    rows = query.shape[2]
    for name in ("logsumexp", "log_sumexp"):
        if isinstance(args.get(name), Var):
            known[name] = _row_dims(args[name], rows, s)
    others = {name: _whole(v, name) for name, v in args.items() if isinstance(v, Var) and name not in known}
    present = {name: dims for name, dims in (known | others).items() if isinstance(args.get(name), Var)}
    backward = "logsumexp" in args
    results = [q, kv, known["value"], known.get("attn_bias", "")] if backward else [known["out"]]
    texts = [_result(v, i, results, rows, s, backward) for i, v in enumerate(eqn.outs)]
    left = ", ".join(f"{name}: {dims}" for name, dims in present.items())
    grad = "grad_out_" if "grad_out_" in present else "grad_out"
    linear = [{grad}] if backward else []
    return parse_rule(f"{left} -> {', '.join(texts)}", eqn, linear=linear, sizes={"k": key.shape[1]})


def _result(v: Var, i: int, results: list[str], rows: int, s: str, backward: bool) -> str:
    """Dims of result i: the named ones, then the log of the sums per row, then seeds and the like."""
    if not v.is_tensor:
        return ""
    if i < len(results):
        return results[i] if v.shape else ""
    return _row_dims(v, rows, s) if i == 1 and not backward else _whole(v, f"r{i}")


def _row_dims(v: Var, rows: int, s: str) -> str:
    """The log of the sums, one a row; some kernels pad the rows, which then must be whole."""
    if len(v.shape) < 3:
        return _whole(v, "sums")
    return " ".join([f"b (k g) {s if v.shape[2] == rows else '!padded'}", *["1"] * (len(v.shape) - 3)])


def _mask_dims(mask: Var, s: str) -> str:
    """A mask broadcasts against `batch heads queries keys`."""
    dims = ["b", "(k g)", s, "!t"][4 - len(mask.shape) :]
    return " ".join("1" if n == 1 else d for d, n in zip(dims, mask.shape))


def _whole(v: Var, stem: str) -> str:
    return " ".join(f"!{stem}{d}" for d, _ in enumerate(v.shape))


ENTRIES: Mapping[Any, Entry] = dict.fromkeys(
    [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    ],
    _attention,
)
