"""The collectives of a per-rank program, as data.

Each works on *local* tensors. `dim` is a tensor dim; `pre` a local position inside it: the dim is viewed as
(pre, rest) for a piece that is one digit, (pre, n, rest) for a piece that holds all n digits, n being the product
of the sizes of `axes`, which are major to minor. (`Shard.pre` counts in the global dim; axes that cut the dim at a
major position make the local `pre` smaller.)

Pieces of different size have pre == 1 and lie one after the other in the order of the ranks. With `uneven`, the
global size of the dim's leading factor, each axis in turn cuts what the axes before it left, like torch.chunk: 5 over
("x", "y") of sizes (2, 2) is [2, 1, 1, 1]. Axes major to these that have cut the factor and stay have cut it first, so
its local size may differ between groups. With `units`, piece i has units[i] of sum(units) equal parts; then `flat`, if
any, gives the sizes of the dims from `dim` on that are one dim in the pieces: merged before a cut, restored after a
gather. In any case a piece is as large as the layout of the part says (`Layout.local_size`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import torch

from vescale_fn.sharding.layout import Kind, Layout
from vescale_fn.sharding.mesh import axes_text


@dataclass(frozen=True)
class AllReduce:
    """Every rank gets the sum (max, min) of all. Takes any number of operands (a bucket)."""

    axes: tuple[str, ...]
    kind: Kind = "sum"


@dataclass(frozen=True)
class AllGather:
    """(pre, rest) of each rank -> (pre, n, rest) on all."""

    axes: tuple[str, ...]
    dim: int
    pre: int = 1
    uneven: int = 0
    units: tuple[int, ...] = ()
    flat: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReduceScatter:
    """(pre, n, rest) partial on each rank -> own digit (pre, rest), reduced."""

    axes: tuple[str, ...]
    dim: int
    pre: int = 1
    kind: Kind = "sum"
    uneven: int = 0
    units: tuple[int, ...] = ()
    flat: tuple[int, ...] = ()


@dataclass(frozen=True)
class AllToAll:
    """split dim (split_pre, n, rest) keeps own digit; concat dim (concat_pre, rest) -> (concat_pre, n, rest).

    When both dims are the same dim, split happens first, into n equal pieces, and concat_pre counts in a piece.
    """

    axes: tuple[str, ...]
    split_dim: int
    concat_dim: int
    split_pre: int = 1
    concat_pre: int = 1
    split_uneven: int = 0
    concat_uneven: int = 0


@dataclass(frozen=True)
class Permute:
    """The block at the rank whose coordinates read k in the order `src` goes to the rank whose coordinates read k in
    the order `dst`; both list the same axes, major to minor. Blocks may differ in shape between ranks."""

    src: tuple[str, ...]
    dst: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.src


@dataclass(frozen=True)
class Exchange:
    """Every rank gets its block under `dst` from the blocks that the ranks of its group hold under `src`.

    For what the regular collectives cannot say: blocks that overlap irregularly, like a contiguous shard that becomes
    every third of three, or other units. A block is a product of runs per dim (`Layout.intervals`), and what goes from
    one rank to another is the intersection of two blocks, dim by dim (`common_runs`), possibly empty. `axes` are those
    that shard `src` and have another state in `dst`, so each index comes from exactly one rank of the group; with no
    axes every rank cuts its block out of its own. Both layouts are over the same dims, those of the local tensors.
    """

    axes: tuple[str, ...]
    src: Layout
    dst: Layout


@dataclass(frozen=True)
class PPermute:
    """The block of the rank at index `source` along `axes` goes to the rank at index `destination`, for each of
    `pairs`; a rank that is nobody's destination gets zeros of its operand's shape. Blocks have equal shapes.

    Raises ValueError when a rank is a source or a destination twice.
    """

    axes: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for k, role in enumerate(("source", "destination")):
            index, times = max(Counter(p[k] for p in self.pairs).items(), key=lambda c: c[1], default=(0, 0))
            if times > 1:
                raise ValueError(
                    f"ppermute along {axes_text(self.axes)}: index {index} is the {role} in "
                    f"{', '.join(str(p) for p in self.pairs if p[k] == index)}, and may be in one pair only. Send the "
                    "rest with another ppermute."
                )

    @cached_property
    def source_of(self) -> dict[int, int]:
        """The index of whom each destination hears from."""
        return {d: s for s, d in self.pairs}

    @cached_property
    def destination_of(self) -> dict[int, int]:
        """The index to which each source sends."""
        return dict(self.pairs)


@dataclass(frozen=True)
class Broadcast:
    """Every rank along `axes` gets the block of the rank at index `source`."""

    axes: tuple[str, ...]
    source: int


@dataclass(frozen=True)
class RaggedAllToAll:
    """Rows (of dim 0) to and from every rank along `axes`, as many as the operands say at run time.

    Operands: operand, output, input_offsets, send_sizes, output_offsets, recv_sizes; the last four are vectors of ints,
    one for each of the n ranks. This rank's rows input_offsets[i] : input_offsets[i] + send_sizes[i] go to rank i, into
    its rows from output_offsets[i] on; recv_sizes[i] rows come from rank i. The result is `output`, with the rows that
    arrive in place of its own, as a new tensor. (These are the semantics of jax.lax.ragged_all_to_all.)
    """

    axes: tuple[str, ...]


@dataclass(frozen=True)
class Slice:
    """Own digit of a whole piece: (pre, n, rest) -> (pre, rest). No communication."""

    axes: tuple[str, ...]
    dim: int
    pre: int = 1
    uneven: int = 0
    units: tuple[int, ...] = ()
    flat: tuple[int, ...] = ()


@dataclass(frozen=True)
class ToPartial:
    """A whole value as a pending reduction: the first rank along `axes` keeps it, the others hold what `kind` ignores
    (zeros for a sum, the lowest value for max, the highest for min). No communication."""

    axes: tuple[str, ...]
    kind: Kind = "sum"


Collective = (
    AllReduce | AllGather | ReduceScatter | AllToAll | Permute | Exchange | PPermute | Broadcast | RaggedAllToAll
)
Local = Slice | ToPartial
Comm = Collective | Local
COLLECTIVES = get_args(Collective)
COMMS = (*COLLECTIVES, Slice, ToPartial)


def identity(kind: Kind, dtype: torch.dtype) -> float | int | bool:
    """The value that a reduction of `kind` ignores.

    >>> identity("max", torch.float32), identity("min", torch.int8), identity("max", torch.bool)
    (-inf, 127, False)
    """
    if kind == "sum":
        return 0
    if dtype == torch.bool:
        return kind == "min"
    if dtype.is_floating_point:
        return float("-inf") if kind == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return int(limits.min if kind == "max" else limits.max)


def check_indices(comm: Comm, n: int) -> None:
    """Raise ValueError when a PPermute or Broadcast names ranks that a group of n does not have."""
    named = comm.source_of.items() if isinstance(comm, PPermute) else ()
    indices = {comm.source} if isinstance(comm, Broadcast) else {i for pair in named for i in pair}
    wrong = sorted(i for i in indices if not 0 <= i < n)
    if wrong:
        raise ValueError(
            f"{comm_name(comm)} along {axes_text(comm.axes)} names index {wrong[0]}, but there are {n} ranks, with "
            f"indices 0 to {n - 1}."
        )


def comm_name(comm: Comm) -> str:
    """`all_reduce`, `ppermute`, `slice`, ..."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(comm).__name__).lower()


@dataclass(frozen=True)
class Step:
    """One collective of a chain, and the layout of its result."""

    comm: Comm
    layout: Layout


Runs = Sequence[tuple[int, int]]


def common_runs(src: Runs, dst: Runs) -> Iterator[tuple[int, int, int]]:
    """Runs of indices in both `src` and `dst` (ascending, as `Layout.intervals` gives them), each as its position in
    the tensor that holds `src`, its position in the tensor that holds `dst`, and its length.

    >>> list(common_runs([(0, 6)], [(2, 4), (5, 9)]))
    [(2, 0, 2), (5, 2, 1)]
    """
    at_src = 0
    for a, b in src:
        at_dst = 0
        for c, d in dst:
            start, stop = max(a, c), min(b, d)
            if start < stop:
                yield at_src + start - a, at_dst + start - c, stop - start
            at_dst += d - c
        at_src += b - a
