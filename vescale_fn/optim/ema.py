"""A moving average of the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_fn.optim import checks
from vescale_fn.optim.algorithm import unless
from vescale_fn.optim.optimizer import Optimizer, State, Tree
from vescale_fn.optim.transform import Transform, with_entry, without_entry
from vescale_fn.tree import flatten, unflatten


def ema(decay: float = 0.999, entry: str = "ema") -> Transform:
    """Keep the exponential moving average of the parameters in state["ema"]: it starts at the first parameters, and
    after each update becomes decay * average + (1 - decay) * parameter. Parameters in half precision have averages in
    float32. As torch.optim.swa_utils.get_ema_multi_avg_fn.

    entry: its name in the state, for a chain with several.

    >>> from vescale_fn.optim import sgd
    >>> opt, params = ema(0.5)(sgd(lr=1.0)), {"w": torch.tensor([1.0])}
    >>> _, state = opt.step({"w": torch.tensor([1.0])}, opt.init(params), params)
    >>> state["ema"]
    {'w': tensor([0.5000])}
    """
    name = f"ema({decay})" if entry == "ema" else f"ema({decay}, '{entry}')"
    if not 0 <= decay <= 1:
        raise ValueError(f"ema: decay={decay} must lie in [0, 1].")

    def wrap(opt: Optimizer) -> Optimizer:
        def init(params: Tree) -> State:
            leaves, tree = flatten(params)
            averages = unflatten(tree, [None if p is None else p.to(_wide(p.dtype), copy=True) for p in leaves])
            return with_entry(name, opt.init_fn(params), entry, averages)

        def step(grads: Tree, state: State, params: Tree, skip: Tensor | None) -> tuple[Tree, State]:
            averages, rest = without_entry(name, state, entry)
            leaves, tree = flatten(params)
            old = checks.mirror(name, entry, averages, params, [None if p is None else tuple(p.shape) for p in leaves])
            params, rest = opt.step_fn(grads, rest, params, skip)
            new = [
                None if p is None else unless(skip, a, a.lerp(p.to(a.dtype), 1 - decay))
                for a, p in zip(old, flatten(params)[0])
            ]
            return params, {**rest, entry: unflatten(tree, new)}

        return Optimizer(name, init, step, opt.blocks)

    return Transform(name, wrap)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
