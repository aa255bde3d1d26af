"""The states of a tensor, kept on the innermost tensor, below the wrappers of torch.func."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import _C, Tensor

_ATTRIBUTE = "_vescale_fn_states"


def base_of(x: Tensor) -> Tensor:
    """The tensor below the wrappers of torch.func."""
    functorch = _C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def states_of(x: Any) -> Mapping[str, Any] | None:
    """The states of a tensor by manual axis; None for what was not born in a region."""
    return getattr(base_of(x), _ATTRIBUTE, None) if isinstance(x, Tensor) else None


def mark(x: Any, states: Mapping[str, Any] | None) -> None:
    """From here on, x has these states."""
    if isinstance(x, Tensor) and states is not None:
        setattr(base_of(x), _ATTRIBUTE, dict(states))
