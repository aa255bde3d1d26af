"""How a file holds a box: in tiles of equal shape, each contiguous and with a checksum of its own.

A reader that wants a part of a box, because it has another mesh, reads the tiles that the part touches and checks all
that it read. Tiles divide the box exactly and in numbers that fit those of meshes, so
that parts of other meshes end where tiles end. Strips of tiles along the first dim lie one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

KIB = 1024
SMALLEST, LARGEST = 4 * KIB, 16 * KIB  # bytes of a tile that we aim at
MANY = 1024  # tiles in a box, before they become larger
SPLITS, WIDTH = 48, 128  # the most pieces of a dim but the first, and the fewest bytes of a row in one


@dataclass(frozen=True)
class Run:
    """Tiles that follow each other in the file: `count` from number `first`, together a box of `shape` at `start`."""

    first: int
    count: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Tiling:
    """A box of `shape` in tiles; both in elements.

    >>> t = tiling((256, 512), 4)
    >>> t.tile, t.grid
    ((32, 32), (8, 16))
    >>> list(t.runs((64, 100), (64, 28)))
    [Run(first=26, count=2, start=(64, 96), shape=(64, 32))]
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Tiles along each dim."""
        return tuple(n // t for n, t in zip(self.shape, self.tile))

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    @property
    def tile_numel(self) -> int:
        return math.prod(self.tile)

    def runs(self, start: tuple[int, ...], shape: tuple[int, ...], most: int = 1 << 30) -> Iterator[Run]:
        """The tiles that a part of the box touches, in the order of the file, at most so many in one run."""
        if not self.shape:
            yield Run(0, 1, (), ())
            return
        low = [a // t for a, t in zip(start, self.tile)]
        high = [-(-(a + n) // t) for a, n, t in zip(start, shape, self.tile)]
        for minor in itertools.product(*map(range, low[1:], high[1:])):
            strip = 0
            for position, along in zip(minor, self.grid[1:]):
                strip = strip * along + position
            for row in range(low[0], high[0], most):
                count = min(most, high[0] - row)
                begin = tuple(i * t for i, t in zip((row, *minor), self.tile))
                yield Run(strip * self.grid[0] + row, count, begin, (count * self.tile[0], *self.tile[1:]))


@lru_cache(maxsize=4096)
def tiling(shape: tuple[int, ...], itemsize: int) -> Tiling:
    """The tiles of a box with elements of `itemsize` bytes. Files depend on it: a change is a new format version."""
    nbytes = math.prod(shape) * itemsize
    left = max(nbytes // min(max(nbytes // MANY, SMALLEST), LARGEST), 1)  # tiles to be had
    tile = list(shape)
    for dim in reversed(range(1, len(shape))):
        most = min(math.ceil(1.5 * left ** (1 / (dim + 1))), SPLITS, left)
        if dim == len(shape) - 1:
            most = min(most, max(shape[dim] * itemsize // WIDTH, 1))
        pieces = _pieces(shape[dim], most)
        tile[dim], left = shape[dim] // pieces, left // pieces
    if shape:
        tile[0] = shape[0] // _pieces(shape[0], left)
    return Tiling(shape, tuple(tile))


def _pieces(size: int, most: int) -> int:
    """In how many equal pieces to cut a dim, at most so many: 2**n, if there may be many 3 * 2**n, or else what is."""
    odd = 3 if size % 3 == 0 and most >= 24 else 1
    ranks = odd * math.gcd(size // odd, 2 ** int(math.log2(most / odd)))
    return ranks if 4 * ranks > min(most, size) else next(k for k in range(min(most, size), 0, -1) if size % k == 0)
