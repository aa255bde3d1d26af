"""Optimizers as pairs of pure functions on pytrees.

    opt = vf.optim.adamw(lr=3e-4)
    state = opt.init(params)
    params, state = opt.step(grads, state, params)

`params` is any pytree of floating-point tensors. `state` is a dict: "step", the number of updates done (one 0-d
float32 tensor), and a mirror of `params` for each moment, under torch's name for it ("exp_avg", "exp_avg_sq",
"momentum_buffer"). A step is one operation for all parameters of a dtype, and gives bit for bit what the torch.optim
class of the same name gives with `fused=True`. A gradient that is None leaves its parameter and moments alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vescale_fn.array import Array
from vescale_fn.fused import UPDATES
from vescale_fn.pjit import pjit
from vescale_fn.tree import flatten, flatten_with_paths, unflatten

Tree = Any
Schedule = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions: `init(params) -> state` and `step(grads, state, params) -> (params, state)`.

    >>> opt = sgd(lr=0.5)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> opt.step({"w": torch.ones(2)}, opt.init(params), params)
    ({'w': tensor([0.5000, 1.5000])}, {'step': tensor(1.)})
    """

    name: str
    init: Callable[[Tree], dict[str, Tree]]
    step: Callable[[Tree, dict[str, Tree], Tree], tuple[Tree, dict[str, Tree]]]

    def __repr__(self) -> str:
        return self.name


def adamw(
    lr: float | Tensor | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """AdamW: Adam with decoupled weight decay. Arguments as torch.optim.AdamW; `lr` may be a function of the number
    of updates done (see `warmup_cosine`). Raises ValueError for settings out of range.

    >>> adamw(lr=3e-4)
    adamw(lr=0.0003, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)
    """
    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, maximize)


