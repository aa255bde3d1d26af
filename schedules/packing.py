"""Many tensors in one flat buffer that ranks cut into equal parts, so that no cut goes through a block.

A tensor of e elements has blocks of g elements, which divide it: rows, or tiles that are quantised together. It lies in
one piece in the buffer; padding is between tensors only. Rank k holds the elements [kS, (k + 1)S). Wanted are starts,
and the smallest S, such that every cut inside a tensor is a whole number of its blocks from its start.

For a given order of the tensors the answer is exact. Take a size S, and fill the ranks one after the other with as much
as they can take: nothing is gained by taking less, as a later start never ends earlier. So S is possible if and only if
that fits. Whether it fits is not monotone in S (12 elements in blocks of 3 fit four ranks with S = 3, but neither with
4 nor 5), so the search goes upwards, from one size at which some cut can move to the next. To find the best order is as
hard as to partition numbers; a few good ones are tried. The problem is that of veScale-FSDP (arXiv 2602.22437).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

Tensor = tuple[int, int]  # elements, elements of a block

ORDERS: Mapping[str, Callable[[Tensor], tuple[int, ...]]] = {  # keys to sort by
    "given": lambda t: (),
    "coarse blocks first": lambda t: (-t[1], -t[0]),
    "fine blocks first": lambda t: (t[1], -t[0]),
    "large first": lambda t: (-t[0], -t[1]),
}


@dataclass(frozen=True)
class Packing:
    """Where each tensor starts in the buffer, and how many elements each rank holds.

    tensors: elements and block size of each. starts: in the same order. size: of a rank's part. order: which was best.
    """

    tensors: tuple[Tensor, ...]
    starts: tuple[int, ...]
    size: int
    ranks: int
    order: str

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.size * self.ranks - sum(e for e, _ in self.tensors)

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor how many of its blocks each rank holds.

        >>> pack([(32, 8), (36, 12), (20, 10)], 2, orders=["given"]).blocks
        ((4, 0), (1, 2), (0, 2))
        """
        return tuple(
            tuple((self._cut(start + e, k) - self._cut(start, k)) // g for k in range(self.ranks))
            for (e, g), start in zip(self.tensors, self.starts)
        )

    def _cut(self, at: int, rank: int) -> int:
        """`at` as far as the rank's part reaches."""
        return min(max(at, rank * self.size), (rank + 1) * self.size)

    def picture(self, width: int = 64) -> str:
        """A line for each rank: a letter for each tensor, a dot for padding, as wide as its share.

        >>> print(pack([(32, 8), (36, 12), (20, 10)], 2, orders=["given"]).picture(22))
        rank 0  aaaaaaaaaaaaaaaabbbbbb
        rank 1  bbbbbbbbbbbbcccccccccc
        """
        spans = sorted((start, start + e, i) for i, ((e, _), start) in enumerate(zip(self.tensors, self.starts)) if e)
        begins = [start for start, _, _ in spans]

        def letter(at: int) -> str:
            i = bisect_right(begins, at) - 1
            return "." if i < 0 or at >= spans[i][1] else chr(ord("a") + spans[i][2] % 26)

        at = [(2 * x + 1) * self.size // (2 * width) for x in range(width)]  # the middle of each column
        lines = ("".join(letter(k * self.size + x) for x in at) for k in range(self.ranks))
        return "\n".join(f"rank {k:<{len(str(self.ranks - 1))}}  {line}" for k, line in enumerate(lines))

    def __str__(self) -> str:
        total = self.size * self.ranks
        return (
            f"{len(self.tensors)} tensors on {self.ranks} ranks of {self.size:,} elements, {self.padding:,} of them "
            f"padding ({self.padding / max(total, 1):.2%}); order: {self.order}"
        )


def pack(tensors: Sequence[Tensor], ranks: int, *, unit: int = 1, orders: Sequence[str] = tuple(ORDERS)) -> Packing:
    """The packing with the smallest part, of the orders that are tried.

    tensors: elements and block size of each. ranks: how many parts. unit: the part is a multiple of it, such as what a
        collective sends best. orders: keys of ORDERS.
    Raises ValueError for a block size that does not divide its tensor, and numbers that are not positive.

    >>> print(pack([(64, 1), (12288, 64), (4096, 64), (64, 1), (16384, 64), (16384, 256)], 8))
    6 tensors on 8 ranks of 6,400 elements, 1,920 of them padding (3.75%); order: given
    """
    _check(tensors, ranks, unit, orders)
    found: list[Packing] = []
    for name in orders:
        order = sorted(range(len(tensors)), key=lambda i: ORDERS[name](tensors[i]))
        below = found[-1].size if found else None  # a larger part would not be taken
        packed = _pack([tensors[i] for i in order], ranks, unit, below)
        if packed is not None:
            starts = [0] * len(tensors)
            for i, start in zip(order, packed[1]):
                starts[i] = start
            found.append(Packing(tuple(tensors), tuple(starts), packed[0], ranks, name))
    return found[-1]


def _pack(tensors: list[Tensor], ranks: int, unit: int, below: int | None) -> tuple[int, list[int]] | None:
    """The smallest part for this order, less than `below`, and the starts."""
    ends = list(accumulate(e for e, _ in tensors))
    total = ends[-1] if ends else 0
    size = _up(max(-(-total // ranks), 1), unit)
    while below is None or size < below:
        cuts, larger = _fill(tensors, ends, ranks, size)
        if larger is None:
            return size, _starts(tensors, ends, cuts, size)
        size = _up(max(larger, size + 1), unit)
    return None


def _fill(tensors: list[Tensor], ends: list[int], ranks: int, size: int) -> tuple[list[int], int | None]:
    """Fill the ranks one after the other. Where each is cut, in elements of tensors before the cut; and None if all
    fits, else the next size at which some cut can lie elsewhere."""
    total = ends[-1] if ends else 0
    cuts: list[int] = []
    begin, larger = 0, math.inf
    for left in range(ranks - 1, -1, -1):
        if begin + size >= total:
            return cuts, None
        if total - begin > (left + 1) * size:  # the rest does not fit even without padding
            return cuts, int(min(larger, -(-(total - begin) // (left + 1))))
        t = bisect_right(ends, begin + size)
        (e, g), start = tensors[t], ends[t] - tensors[t][0]
        inside = (begin + size - start) // g * g  # of this tensor, before the cut
        if start < begin:  # it goes through this rank: the part must be a number of its blocks, which it is
            larger = min(larger, size + 1)
        elif size % g and e - inside > size:  # it would go through the next, of which the part is no number of blocks
            larger = min(larger, _up(size + 1, g), e - inside, start + inside + g - begin)
            if start == begin:
                return cuts, int(larger)
            inside = 0
        else:
            larger = min(larger, min(start + inside + g, ends[t]) - begin)
        begin = start + inside
        cuts.append(begin)
    return cuts, int(larger)


def _starts(tensors: list[Tensor], ends: list[int], cuts: list[int], size: int) -> list[int]:
    """Starts in the buffer. Padding at a cut lies before the tensor that the cut goes through, or that begins there."""
    starts: list[int] = []
    padding = k = 0
    for (e, _), end in zip(tensors, ends):
        while k < len(cuts) and cuts[k] < end:
            padding = max(padding, (k + 1) * size - cuts[k])
            k += 1
        starts.append(end - e + padding)
    return starts


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def _check(tensors: Sequence[Tensor], ranks: int, unit: int, orders: Sequence[str]) -> None:
    for name, value in (("ranks", ranks), ("unit", unit)):
        if value < 1:
            raise ValueError(f"schedules.pack: {name}={value} must be at least 1.")
    for order in orders:
        if order not in ORDERS:
            known = ", ".join(f"'{o}'" for o in ORDERS)
            raise ValueError(f"schedules.pack: there is no order '{order}': there are {known}.")
    if not orders:
        raise ValueError("schedules.pack: orders is empty; state at least one.")
    for i, (e, g) in enumerate(tensors):
        if e < 0 or g < 1:
            raise ValueError(
                f"schedules.pack: tensor {i} has {e} elements in blocks of {g}; state at least 0 "
                "elements, and blocks of at least 1."
            )
        if e % g:
            raise ValueError(
                f"schedules.pack: tensor {i} has {e} elements, which blocks of {g} do not divide. Choose a block size "
                f"that does, such as {math.gcd(e, g)}."
            )
