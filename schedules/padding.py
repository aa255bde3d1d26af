"""Means that microbatches would weigh wrongly: those over a number of items that depends on the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from vescale_fn.tracing import wrappers
from vescale_fn.tree import flatten

_LOSSES = {F.cross_entropy: -100, F.nll_loss: -100}  # and the label that they leave out by default
_QUOTIENTS = frozenset(
    (torch.div, torch.true_divide, torch.Tensor.div, torch.Tensor.true_divide, torch.Tensor.__truediv__)
)


def base(x: torch.Tensor) -> torch.Tensor:
    """The tensor inside all wrappers of torch.func, which gives a new one to every function."""
    return wrappers(x)[-1]


class UnevenMeans(TorchFunctionMode):
    """Watches a loss being computed, and remembers a mean over a number of items that the batch decides.

    Such is a cross entropy that leaves out labels or weighs classes, and a quotient of a 0-d tensor that depends on the
    parameters and one that depends on the batch alone. What the loss does with the batch before it is called here, and
    labels of -100 under the default `ignore_index`, it cannot see.
    """

    def __init__(self, params: Any, batch: Any) -> None:
        super().__init__()
        self.found = ""
        self._alive: list[Any] = []  # keeps ids from being used again
        self._of_params: set[int] = set()
        self._of_batch: set[int] = set()
        self._note(flatten(batch)[0], self._of_batch)
        self._note(flatten(params)[0], self._of_params)

    def _note(self, values: Any, into: set[int]) -> None:
        for x in values:
            if isinstance(x, torch.Tensor):
                self._alive.append(base(x))
                into.add(id(self._alive[-1]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        trained = any(id(base(x)) in self._of_params for x in operands)
        given = any(id(base(x)) in self._of_batch for x in operands)
        if not self.found:
            self.found = self._uneven(func, args, kwargs)
        result = func(*args, **kwargs)
        made = torch.utils._pytree.tree_leaves(result)
        if trained:
            self._note(made, self._of_params)
        elif given:
            self._note(made, self._of_batch)
        return result

    def _uneven(self, func: Any, args: Any, kwargs: Any) -> str:
        """What is wrong with this call, if it is a mean that depends on the data."""
        if func in _LOSSES and kwargs.get("reduction", "mean") == "mean":
            if kwargs.get("ignore_index", _LOSSES[func]) != _LOSSES[func]:
                return f"F.{func.__name__} leaves out the labels {kwargs['ignore_index']}"
            if kwargs.get("weight") is not None or (len(args) > 2 and args[2] is not None):
                return f"F.{func.__name__} weighs classes"
        if func in _QUOTIENTS and len(args) == 2 and all(isinstance(x, torch.Tensor) for x in args):
            above, below = args
            scalars = above.ndim == 0 and below.ndim == 0
            if scalars and id(base(above)) in self._of_params and id(base(below)) in self._of_batch:
                return "the loss is divided by a number that depends on the batch"
        return ""

    def refuse(self, by: str = "accumulate") -> None:
        """Raise ValueError if such a mean was found. by: who asks."""
        if self.found:
            raise ValueError(
                f"schedules.{by}: {self.found}, so microbatches with few items would count as much as full ones. "
                "Return vf.weighted(sum, count) from the loss, and take its gradient with vf.grad_and_value."
            )