def adam(
    lr: float | Tensor | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam; weight decay is added to the gradient. Arguments as torch.optim.Adam and `adamw`."""
    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, maximize)


def sgd(
    lr: float | Tensor | Schedule = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Stochastic gradient descent, with momentum when `momentum` is not 0. Arguments as torch.optim.SGD."""
    _check_settings("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("sgd: nesterov=True needs momentum > 0 and dampening=0.")
    settings = {
        "momentum": float(momentum),
        "dampening": float(dampening),
        "weight_decay": float(weight_decay),
        "nesterov": nesterov,
        "maximize": maximize,
    }
    name = f"sgd(lr={_rate_text(lr)}, momentum={momentum}, weight_decay={weight_decay})"
    lists = ("momentum_buffer" if momentum else None,)
    return _optimizer(_Algorithm(name, UPDATES["sgd"], lists, lr, settings))


def _adam(
    name: str,
    lr: float | Tensor | Schedule,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
) -> Optimizer:
    _check_settings(name, lr=lr, eps=eps, weight_decay=weight_decay)
    if not all(0 <= b < 1 for b in betas):
        raise ValueError(f"{name}: betas={betas} must both lie in [0, 1).")
    settings = {
        "beta1": float(betas[0]),
        "beta2": float(betas[1]),
        "eps": float(eps),
        "weight_decay": float(weight_decay),
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    text = f"{name}(lr={_rate_text(lr)}, betas={betas}, eps={eps}, weight_decay={weight_decay})"
    lists = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq" if amsgrad else None)
    return _optimizer(_Algorithm(text, UPDATES[name], lists, lr, settings))


@dataclass(frozen=True)
class _Algorithm:
    """An optimizer made of one list operation.

    lists: for each list of moments that `update` takes its name in the state, or None for one that stays empty.
    """

    name: str
    update: Callable[..., list[Tensor]]
    lists: tuple[str | None, ...]
    lr: float | Tensor | Schedule
    settings: Mapping[str, Any]

    @property
    def moments(self) -> list[str]:
        return [m for m in self.lists if m]

    def init(self, params: Tree) -> dict[str, Tree]:
        leaves, tree = flatten(params)
        if not _any_array(leaves):
            return self._zeros(params)
        # As a pjit: moments are born where their parameters live, and no rank holds a whole one.
        places = unflatten(tree, [None if p is None else p.sharding for p in leaves])
        return pjit(self._zeros, out_shardings={"step": "", **dict.fromkeys(self.moments, places)})(params)

    def step(self, grads: Tree, state: dict[str, Tree], params: Tree) -> tuple[Tree, dict[str, Tree]]:
        outside = _any_array(flatten(params)[0])
        return (self._jitted_step if outside else self._step)(grads, state, params)

    @cached_property
    def _jitted_step(self) -> Callable[[Tree, Tree, Tree], tuple[Tree, dict[str, Tree]]]:
        return pjit(self._step)

    def _zeros(self, params: Tree) -> dict[str, Tree]:
        _check_params(self.name, params)
        leaves, tree = flatten(params)
        device = next((p.device for p in leaves if p is not None), None)
        zeros = {m: [None if p is None else torch.zeros_like(p) for p in leaves] for m in self.moments}
        step = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": step, **{m: unflatten(tree, z) for m, z in zeros.items()}}

    def _step(self, grads: Tree, state: dict[str, Tree], params: Tree) -> tuple[Tree, dict[str, Tree]]:
        leaves, tree = flatten(params)
        given = tree.flatten_up_to(grads)
        _check_grads(self.name, params, given)
        columns = [leaves, *(tree.flatten_up_to(state[m]) for m in self.moments)]  # what is updated
        rate = self.lr(state["step"].double()) if callable(self.lr) else self.lr
        count = state["step"] + 1
        for rows in _groups(leaves, given):
            self._update_rows(rows, columns, given, count, rate)
        new_params, *moments = (unflatten(tree, c) for c in columns)
        return new_params, {"step": count, **dict(zip(self.moments, moments))}

    def _update_rows(self, rows: list[int], columns: list[list[Any]], grads: list[Any], count: Any, rate: Any) -> None:
        """Replace these rows of the columns: parameters, then moments."""
        params, *moments = ([c[i] for i in rows] for c in columns)
        filled = iter(moments)
        lists = [next(filled) if m else [] for m in self.lists]
        updated = iter(self.update(params, [grads[i] for i in rows], *lists, count, rate, **self.settings))
        for column in columns:
            for i in rows:
                column[i] = next(updated)


def _optimizer(algorithm: _Algorithm) -> Optimizer:
    return Optimizer(algorithm.name, algorithm.init, algorithm.step)


def _any_array(leaves: Sequence[Any]) -> bool:
    return any(isinstance(x, Array) for x in leaves)


# ---- learning rates


def warmup_cosine(peak: float, warmup: int, total: int, floor: float = 0.0) -> Schedule:
    """Linear warmup to `peak` over the first `warmup` updates, then a cosine down to `floor` at update `total`, and
    `floor` from there on. A schedule maps the number of updates done (0-d float64 tensor, 0 in the first step) to the
    learning rate (0-d tensor); the first update uses peak / warmup, not zero.

    >>> [round(float(warmup_cosine(1.0, 2, 10)(torch.tensor(float(i)))), 3) for i in (0, 1, 2, 6, 10, 12)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    return _warmup(peak, warmup, total, lambda done: floor + (peak - floor) * 0.5 * (1 + torch.cos(math.pi * done)))


def warmup_linear(peak: float, warmup: int, total: int, floor: float = 0.0) -> Schedule:
    """As `warmup_cosine`, with a straight line down.

    >>> [float(warmup_linear(1.0, 2, 10)(torch.tensor(float(i)))) for i in (0, 1, 2, 6, 10, 12)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    return _warmup(peak, warmup, total, lambda done: peak + (floor - peak) * done)


def _warmup(peak: float, warmup: int, total: int, decay: Schedule) -> Schedule:
    if not 0 <= warmup < total:
        raise ValueError(f"warmup={warmup} must be at least 0 and less than total={total}.")

    def rate(step: Tensor) -> Tensor:
        done = ((step - warmup) / (total - warmup)).clamp(0, 1)  # part of the decay that lies behind
        return torch.where(step < warmup, peak * (step + 1) / max(warmup, 1), decay(done))

    return rate


# ---- gradients


def clip_by_global_norm(grads: Tree, max_norm: float | Tensor, norm_type: float = 2.0) -> tuple[Tree, Tensor]:
    """`grads` scaled so that the norm of all of them together is at most `max_norm`, and the norm before that, a 0-d
    tensor (float32 for half precision). `norm_type`: 2 or inf. As torch.nn.utils.clip_grad_norm_; a norm that is not
    finite is returned as it is and makes the gradients NaN. Right under any sharding: the sums are over global values.

    >>> clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
    ({'w': tensor([0.6000, 0.8000])}, tensor(5.))
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"clip_by_global_norm: norm_type={norm_type} is not known; it must be 2 or math.inf.")
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


# ---- trees and checks


def _groups(leaves: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[list[int]]:
    """Indices of the parameters that have a gradient, by device and dtype."""
    groups: dict[Any, list[int]] = {}
    for i, (p, g) in enumerate(zip(leaves, grads)):
        if p is not None and g is not None:
            groups.setdefault((p.device, p.dtype), []).append(i)
    return list(groups.values())


def _check_params(name: str, params: Tree) -> None:
    paths, leaves, _ = flatten_with_paths(params)
    for path, p in zip(paths, leaves):
        if p is not None and not p.dtype.is_floating_point:
            raise TypeError(
                f"{name}: {path or 'the parameter'} is {p.dtype}; only floating-point tensors can be trained. "
                "Keep other values in a tree of their own."
            )


def _check_grads(name: str, params: Tree, grads: Sequence[Tensor | None]) -> None:
    paths, leaves, _ = flatten_with_paths(params)
    for path, p, g in zip(paths, leaves, grads):
        if p is not None and g is not None and (p.shape != g.shape or p.dtype != g.dtype):
            raise ValueError(
                f"{name}: the gradient of {path or 'the parameter'} is {g.dtype} of shape {list(g.shape)}, "
                f"but the parameter is {p.dtype} of shape {list(p.shape)}."
            )


def _check_settings(name: str, **settings: Any) -> None:
    for key, value in settings.items():
        if isinstance(value, (int, float)) and not value >= 0:
            raise ValueError(f"{name}: {key}={value} must not be negative.")


def _rate_text(lr: Any) -> str:
    return str(lr) if isinstance(lr, (int, float)) else "schedule" if callable(lr) else "tensor"
