"""`Array`: a tensor of global shape whose parts live on the ranks of a mesh.

An Array is not a torch.Tensor. Inside a traced step it is lifted to an input; outside, any torch function on it runs as
a cached one-operation pjit. Printing and reading numbers never communicate.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vescale_fn import errors
from vescale_fn.sharding.bind import spec_of
from vescale_fn.sharding.graph import dtype_text
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.shardings import NamedSharding


@dataclass(frozen=True)
class ArrayType:
    """What a program is compiled for: layout (with the global shape), dtype and mesh of an Array."""

    layout: Layout
    dtype: torch.dtype
    mesh: Mesh

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.dtype, self.mesh))

    def __hash__(self) -> int:  # computed once: every call of a step hashes the type of every leaf
        return self._hash

    def __str__(self) -> str:
        return f"{dtype_text(self.dtype)}{list(self.layout.shape)} '{spec_of(self.layout)}' on {self.mesh}"


@dataclass(frozen=True, eq=False)
class ArrayShard:
    """The part of an Array that one rank holds: `index` are slices of the global tensor (lists of runs where the
    part is strided), `data` a view that must not be written."""

    rank: int
    coords: dict[str, int]
    index: tuple[Any, ...]
    data: torch.Tensor


class Array:
    """A global tensor in parts. Made by `device_put`, by the `make_array_*` functions, and by pjit.

    >>> import torch, vescale_fn as vf
    >>> a = vf.device_put(torch.arange(8.).reshape(4, 2), "b/dp d", vf.make_mesh(dp=2))
    >>> a.shape, a.addressable_shards[1].data.tolist()
    (torch.Size([4, 2]), [[4.0, 5.0], [6.0, 7.0]])
    """

    __slots__ = ("_name", "_shards", "_spec", "type")

    def __init__(self, type: ArrayType, shards: list[torch.Tensor], spec: str | None = None) -> None:
        self.type = type
        self._shards: list[torch.Tensor] | None = shards
        self._spec = spec
        self._name = ""

    # ---- what it is

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return torch.Size(self.type.layout.shape)

    @property
    def ndim(self) -> int:
        return self.type.layout.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.type.dtype

    @property
    def mesh(self) -> Mesh:
        return self.type.mesh

    @property
    def device(self) -> torch.device:
        """Where the parts that this process holds live (the first of them)."""
        return torch.device(self.mesh.device_of(self.mesh.local_ranks[0] if self.mesh.local_ranks else 0))

    @property
    def layout(self) -> Layout:
        return self.type.layout

    @property
    def sharding(self) -> NamedSharding:
        """Mesh and spec; dims keep the names that the user gave."""
        return NamedSharding(self.mesh, self._spec if self._spec is not None else str(spec_of(self.layout)))

    def numel(self) -> int:
        return math.prod(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    # ---- its parts

    @property
    def shards(self) -> list[torch.Tensor]:
        """The local tensors of this process, in rank order. Raises if the Array was donated."""
        if self._shards is None:
            raise RuntimeError(errors.donated_array(self._name, str(self.type)))
        return self._shards

    @property
    def is_deleted(self) -> bool:
        """Whether the Array was donated to a call and holds nothing any more."""
        return self._shards is None

    def take(self, name: str) -> list[torch.Tensor]:
        """The local tensors, for a program that may write into them; the Array is dead afterwards. Where somebody else
        sees the memory of a part (another Array, a view that was handed out) a copy takes its place. `name` tells
        later users where it went."""
        shards = self.shards
        self._shards, self._name = None, name
        return [shards[i] if _is_sole_holder(shards, i) else shards[i].clone() for i in range(len(shards))]

    @property
    def addressable_shards(self) -> list[ArrayShard]:
        """The parts that this process holds."""
        out = []
        for rank, data in zip(self.mesh.local_ranks, self.shards):
            coords = self.mesh.shape.coords(rank)
            runs = [self.layout.intervals(d, coords) for d in range(self.ndim)]
            index = tuple(slice(*r[0]) if len(r) == 1 else [slice(*x) for x in r] for r in runs)
            out.append(ArrayShard(rank, coords, index, data.detach()))
        return out

    def full(self) -> torch.Tensor:
        """The whole value as a plain tensor on every process. Communicates; all processes must call it."""
        from vescale_fn.move import move_to  # moving an Array runs a program, which needs this module

        return move_to(self, Layout.of(self.layout.mesh, self.layout.shape)).shards[0].clone()

    def to_dtensor(self) -> Any:
        """This Array as a DTensor over the same processes (one rank per process). Raises if DTensor cannot say it."""
        from vescale_fn.dtensor import to_dtensor

        return to_dtensor(self)

    # ---- numbers and text: never communicate

    def _local_value(self) -> torch.Tensor:
        if not self.layout.is_whole:
            raise ValueError(errors.needs_full(str(self.type)))
        return self.shards[0]

    def item(self) -> Any:
        """The Python number of a one-element Array that this process holds whole."""
        return self._local_value().item()

    def tolist(self) -> Any:
        return self._local_value().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __repr__(self) -> str:
        spec = self._spec if self._spec is not None else str(spec_of(self.layout))
        head = f"{dtype_text(self.dtype)}{list(self.shape)} '{spec}' on {self.mesh}"
        if self._shards is None:
            return f"Array({head}; donated{' to ' + self._name if self._name else ''})"
        if self.layout.is_whole and self.numel() <= 36:
            return f"Array({head}; {_values(self._shards[0])})"
        return f"Array({head}; this process {self._held()} {_values(self._shards[0])})"

    def _held(self) -> str:
        coords = self.mesh.shape.coords(self.mesh.local_ranks[0])
        runs = [self.layout.intervals(d, coords) for d in range(self.ndim)]

        def text(dim: int) -> str:
            if runs[dim] == ((0, self.shape[dim]),):
                return ":"
            return "+".join(f"{a}:{b}" for a, b in runs[dim]) or "0:0"

        return f"[{', '.join(text(d) for d in range(self.ndim))}]"

    # ---- torch functions

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from vescale_fn.lift import apply  # runs a one-operation pjit, or lifts into the trace under way

        return apply(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return self.__torch_function__(torch.Tensor.__getitem__, (Array,), (self, index))

    def __getattr__(self, name: str) -> Any:
        """Methods of torch.Tensor (`x.sum()`, `x.t()`), as operations on the global value."""
        method = getattr(torch.Tensor, name, None)
        if method is None or name.startswith("_") or not callable(method):
            raise AttributeError(f"Array has no attribute {name!r}")
        return lambda *args, **kwargs: self.__torch_function__(method, (Array,), (self, *args), kwargs)

    def __len__(self) -> int:
        return self.shape[0]

    def _binary(self, func: Callable[..., Any], *args: Any) -> Any:
        return self.__torch_function__(func, (Array,), args)

    def __add__(self, other: Any) -> Any:
        return self._binary(torch.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._binary(torch.add, other, self) if isinstance(other, torch.Tensor) else self + other

    def __sub__(self, other: Any) -> Any:
        return self._binary(torch.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._binary(torch.rsub, self, other)

    def __mul__(self, other: Any) -> Any:
        return self._binary(torch.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._binary(torch.mul, self, other)

    def __truediv__(self, other: Any) -> Any:
        return self._binary(torch.div, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._binary(torch.Tensor.__rtruediv__, self, other)

    def __pow__(self, other: Any) -> Any:
        return self._binary(torch.pow, self, other)

    def __matmul__(self, other: Any) -> Any:
        return self._binary(torch.matmul, self, other)

    def __neg__(self) -> Any:
        return self._binary(torch.neg, self)

    def __abs__(self) -> Any:
        return self._binary(torch.abs, self)

    def __lt__(self, other: Any) -> Any:
        return self._binary(torch.lt, self, other)

    def __le__(self, other: Any) -> Any:
        return self._binary(torch.le, self, other)

    def __gt__(self, other: Any) -> Any:
        return self._binary(torch.gt, self, other)

    def __ge__(self, other: Any) -> Any:
        return self._binary(torch.ge, self, other)


def _is_sole_holder(shards: list[torch.Tensor], i: int) -> bool:
    """Whether nothing but this list refers to its tensor i or to the storage below it."""
    in_python = sys.getrefcount(shards[i])  # the list, and the argument of this very call
    below = torch._C._storage_Use_Count(shards[i].untyped_storage()._cdata)  # the tensor, and the object just made
    return in_python <= 2 and below <= 2


def _values(t: torch.Tensor, most: int = 6) -> str:
    """At most `most` values a side."""
    edge = most // 2
    return torch._tensor_str._tensor_str(t.detach(), 0) if t.numel() <= most**2 else _summary(t.detach(), edge)


def _summary(t: torch.Tensor, edge: int) -> str:
    def text(x: torch.Tensor) -> str:
        if x.ndim == 0:
            return f"{x.item():.4g}" if x.dtype.is_floating_point else str(x.item())
        rows: Sequence[torch.Tensor | None] = (
            list(x) if len(x) <= 2 * edge else [*x[:edge], None, *x[-edge:]]  # "..." between the two edges
        )
        return f"[{', '.join('...' if r is None else text(r) for r in rows)}]"

    return text(t)
