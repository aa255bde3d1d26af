"""Scaled dot-product attention, CPU and CUDA kernels.

Query heads are `(k g)`: k key/value heads, each serving a group of g query heads. Both may be sharded, and the batch.
Without a causal mask queries do not see each other, so their sequence may be sharded too; keys must be whole, since
the softmax runs over them. The backward is linear in the gradient, and what a rank's queries (or a part of a group)
give to keys and values is a partial sum. It knows the softmax's sums, so there keys may be sharded as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.rules.registry import Entry, bound_args, parse_rule
from vescale_fn.sharding.rules.rule import Rule

aten = torch.ops.aten


def _attention(eqn: Eqn) -> Rule | None:
    """One rule for all kernels, which differ in what else they take and return. Attention with dropout has no rule:
    ranks would draw the same mask for different parts."""
    args = bound_args(eqn)
    if args["dropout_p"]:
        return None
    tensors = {name: v for name, v in args.items() if isinstance(v, Var)}
    gradients = "logsumexp" in tensors
    s = "!s" if args["is_causal"] else "s"
    keys = "t" if gradients and not args["is_causal"] else "!t"
    dims = _Dims(s, keys, args["query"].shape[2])
    left = ", ".join(f"{name}: {dims.operand(name, v)}" for name, v in tensors.items())
    right = ", ".join(dims.result(i, v, gradients) if v.is_tensor else "" for i, v in enumerate(eqn.outs))
    linear = [{name} for name in ("grad_out", "grad_out_") if name in tensors]
    return parse_rule(f"{left} -> {right}", eqn, linear=linear, sizes={"k": args["key"].shape[1]})


@dataclass(frozen=True)
class _Dims:
    """The dims of what attention takes and returns. `s`, `t`: the letters of queries and keys; `rows`: how many
    queries there are."""

    s: str
    t: str
    rows: int

    def operand(self, name: str, v: Var) -> str:
        if name in ("grad_out", "grad_out_", "out"):
            return self.heads("v")
        if name in ("query", "key", "value"):
            return {"query": self.heads("e"), "key": self.key_heads("e"), "value": self.key_heads("v")}[name]
        if name in ("attn_mask", "attn_bias"):
            return self.mask(name, v)
        return self.sums(v) if name == "logsumexp" else _whole(name, v)

    def result(self, i: int, v: Var, gradients: bool) -> str:
        """Forward: the output, the log of the sums, seeds and such. Backward: gradients of query, key, value, mask."""
        if gradients:
            return (self.heads("e"), self.key_heads("e"), self.key_heads("v"), self.mask("r3", v))[i]
        return (self.heads("v"), self.sums(v))[i] if i < 2 else _whole(f"r{i}", v)

    def heads(self, width: str) -> str:
        return f"b (k g) {self.s} !{width}"

    def key_heads(self, width: str) -> str:
        return f"b k {self.t} !{width}"

    def sums(self, v: Var) -> str:
        """One a row, perhaps with a dim of size one behind; some kernels pad the rows, which then must be whole."""
        row = self.s if v.shape[2:3] == (self.rows,) else "!padded"
        return " ".join(["b (k g)", row, *["1"] * (len(v.shape) - 3)]) if len(v.shape) > 2 else _whole("sums", v)

    def mask(self, name: str, v: Var) -> str:
        """It broadcasts against `batch heads queries keys`. An empty vector says that there is none."""
        if len(v.shape) < 2:
            return _whole(name, v)
        dims = ["b", "(k g)", self.s, self.t][4 - len(v.shape) :]
        return " ".join("1" if n == 1 else d for d, n in zip(dims, v.shape))


def _whole(name: str, v: Var) -> str:
    return " ".join(f"!{name}{d}" for d, _ in enumerate(v.shape))


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
