"""Algorithms that are one list operation for all parameters of a dtype: see `vescale_fn.fused`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_fn.fused import UPDATES
from vescale_fn.optim.algorithm import Algorithm, Moments, Now, Rows, Slot
from vescale_fn.optim.masks import Mask
from vescale_fn.optim.optimizer import Block, Optimizer
from vescale_fn.optim.schedules import Rate


@dataclass(frozen=True)
class ListUpdate:
    """An algorithm made of one list operation.

    lists: for each list of moments that the operation takes its name in the state, or None for one that stays empty.
    slot: the moment of a name for a parameter of a shape.
    block: what of a parameter of a shape is updated together; see `Block`.
    """

    operation: str
    lists: tuple[str | None, ...]
    settings: Mapping[str, Any]
    slot: Callable[[str, tuple[int, ...]], Slot] = lambda name, shape: Slot(shape)
    block: Callable[[tuple[int, ...]], Block | None] = lambda shape: None

    def optimizer(self, name: str, lr: Rate, decay: Mask) -> Optimizer:
        names = tuple(m for m in self.lists if m)
        update = Algorithm(name, lr, names, self.slots, self.update, decay, skips=True, block=self.block)
        return update.optimizer()

    def slots(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Slot]:
        return {m: self.slot(m, shape) for m in self.lists if m}

    def update(self, rows: Rows, now: Now) -> tuple[Sequence[Tensor], Sequence[Moments]]:
        settings = self.settings if now.decays else {**self.settings, "weight_decay": 0.0}
        lists = [[row[m] for row in rows.moments] if m else [] for m in self.lists]
        update = UPDATES[self.operation]
        results = iter(update(rows.params, rows.grads, *lists, now.count, now.lr, now.skip, **settings))
        params = [next(results) for _ in rows.params]
        columns = {m: [next(results) for _ in rows.params] for m in self.lists if m}
        return params, [{m: column[i] for m, column in columns.items()} for i in range(len(params))]
