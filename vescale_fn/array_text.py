"""How the values of an Array print: at most six a side, four digits, and which part they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vescale_fn.shardings import part_index

if TYPE_CHECKING:
    from vescale_fn.array import ArrayType

EDGE = 3  # values at each end of a dim


def held_text(type: ArrayType) -> str:
    """The part that this process's first rank holds: `this process [0:4, :]`, or `rank 0 [0:4]` if it has several."""
    ranks, layout = type.mesh.local_ranks, type.layout.flat
    index = part_index(layout, type.mesh.shape.coords(ranks[0]))

    def text(runs: slice | tuple[slice, ...], size: int) -> str:
        pieces = (runs,) if isinstance(runs, slice) else runs
        return ":" if pieces == (slice(0, size),) else "+".join(f"{s.start}:{s.stop}" for s in pieces)

    who = "this process" if len(ranks) == 1 else f"rank {ranks[0]}"
    return f"{who} [{', '.join(map(text, index, layout.shape))}]"


def values_text(x: torch.Tensor, indent: int = 0) -> str:
    """The values, the middle of a long dim left out.

    >>> print(values_text(torch.arange(20.).reshape(2, 10)))
    [[0, 1, 2, ..., 7, 8, 9],
     [10, 11, 12, ..., 17, 18, 19]]
    """
    if x.ndim == 0:
        number = x.item()
        return f"{number:.4g}" if x.dtype.is_floating_point or x.dtype.is_complex else str(number)
    rows: Sequence[torch.Tensor | None] = (
        list(x) if len(x) <= 2 * EDGE else [*x[:EDGE], None, *x[-EDGE:]]  # None where some are left out
    )
    texts = ["..." if r is None else values_text(r, indent + 1) for r in rows]
    return f"[{(', ' if x.ndim == 1 else ',' + chr(10) + ' ' * (indent + 1)).join(texts)}]"
