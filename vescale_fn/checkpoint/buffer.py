"""Bytes between tensors and files, in pieces of bounded size, and all of them whatever the system does at a time."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

SIZE = 8 << 20  # bytes that are read or written at a time, where that can be chosen


@dataclass(eq=False)
class Buffer:
    """Memory that tensors of any type take turns in."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, memoryview]:
        """A contiguous tensor, valid until the next call, and its bytes."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self.memory.numel() < nbytes:
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        used = self.memory[:nbytes]
        return used.view(dtype).view(shape), memoryview(used.numpy())  # type: ignore[arg-type]


def in_buffer(nbytes: int) -> int:
    """How many pieces of `nbytes` bytes to take at a time, at least one."""
    return max(SIZE // max(nbytes, 1), 1)


def region(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape))


def put(fd: int, data: memoryview, at: int | None = None) -> None:
    """Write all of `data`, at a place of the file or at its end."""
    while data:
        count = os.write(fd, data) if at is None else os.pwrite(fd, data, at)
        data, at = data[count:], None if at is None else at + count


def fill(fd: int, data: memoryview, at: int) -> int:
    """Read bytes from a place of the file until `data` is full or the file ends; how many."""
    done = 0
    while done < len(data) and (count := os.preadv(fd, [data[done:]], at + done)):
        done += count
    return done
