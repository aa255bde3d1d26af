"""Transforms: pure functions from an optimizer to an optimizer, and chains of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vescale_fn.errors import one_line
from vescale_fn.optim.optimizer import Optimizer, State, Tree


@dataclass(frozen=True)
class Transform:
    """From an optimizer to one that does more: it sees gradients first, and parameters last.

    >>> from vescale_fn.optim import clip_value, sgd
    >>> clip_value(1.0)(sgd(lr=0.5))
    chain(clip_value(1.0), sgd(lr=0.5, momentum=0.0, weight_decay=0.0))
    """

    name: str
    wrap: Callable[[Optimizer], Optimizer]

    def __call__(self, opt: Optimizer) -> Optimizer:
        return chain(self, opt)

    def __repr__(self) -> str:
        return self.name


def chain(*parts: Transform | Optimizer) -> Optimizer:
    """Transforms, then an optimizer: gradients pass from the first to the last, as in optax.chain.

    A chain's state is that of the optimizer, and an entry for each transform that keeps something.
    Raises TypeError when the last is not an optimizer, or another is not a transform.

    >>> from vescale_fn.optim import adamw, clip_norm, skip_nonfinite
    >>> chain(skip_nonfinite(), clip_norm(1.0), adamw(lr=0.1))
    chain(skip_nonfinite(), clip_norm(1.0), adamw(lr=0.1, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01))
    """
    *transforms, opt = parts or (None,)
    if not isinstance(opt, Optimizer):
        raise TypeError(f"chain: the last part must be an optimizer such as adamw(), not {_kind(opt)}.")
    for part in transforms:
        if not isinstance(part, Transform):
            raise TypeError(
                f"chain: {_kind(part)} stands before the end, where only transforms such as clip_norm(1.0) may stand. "
                "For several optimizers, each with parameters of its own, use groups({glob: optimizer})."
            )
    name = opt.name
    for part in reversed(transforms):
        opt = part.wrap(opt)  # type: ignore[union-attr]
    if transforms:
        inner = name.removeprefix("chain(").removesuffix(")") if name.startswith("chain(") else name
        name = f"chain({one_line([*transforms, inner])})"
    return Optimizer(name, opt.init_fn, opt.step_fn, opt.blocks)


def _kind(part: Any) -> str:
    return repr(part) if isinstance(part, (Optimizer, Transform)) else f"{type(part).__name__}"


def of_gradients(name: str, change: Callable[[Tree], Tree]) -> Transform:
    """The transform whose optimizer sees changed gradients."""

    def wrap(opt: Optimizer) -> Optimizer:
        def step(grads: Tree, state: State, params: Tree, skip: Tensor | None) -> tuple[Tree, State]:
            return opt.step_fn(change(grads), state, params, skip)

        return Optimizer(name, opt.init_fn, step, opt.blocks)

    return Transform(name, wrap)


# ---- what a transform adds to the state


def with_entry(name: str, state: State, key: str, value: Any) -> State:
    """A state with one more entry. Raises ValueError when it has one of that name."""
    if key in state:
        raise ValueError(f"{name}: the state has an entry '{key}' already, of another part of the chain.")
    return {**state, key: value}


def without_entry(name: str, state: Any, key: str) -> tuple[Any, State]:
    """An entry of a state, and the rest of it. Raises ValueError when there is none."""
    if not isinstance(state, dict) or key not in state:
        has = one_line([*state]) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"{name}: the state has no entry '{key}', which {name} keeps; it has {has or 'none'}. It was made by an "
            "optimizer without it: start with opt.init(params) of the whole chain."
        )
    return state[key], {k: x for k, x in state.items() if k != key}
