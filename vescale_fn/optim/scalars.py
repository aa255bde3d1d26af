"""Tensors in the place of numbers: `x.add_(y, alpha=t)` for a 0-d tensor t reads its value, which no trace can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

# Function -> the argument that must be a number, and how else to compute with it.
_INSTEAD: Mapping[Any, tuple[str, Callable[..., Tensor]]] = {
    Tensor.add_: ("alpha", lambda t, x, y: x.add_(y * t)),
    Tensor.add: ("alpha", lambda t, x, y: x + y * t),
    Tensor.addcmul_: ("value", lambda t, x, y, z: x.add_(t * y * z)),
    Tensor.addcdiv_: ("value", lambda t, x, y, z: x.add_(t * y / z)),
}


class TensorsAsNumbers(TorchFunctionMode):
    """Inside, these functions take 0-d tensors where torch wants numbers.

    >>> import torch
    >>> with TensorsAsNumbers():
    ...     torch.ones(2).add_(torch.ones(2), alpha=torch.tensor(0.5))
    tensor([1.5000, 1.5000])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        number, instead = _INSTEAD.get(func, ("", None))
        if instead is not None and isinstance(kwargs.get(number), Tensor):
            return instead(kwargs.pop(number), *args, **kwargs)
        return func(*args, **kwargs)
