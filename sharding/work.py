"""What computing costs, in seconds of a model device. Only differences between layouts matter: heavy operations
count far more where every rank repeats them, so that a plan splits them whenever the user's shardings allow."""

from __future__ import annotations

from math import prod

import torch

from vescale_fn.sharding.candidates import Strategy
from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.layout import CUTS
from vescale_fn.sharding.rules.rule import Rule

FLOPS = 400e12  # per second
MEMORY = 2.5e12  # bytes per second
NETWORK = 200e9  # bytes per second
LATENCY = 1e-8  # seconds per collective: decides only between equals, a real latency would make tests replicate
REPEATED = 100.0  # how many times a heavy operation counts that every rank repeats
MOVED = 4.0  # and how many times its tensors: splitting it must win at the sizes of tests too, where it takes no time
FUSED = 1 / 6  # of what elementwise operations move when each runs alone

_PRODUCTS = "mm bmm addmm baddbmm addbmm mv dot outer matmul linear einsum convolution"
_LOOKUPS = "embedding"  # a product with rows of one-hot vectors; gathering the table must not look cheap
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "attention_math")

HEAVY = frozenset(
    (
        *f"{_PRODUCTS} {_LOOKUPS}".split(),
        "convolution_backward",
        "embedding_dense_backward",
        "orthogonal",
        *(f"_scaled_dot_product_{kind}{way}" for kind in _ATTENTION for way in ("", "_backward")),
    )
)


def is_heavy(eqn: Eqn) -> bool:
    """Whether an equation multiplies matrices, convolves or attends."""
    return isinstance(eqn.op, torch._ops.OpOverload) and eqn.op._opname in HEAVY


def heavy_seconds(rule: Rule, nbytes: float, share: float, strategy: Strategy, n: int) -> float:
    """`nbytes`: of all its tensors; `share`: of its multiplications; as far as other axes leave them to a rank."""
    seconds = 2.0 * prod(rule.sizes.values()) / FLOPS * share
    return seconds / n if strategy.letter else seconds * REPEATED + MOVED * (nbytes / NETWORK + LATENCY)


def light_seconds(values: tuple[Var, ...], nbytes: dict[Var, float], strategy: Strategy, n: int) -> float:
    """`nbytes`: of each value, as far as other axes leave it to a rank."""
    cut = (nbytes[v] / n if isinstance(s, CUTS) else nbytes[v] for v, s in zip(values, strategy.states))
    return sum(cut) / MEMORY * FUSED
