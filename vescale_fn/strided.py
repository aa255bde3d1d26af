"""as_strided without strides: which elements it takes is known while the graph is traced, where the tensor lies at run
time is not. torch writes as_strided for the gradients of writes through views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class _Box:
    """Elements of a tensor that slices take: start, stop and step of each dim; and the dims that the result keeps, in
    its order. The others have length 1."""

    slices: tuple[tuple[int, int, int], ...]
    kept: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.kept, *(d for d, _ in enumerate(self.slices) if d not in self.kept))

    def of(self, x: Tensor) -> Tensor:
        for d, (start, stop, step) in enumerate(self.slices):
            if (start, stop, step) != (0, x.shape[d], 1):
                x = aten.slice.Tensor(x, d, start, stop, step)
        return x.permute(self.order)

    def put(self, x: Tensor, value: Tensor) -> Tensor:
        """x with `value`, which has the dims of `of(x)`, in the place of the box."""
        return self._put(x, value.permute(_inverse(self.order)), 0)

    def _put(self, x: Tensor, value: Tensor, d: int) -> Tensor:
        if d == x.dim():
            return value
        start, stop, step = self.slices[d]
        if (start, stop, step) == (0, x.shape[d], 1):
            return self._put(x, value, d + 1)
        inner = self._put(aten.slice.Tensor(x, d, start, stop, step), value, d + 1)
        result: Tensor = aten.slice_scatter.default(x, inner, d, start, stop, step)
        return result


def _box(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> _Box | None:
    """The box of x that as_strided takes, if it is one."""
    step_of, rest = x.stride(), offset - x.storage_offset()
    at = [0] * x.dim()
    major = sorted((d for d, n in enumerate(x.shape) if n > 1 and step_of[d]), key=lambda d: -step_of[d])
    for d in major:
        at[d] = min(rest // step_of[d], x.shape[d] - 1)
        rest -= at[d] * step_of[d]
    slices, kept = [(start, start + 1, 1) for start in at], []
    for n, s in zip(size, stride):
        if n == 1:
            continue
        fits = [d for d in major if d not in kept and s and s % step_of[d] == 0]
        fits = [d for d in fits if at[d] + (n - 1) * (s // step_of[d]) < x.shape[d]]
        if not fits:
            return None
        d, step = fits[0], s // step_of[fits[0]]
        slices[d] = (at[d], at[d] + (n - 1) * step + 1, step)
        kept.append(d)
    return None if rest or 0 in size else _Box(tuple(slices), tuple(kept))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda i: order[i])


def _memory_order(x: Tensor) -> list[int] | None:
    """The dims of x, major first, if x fills its memory in that order."""
    order = sorted(range(x.dim()), key=lambda d: (-int(x.stride()[d]), d))
    return order if x.permute(order).is_contiguous() and not x.storage_offset() else None


def _positions(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Where the elements lie in memory, in a row."""
    at = torch.full((1,) * len(size), offset, device=x.device)
    for d, (n, s) in enumerate(zip(size, stride)):
        at = at + (torch.arange(n, device=x.device) * s).view(-1, *[1] * (len(size) - d - 1))
    return at.reshape(-1)


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    offset = int(x.storage_offset()) if storage_offset is None else storage_offset
    box = _box(x, size, stride, offset)
    if box is not None:
        return box.of(x).reshape(size)
    order = _memory_order(x)
    if order is None or 0 in size:
        return NotImplemented
    flat = x.permute(order).reshape(-1)
    return torch.index_select(flat, 0, _positions(x, size, stride, offset)).reshape(size)


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    offset = int(x.storage_offset()) if storage_offset is None else storage_offset
    box = _box(x, size, stride, offset)
    if box is not None:
        return box.put(x, src.reshape([n for n in size if n != 1] + [1] * (x.dim() - len(box.kept))))
    order = _memory_order(x)
    if order is None or 0 in size:
        return NotImplemented
    rows = x.permute(order)
    flat = torch.scatter(rows.reshape(-1), 0, _positions(x, size, stride, offset), src.reshape(-1))
    return flat.reshape(rows.shape).permute(_inverse(order))


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.as_strided.default: as_strided, aten.as_strided_scatter.default: as_strided_scatter}
)
