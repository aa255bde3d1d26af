"""Who saves together: the processes of torch.distributed, over a group of their own, one save or load after the other.

Saves run in a thread beside the steps, so their messages must not mix with those of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(eq=False)
class Lane:
    """group: gloo over all processes, None when there is only this one. last: ends what runs; see `clear`."""

    group: dist.ProcessGroup | None
    last: Callable[[], None] | None = None

    @property
    def process(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def clear(self) -> None:
        """Wait for the save under way, if any. All processes start and end saves in one order."""
        if self.last is not None:
            self.last()
        self.last = None

    def agree(self, make: Callable[[], T]) -> T:
        """What `make()` gives on process 0, or raises there, on every process."""
        if self.group is None:
            return make()
        answer: list[Any] = [None]
        if self.process == 0:
            try:
                answer = [(make(), None)]
            except Exception as e:
                answer = [(None, e)]
        dist.broadcast_object_list(answer, src=dist.get_global_rank(self.group, 0), group=self.group)
        value, error = answer[0]
        if error is not None:
            raise error
        found: T = value
        return found

    def all(self, run: Callable[[], None]) -> None:
        """Run something on every process; where it raises on one, the error of the first such is raised on all."""
        error: Exception | None = None
        try:
            run()
        except Exception as e:
            error = e
        errors: list[Exception | None] = [error]
        if self.group is not None:
            errors *= dist.get_world_size(self.group)
            dist.all_gather_object(errors, error, group=self.group)
        for found in errors:
            if found is not None:
                raise found


def lane() -> Lane:
    """The lane of this process. All processes must call this together: the first call makes a group."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return _lane_of(world)


@lru_cache(maxsize=1)
def _lane_of(world: dist.ProcessGroup | None) -> Lane:
    alone = world is None or dist.get_world_size() == 1
    return Lane(None if alone else dist.new_group(backend="gloo"))
