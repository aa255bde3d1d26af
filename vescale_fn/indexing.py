"""Indexing with positions that only a run knows."""

from __future__ import annotations

from typing import Any

import torch


def at_positions(x: torch.Tensor, given: Any) -> torch.Tensor:
    """x[given], where tensors without dims among slices are positions whose value nobody reads.

    >>> at_positions(torch.eye(2), (slice(None), torch.tensor(1)))
    tensor([0., 1.])
    """
    index = given if isinstance(given, tuple) else (given,)
    plain = (int, slice, type(None), type(...))
    if not any(map(_is_position, index)) or not all(isinstance(i, plain) or _is_position(i) for i in index):
        return x[given]
    taken = sum(i is not None and i is not ... for i in index)
    rest = [slice(None)] * (x.ndim - taken)
    full = [j for i in index for j in (rest if i is ... else [i])]
    out, dim = x[tuple(slice(None) if _is_position(i) else i for i in full)], 0
    i: Any
    for i in full:
        if _is_position(i):
            out = out.index_select(dim, i.reshape(1)).squeeze(dim)
        elif not isinstance(i, int):
            dim += 1
    return out


def _is_position(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.ndim == 0 and index.dtype in (torch.int64, torch.int32)
