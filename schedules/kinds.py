"""The four kinds of function that schedules transform, and what is said when one is given to a transform of another.

    loss                (params, *batch) -> 0-d tensor, or vf.weighted(sum, count)
    gradient function   (params, *batch) -> (grads, value), the order of torch.func.grad_and_value
    optimizer           init(params) -> state, step(grads, state, params) -> (params, state)
    step                (state, *batch) -> (state, metrics)

A plain function may be a loss, a gradient function or a step; what it is shows when it returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vescale_fn.optim import Optimizer
from vescale_fn.pjit import Jitted
from vescale_fn.schedules.weighted import Weighted

Kind = Literal["loss", "gradient function", "optimizer", "step"]

TRANSFORMS: Mapping[Kind, tuple[str, ...]] = {
    "loss": ("schedules.remat", "schedules.mixed_precision"),
    "gradient function": ("schedules.accumulate",),
    "optimizer": ("schedules.zero", "schedules.offload"),
    "step": ("vf.pjit",),
}

FIXES: Mapping[tuple[Kind, Kind], str] = {  # (wanted, given)
    ("gradient function", "loss"): "Take its gradient first, with vf.grad_and_value(loss).",
    ("loss", "gradient function"): "Transform the loss before you take its gradient.",
}


@dataclass(frozen=True)
class Loss(ABC):
    """A transformed loss, or a transformed part of one."""

    @abstractmethod
    def __call__(self, *args: Any) -> Any: ...


@dataclass(frozen=True)
class GradFunction(ABC):
    """A gradient function that can also be asked for sums, so that several calls can be added up before dividing."""

    @abstractmethod
    def sums(self, params: Any, *batch: Any) -> tuple[Any, Weighted]:
        """Gradients of the sum of the loss, and sum and count."""

    def __call__(self, params: Any, *batch: Any) -> tuple[Any, Any]:
        """Gradients of the mean of the loss, and the mean."""
        grads, value = self.sums(params, *batch)
        return value.divide(grads), value.mean


def kind_of(x: Any) -> Kind | None:
    """What a thing is known to be; None for a plain function."""
    types: tuple[tuple[type, Kind], ...] = (
        (Loss, "loss"),
        (GradFunction, "gradient function"),
        (Optimizer, "optimizer"),
        (Jitted, "step"),
    )
    return next((kind for t, kind in types if isinstance(x, t)), None)


def check_kind(transform: str, wants: Kind, given: Any) -> None:
    """Raise TypeError if `given` is known to be something else than what a transform takes."""
    kind = kind_of(given)
    if kind == wants or (kind is None and wants != "optimizer" and callable(given)):
        return
    if kind is None:
        raise TypeError(
            f"{_public(transform)} transforms {_a(wants)}, but was given {_named(given)}, which is none."
            + (" Optimizers are made by vf.optim." if wants == "optimizer" else "")
        )
    raise TypeError(wrong_kind(transform, wants, kind, _named(given)))


def wrong_kind(transform: str, wants: Kind, kind: Kind, given: str) -> str:
    """What is said when `given`, a `kind`, is handed to a transform of another kind."""
    fix = FIXES.get((wants, kind)) or f"{_a(kind).capitalize()} is transformed by {' and '.join(TRANSFORMS[kind])}."
    return f"{_public(transform)} transforms {_a(wants)}, but was given {_a(kind)}, {given}. {fix}"


def _public(transform: str) -> str:
    return f"vf.{transform}" if transform == "grad_and_value" else f"schedules.{transform}"


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _named(x: Any) -> str:
    return getattr(x, "__name__", None) or repr(x)
