"""Gradient clipping, by value and by global norm: as functions of gradients, and as transforms of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fn.optim.transform import Transform, of_gradients
from vescale_fn.tree import flatten, map_leaves, unflatten

Tree = Any


def clip_norm(max_norm: float | Tensor, norm_type: float = 2.0) -> Transform:
    """The optimizer sees gradients that `clip_by_global_norm` has clipped."""
    _check_norm_type("clip_norm", norm_type)
    name = f"clip_norm({max_norm})" if norm_type == 2.0 else f"clip_norm({max_norm}, {norm_type})"
    return of_gradients(name, lambda grads: clip_by_global_norm(grads, max_norm, norm_type)[0])


def clip_value(max_value: float) -> Transform:
    """The optimizer sees gradients that `clip_by_value` has clipped."""
    return of_gradients(f"clip_value({max_value})", lambda grads: clip_by_value(grads, max_value))


def clip_by_value(grads: Tree, max_value: float) -> Tree:
    """`grads` with every element cut to [-max_value, max_value], as torch.nn.utils.clip_grad_value_; NaN stays.

    >>> clip_by_value({"w": torch.tensor([3.0, -0.5])}, 1.0)
    {'w': tensor([ 1.0000, -0.5000])}
    """
    return map_leaves(lambda g: None if g is None else g.clamp(-max_value, max_value), grads)


def clip_by_global_norm(grads: Tree, max_norm: float | Tensor, norm_type: float = 2.0) -> tuple[Tree, Tensor]:
    """`grads` scaled so that the norm of all of them together is at most `max_norm`, and the norm before that, a 0-d
    tensor (float32 for half precision). `norm_type`: 2 or inf. As torch.nn.utils.clip_grad_norm_; a norm that is not
    finite is returned as it is and makes the gradients NaN. Right under any sharding: the sums are over global values.

    >>> clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
    ({'w': tensor([0.6000, 0.8000])}, tensor(5.))
    """
    _check_norm_type("clip_by_global_norm", norm_type)
    leaves, tree = flatten(grads)
    norm = _global_norm([g for g in leaves if g is not None], norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return unflatten(tree, [None if g is None else g * scale.to(g.dtype) for g in leaves]), norm


def _global_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    if not grads:
        return torch.zeros(())
    wide = [g.float() if g.dtype in (torch.float16, torch.bfloat16) else g for g in grads]
    if norm_type == math.inf:
        return torch.stack([g.abs().amax() for g in wide if g.numel()]).amax()
    # Sums of squares, not norms of norms: pending sums of shards meet in one reduction of a scalar.
    return torch.stack([(g.abs() if g.is_complex() else g).square().sum() for g in wide]).sum().sqrt()


def _check_norm_type(name: str, norm_type: float) -> None:
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"{name}: norm_type={norm_type} is not known; it must be 2 or math.inf.")
