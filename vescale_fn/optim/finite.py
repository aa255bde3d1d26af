"""Steps whose gradients are not finite: leave them out, and scale the loss so that fp16 rarely makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_fn.optim.algorithm import unless
from vescale_fn.optim.optimizer import Optimizer, State, Tree
from vescale_fn.optim.transform import Transform, with_entry, without_entry
from vescale_fn.tree import flatten, map_leaves


def skip_nonfinite() -> Transform:
    """A step in which any gradient has a NaN or an infinity changes nothing; state["skipped"] counts them.

    >>> from vescale_fn.optim import sgd
    >>> opt, params = skip_nonfinite()(sgd(lr=1.0)), {"w": torch.tensor([1.0])}
    >>> opt.step({"w": torch.tensor([torch.inf])}, opt.init(params), params)
    ({'w': tensor([1.])}, {'step': tensor(0.), 'skipped': tensor(1, dtype=torch.int32)})
    """
    name = "skip_nonfinite()"

    def wrap(opt: Optimizer) -> Optimizer:
        def init(params: Tree) -> State:
            zero = torch.zeros((), dtype=torch.int32, device=_device(params))
            return with_entry(name, opt.init_fn(params), "skipped", zero)

        def step(grads: Tree, state: State, params: Tree, skip: Tensor | None) -> tuple[Tree, State]:
            skipped, rest = without_entry(name, state, "skipped")
            found = _any_nonfinite(grads, params)
            params, rest = opt.step_fn(grads, rest, params, _either(skip, found))
            return params, {**rest, "skipped": unless(skip, skipped, skipped + found)}

        return Optimizer(name, init, step, opt.blocks)

    return Transform(name, wrap)


def loss_scale(
    init: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int | None = 2000
) -> Transform:
    """Gradients are those of `scale_loss(loss, state)`, and are divided by the scale. A step whose gradients are not
    finite changes nothing but the scale, which is multiplied by `backoff`; after `interval` finite steps in a row it
    is multiplied by `growth`. interval=None: the scale stays as it is. As torch.amp.GradScaler.

    Its state is state["loss_scale"]: "scale" (0-d float32) and "finite_steps" (0-d int32), those since it last changed.

    >>> from vescale_fn.optim import sgd
    >>> opt, params = loss_scale(4.0)(sgd(lr=1.0)), {"w": torch.tensor([1.0])}
    >>> opt.step({"w": torch.tensor([4.0])}, opt.init(params), params)[0]
    {'w': tensor([0.])}
    """
    name = "loss_scale()" if interval is not None else f"loss_scale({init}, interval=None)"
    if not init > 0 or not growth >= 1 or not 0 < backoff <= 1 or (interval is not None and interval < 1):
        raise ValueError(
            f"loss_scale: init={init} must be positive, growth={growth} at least 1, backoff={backoff} in (0, 1], and "
            f"interval={interval} None or at least 1."
        )

    def begin(params: Tree) -> State:
        device = _device(params)
        scale = torch.full((), init, dtype=torch.float32, device=device)
        return {"scale": scale, "finite_steps": torch.zeros((), dtype=torch.int32, device=device)}

    def adjusted(state: State, found: Tensor) -> State:
        scale, steps = state["scale"], state["finite_steps"]
        if interval is None:
            return {"scale": scale, "finite_steps": torch.where(found, 0, steps + 1)}
        larger = scale * growth
        grows = ~found & (steps + 1 == interval)
        kept = torch.where(grows & larger.isfinite(), larger, scale)
        return {
            "scale": torch.where(found, scale * backoff, kept),
            "finite_steps": torch.where(found | grows, 0, steps + 1),
        }

    def wrap(opt: Optimizer) -> Optimizer:
        def step(grads: Tree, state: State, params: Tree, skip: Tensor | None) -> tuple[Tree, State]:
            own, rest = without_entry(name, state, "loss_scale")
            found = _any_nonfinite(grads, params)
            inverse = own["scale"].double().reciprocal().float()
            unscaled = map_leaves(lambda g: None if g is None else (g * inverse.to(_wide(g))).to(g.dtype), grads)
            params, rest = opt.step_fn(unscaled, rest, params, _either(skip, found))
            new = {k: unless(skip, own[k], x) for k, x in adjusted(own, found).items()}
            return params, {**rest, "loss_scale": new}

        def first(params: Tree) -> State:
            return with_entry(name, opt.init_fn(params), "loss_scale", begin(params))

        return Optimizer(name, first, step, opt.blocks)

    return Transform(name, wrap)


def scale_loss(loss: Tensor, state: State) -> Tensor:
    """The loss times the scale that `loss_scale` keeps in an optimizer's state, in float32 at least.

    >>> from vescale_fn.optim import sgd
    >>> scale_loss(torch.tensor(3.0), loss_scale(4.0)(sgd()).init({}))
    tensor(12.)
    """
    own, _ = without_entry("scale_loss", state, "loss_scale")
    scaled: Tensor = loss.to(torch.promote_types(loss.dtype, torch.float32)) * own["scale"]
    return scaled


def _any_nonfinite(grads: Tree, params: Tree) -> Tensor:
    """Whether any gradient has a NaN or an infinity (0-d bool). Elements are counted, so that one sum over ranks tells:
    a maximum over ranks may lose a NaN."""
    given = [g for g in flatten(grads)[0] if g is not None]
    if not given:
        return torch.zeros((), dtype=torch.bool, device=_device(params))
    finite = torch.stack([(g.abs() < torch.inf).sum() for g in given]).sum()
    found: Tensor = finite < sum(g.numel() for g in given)
    return found


def _either(skip: Tensor | None, found: Tensor) -> Tensor:
    return found if skip is None else skip | found


def _wide(g: Tensor) -> torch.dtype:
    """In which dtype to multiply: the inverse of a large scale is no number of half precision."""
    return torch.promote_types(g.dtype, torch.float32)


def _device(params: Tree) -> Any:
    return next((p.device for p in flatten(params)[0] if p is not None), None)
