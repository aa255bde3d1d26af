"""A chain of stages with a loss at its end, as one loss: what `schedules.pipeline` takes the gradient of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fn.schedules.kinds import Loss, check_kind
from vescale_fn.schedules.split import Part

Stage = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Sequential(Loss):
    """Stages one after the other, then a loss; see `sequential`."""

    stages: tuple[Stage, ...]
    loss: Callable[..., Any]

    def __call__(self, params: Any, *batch: Any) -> Any:
        if not batch:
            raise TypeError(
                "schedules.sequential: there is no batch. The loss takes parameters and a batch, whose first entry the "
                "first stage reads."
            )
        x, *rest = batch
        for stage, own in zip(self.stages, self.parameters(params)):
            x = stage(own, x)
        return self.loss(x, *rest)

    def parameters(self, params: Any) -> list[Any]:
        """What each stage is given. Raises ValueError when a list of parameters has not one entry for each stage."""
        n = len(self.stages)
        if not isinstance(params, (list, tuple)) or all(isinstance(s, Part) for s in self.stages):
            return [params] * n
        if len(params) != n:
            raise ValueError(
                f"schedules.sequential: the parameters are a {type(params).__name__} of {len(params)} entries for {n} "
                "stages. Give one entry for each stage, or a dict, which every stage is given whole."
            )
        return list(params)


def sequential(stages: Sequence[Stage], loss: Callable[..., Any]) -> Sequential:
    """The loss `(params, x, *rest) -> loss(stages[-1](..., stages[0](params[0], x)), *rest)`.

    stages: functions (params, x) -> y, where x is what the stage before returned, any pytree. If the parameters are a
        list or tuple, it has one entry for each stage; a dict, or another tree, is given to every stage whole, and so
        are the parameters of stages that `schedules.split` made.
    loss: (y, *rest) -> 0-d tensor, or `vf.weighted(sum, count)`.
    Raises ValueError when there are no stages, TypeError for a loss that is another kind of function.

    >>> import torch
    >>> stages = [lambda w, x: x * w, lambda w, h: (h + w).sum()]
    >>> loss = sequential(stages, lambda y, target: (y - target) ** 2)
    >>> loss([torch.tensor(2.0), torch.tensor(1.0)], torch.ones(3), torch.tensor(5.0))
    tensor(16.)
    """
    check_kind("sequential", "loss", loss)
    if not stages:
        raise ValueError("schedules.sequential: there are no stages.")
    return Sequential(tuple(stages), loss)
