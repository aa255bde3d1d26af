"""A mean kept as sum and count, so that means over parts can be put together: `weighted(sum, count)`."""

from __future__ import annotations

from typing import Any

import torch

from vescale_fn.tree import map_leaves, pytree


@pytree
class Weighted:
    """A mean as its sum and its count. `count` is an int where it does not depend on data."""

    sum: Any
    count: Any

    @property
    def mean(self) -> Any:
        """sum / count; the sum itself where the count is the number one."""
        return self.divide(self.sum)

    def divide(self, tree: Any) -> Any:
        """The leaves of a tree of sums, each divided by the count, in its own dtype. None stays None."""
        if type(self.count) is int and self.count == 1:
            return tree
        return map_leaves(lambda x: None if x is None else (x / self.count).to(x.dtype), tree)


def weighted(sum: torch.Tensor, count: torch.Tensor) -> Weighted:
    """What a loss returns whose mean is over a number of items that depends on the data, such as valid tokens.

    sum: 0-d floating-point tensor. count: 0-d tensor that does not depend on the parameters.
    `vf.grad_and_value(loss)` gives gradients of sum / count; `schedules.accumulate` adds sums and counts up over
    microbatches and divides once, so that a microbatch with few items does not count as much as a full one.
    Raises ValueError when either is no 0-d tensor.

    >>> weighted(torch.tensor(6.0), torch.tensor(4)).mean
    tensor(1.5000)
    """
    for name, x in (("sum", sum), ("count", count)):
        if not isinstance(x, torch.Tensor) or x.ndim:
            got = f"a tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"vf.weighted: {name} must be a 0-d tensor, but it is {got}.")
    return Weighted(sum, count.detach())
