"""What ranks hold of parameters, of their gradients and of optimizer state, by where each tensor lives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fn.sharding.layout import Ragged
from vescale_fn.shardings import NamedSharding

Placed = tuple[Any, NamedSharding | None]  # a tensor, or its shape and dtype, and where it lives; None: on every rank


@dataclass(frozen=True)
class Held:
    """Bytes that the rank with most holds, by kind."""

    parameters: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.state


def held(parameters: Sequence[Placed], gradients: Sequence[Placed], state: Sequence[Placed]) -> Held:
    """What the rank holds that holds most."""
    found = [
        Held(*(sum(_nbytes(x, at, coords) for x, at in kind) for kind in (parameters, gradients, state)))
        for coords in _coords([*parameters, *gradients, *state])
    ]
    return max(found, key=lambda h: h.total)


def _coords(tensors: Sequence[Placed]) -> Iterator[Mapping[str, int]]:
    """Coordinates of ranks that may hold most: all along axes that cut in units; along others the first."""
    ragged: dict[str, int] = {}
    axes: dict[str, int] = {}
    for x, at in tensors:
        if at is not None:
            layout = at.layout(tuple(x.shape))
            axes |= dict.fromkeys(layout.mesh.names, 0)
            ragged |= {a: layout.mesh[a] for a in layout.mesh.names if isinstance(layout[a], Ragged)}
    for found in itertools.product(*(range(n) for n in ragged.values())):
        yield {**axes, **dict(zip(ragged, found))}


def _nbytes(x: Any, at: NamedSharding | None, coords: Mapping[str, int]) -> int:
    shape = tuple(x.shape) if at is None else at.layout(tuple(x.shape)).local_shape(coords)
    return math.prod(shape) * int(x.dtype.itemsize)
