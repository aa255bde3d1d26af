"""The collectives of a per-rank program, as data.

Each works on *local* tensors. `dim` is a tensor dim; `pre` a local position inside it: the dim is viewed as
(pre, rest) for a piece that is whole on this rank, (pre, n, rest) for a piece that holds all n digits. `axes` are
major to minor. `uneven`, where present and nonzero, is the size of the dim's leading factor, which the ranks cut
like torch.chunk (then pre == 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from vescale_fn.sharding.layout import Kind


@dataclass(frozen=True)
class AllReduce:
    """Every rank gets the sum (max, min) of all. Takes any number of operands (a bucket)."""

    axes: tuple[str, ...]
    kind: Kind = "sum"


@dataclass(frozen=True)
class AllGather:
    """(pre, rest) of each rank -> (pre, n, rest) on all. `units`: ragged pieces, in units of the dim."""

    axes: tuple[str, ...]
    dim: int
    pre: int = 1
    uneven: int = 0
    units: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReduceScatter:
    """(pre, n, rest) partial on each rank -> own digit (pre, rest), reduced."""

    axes: tuple[str, ...]
    dim: int
    pre: int = 1
    kind: Kind = "sum"
    uneven: int = 0
    units: tuple[int, ...] = ()


@dataclass(frozen=True)
class AllToAll:
    """split dim (split_pre, n, rest) keeps own digit; concat dim (concat_pre, rest) -> (concat_pre, n, rest).

    When both dims are the same dim, split happens first and concat_pre counts in the dim after the split.
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
    the order `dst`; both list the same axes, major to minor."""

    src: tuple[str, ...]
    dst: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.src


@dataclass(frozen=True)
class Slice:
    """Own digit of a whole piece: (pre, n, rest) -> (pre, rest). No communication."""

    axes: tuple[str, ...]
    dim: int
    pre: int = 1
    uneven: int = 0
    units: tuple[int, ...] = ()


@dataclass(frozen=True)
class ToPartial:
    """A whole value as a partial sum: the first rank along `axes` keeps it, the others hold zeros. No communication."""

    axes: tuple[str, ...]
    kind: Kind = "sum"


Collective = AllReduce | AllGather | ReduceScatter | AllToAll | Permute
Local = Slice | ToPartial
Comm = Collective | Local
COLLECTIVES = (AllReduce, AllGather, ReduceScatter, AllToAll, Permute)
COMMS = (*COLLECTIVES, Slice, ToPartial)
