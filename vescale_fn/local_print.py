"""What a rank runs where a step prints."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vescale_fn.effects import show
from vescale_fn.sharding.mesh import rank_text

Coords = Sequence[tuple[str, int]]


def print_once(index: int, own: Coords, values: Sequence[Tensor], text: str, batch_dims: int) -> None:
    """Print values that all ranks hold, on the first of them only. index: this rank's among them. own: where it is on
    the axes along which ranks hold values of their own."""
    if index == 0:
        show(values, text, batch_dims, f"{', '.join(f'{a}={i}' for a, i in own)}: " if own else "")


def print_parts(rank: int, coords: Coords, values: Sequence[Tensor], text: str, batch_dims: int) -> None:
    """Print what this rank holds, with its name in front."""
    show(values, text, batch_dims, f"{rank_text(rank, dict(coords))}: ")
