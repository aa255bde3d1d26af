"""`Array`: a tensor of global shape whose parts live on the ranks of a mesh.

An Array is not a torch.Tensor. Inside a traced step it is lifted to an input; outside, any torch function on it runs as
a cached one-operation pjit. Printing and reading numbers never communicate: they use what this process holds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from vescale_fn import errors
from vescale_fn.array_text import held_text, values_text
from vescale_fn.sharding.bind import spec_of
from vescale_fn.sharding.graph import dtype_text
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.shardings import Index, NamedSharding, part_index


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

    def text(self, spec: str | None = None) -> str:
        """`f32[8, 4] 'b/dp d' on dp=2`, with the user's spelling of the spec if there is one."""
        named = str(spec_of(self.layout)) if spec is None else spec
        return f"{dtype_text(self.dtype)}{list(self.layout.shape)} '{named}' on {self.mesh}"

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True, eq=False)
class ArrayShard:
    """The part of an Array that one rank holds.

    index: one slice of the global tensor for each dim, or a tuple of slices where the part has several runs; dims that
        are cut flat count as one.
    data: the values, as a lazy copy: memory is shared until either side is written, so that writing to it changes
        nothing in the Array, and a step that reuses the Array's memory changes nothing in it.
    """

    rank: int
    coords: dict[str, int]
    index: Index
    data: torch.Tensor


def _operator(name: str) -> Callable[[Array, Any], Any]:
    """The operator `name` of torch.Tensor, on global values."""
    func = getattr(torch.Tensor, name)
    return lambda self, other: self.__torch_function__(func, (Array,), (self, other))


def _unary(name: str) -> Callable[[Array], Any]:
    func = getattr(torch.Tensor, name)
    return lambda self: self.__torch_function__(func, (Array,), (self,))


_VIEWS = ("T", "mT", "H", "mH", "real", "imag")  # properties of torch.Tensor that are operations


class _Named(type):
    """torch.func, and libraries that know tensors by type, refuse an Array in words of their own, in which only the
    name of the type is ours to say."""

    def __repr__(cls) -> str:
        return "vescale_fn.Array (to use it here, pass it as an argument to a function decorated with vescale_fn.pjit)"


class Array(metaclass=_Named):
    """A global tensor in parts. Made by `device_put`, by the `make_array_*` functions, and by pjit.

    On an abstract mesh an Array has a type and no parts: steps can be lowered for it, its values cannot be read.
    Comparisons are element by element, as those of tensors; hashing is by identity.

    >>> import torch, vescale_fn as vf
    >>> a = vf.device_put(torch.arange(8.).reshape(4, 2), "b/dp d", vf.make_mesh(dp=2))
    >>> a.shape, a.addressable_shards[1].data.tolist()
    (torch.Size([4, 2]), [[4.0, 5.0], [6.0, 7.0]])
    >>> (a + 1).sum()
    Array(f32[] '' on dp=2; 36)
    """

    __slots__ = ("_gone", "_shards", "spec", "type")

    def __init__(self, type: ArrayType, shards: list[torch.Tensor], spec: str | None = None) -> None:
        self.type = type
        self.spec = spec  # as the user wrote it, for printing
        self._shards: list[torch.Tensor] | None = shards
        self._gone = ""  # where the values went

    # ---- what it is

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return torch.Size(self.type.layout.shape)

    @property
    def ndim(self) -> int:
        return self.type.layout.ndim

    def dim(self) -> int:
        return self.ndim

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
        return NamedSharding(self.mesh, str(spec_of(self.layout)) if self.spec is None else self.spec)

    def numel(self) -> int:
        return math.prod(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    # ---- its parts

    @property
    def shards(self) -> list[torch.Tensor]:
        """The local tensors themselves, in the order of this process's ranks: for code that runs programs. Others use
        `addressable_shards`. Raises RuntimeError if the Array was donated."""
        if self._shards is None:
            raise RuntimeError(errors.donated_array(str(self.type), self._gone))
        return self._shards

    @property
    def is_deleted(self) -> bool:
        """Whether the Array was donated to a call and holds nothing any more."""
        return self._shards is None

    def take(self, gone: str) -> list[torch.Tensor]:
        """The local tensors, for a program that may write into them; the Array is dead afterwards. Where somebody else
        sees the memory of a part (another Array, a view) a copy takes its place.

        gone: tells later users where the values went ("donated to train_step").
        """
        shards = self.shards
        self._shards, self._gone = None, gone
        return [shards[i] if _is_sole_holder(shards, i) else shards[i].clone() for i in range(len(shards))]

    @property
    def gone(self) -> str:
        """Where the values of a dead Array went."""
        return self._gone

    def lost(self, gone: str) -> None:
        """Say what became of the values after all."""
        self._gone = gone

    @property
    def addressable_shards(self) -> list[ArrayShard]:
        """The parts that this process holds."""
        held = [(rank, self.mesh.shape.coords(rank)) for rank in self.mesh.local_ranks]
        return [
            ArrayShard(rank, coords, part_index(self.layout, coords), torch._lazy_clone(data))
            for (rank, coords), data in zip(held, self.shards, strict=True)
        ]

    def full(self) -> torch.Tensor:
        """The whole value as a plain tensor on every process. Communicates; all processes must call it."""
        from vescale_fn.move import move_to  # moving an Array runs a program, which needs this module

        self._require_values()
        return move_to(self, Layout.of(self.layout.mesh, self.layout.shape)).shards[0].clone()

    def to_dtensor(self) -> Any:
        """This Array as a DTensor over the same processes (one rank per process), sharing memory. Raises ValueError
        where DTensor cannot say it."""
        from vescale_fn.dtensor import to_dtensor

        return to_dtensor(self)

    @staticmethod
    def from_dtensor(x: Any, mesh: Mesh | None = None) -> Array:
        """A DTensor as an Array, sharing memory. mesh: by default one with the axes of the DTensor's own."""
        from vescale_fn.dtensor import from_dtensor

        return from_dtensor(x, mesh)

    # ---- numbers and text: never communicate

    def _require_values(self) -> None:
        if self.mesh.kind == "abstract":
            raise ValueError(errors.abstract_array(str(self.type)))

    def _local_value(self) -> torch.Tensor:
        self._require_values()
        shards = self.shards
        if not self.layout.is_whole:
            raise ValueError(errors.needs_full(str(self.type)))
        return shards[0]

    def item(self) -> Any:
        """The Python number of a one-element Array that this process holds whole."""
        return self._local_value().item()

    def tolist(self) -> Any:
        return self._local_value().tolist()

    def numpy(self) -> np.ndarray[Any, Any]:
        """A NumPy copy of an Array that this process holds whole."""
        return self._local_value().numpy(force=True).copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self._local_value().__index__()

    def __bool__(self) -> bool:
        return bool(self._local_value())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __repr__(self) -> str:
        head = self.type.text(self.spec)
        if self._shards is None:
            return f"Array({head}; {self._gone})"
        if not self._shards:
            return f"Array({head}; no values)"
        values = values_text(self._shards[0])
        return f"Array({head}; {values})" if self.layout.is_whole else f"Array({head}; {held_text(self.type)} {values})"

    # ---- torch functions

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from vescale_fn.lift import apply  # runs a one-operation pjit, or lifts into the trace under way

        return apply(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """Methods of torch.Tensor (`x.sum()`, `x.T`), as operations on the global value."""
        method = getattr(torch.Tensor, name, None)
        if name in _VIEWS:
            return self.__torch_function__(getattr(torch.Tensor, name).__get__, (Array,), (self,))
        if method is None or name.startswith("_") or not callable(method):
            raise AttributeError(f"Array has no attribute {name!r}.", name=name, obj=self)
        return lambda *args, **kwargs: self.__torch_function__(method, (Array,), (self, *args), kwargs)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d Array.")
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        if not self.ndim:
            raise TypeError("Iteration over a 0-d Array.")
        return iter(self.unbind(0))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(errors.array_is_immutable())

    __hash__ = object.__hash__
    __getitem__ = _operator("__getitem__")
    __neg__, __abs__, __invert__ = map(_unary, ("__neg__", "__abs__", "__invert__"))
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("__lt__", "__le__", "__gt__", "__ge__"))
    __add__, __radd__ = map(_operator, ("__add__", "__radd__"))
    __sub__, __rsub__ = map(_operator, ("__sub__", "__rsub__"))
    __mul__, __rmul__ = map(_operator, ("__mul__", "__rmul__"))
    __truediv__, __rtruediv__ = map(_operator, ("__truediv__", "__rtruediv__"))
    __floordiv__, __rfloordiv__ = map(_operator, ("__floordiv__", "__rfloordiv__"))
    __mod__, __rmod__ = map(_operator, ("__mod__", "__rmod__"))
    __pow__, __rpow__ = map(_operator, ("__pow__", "__rpow__"))
    __matmul__, __rmatmul__ = map(_operator, ("__matmul__", "__rmatmul__"))
    __and__, __rand__ = map(_operator, ("__and__", "__rand__"))
    __or__, __ror__ = map(_operator, ("__or__", "__ror__"))
    __lshift__, __rlshift__ = map(_operator, ("__lshift__", "__rlshift__"))
    __rshift__, __rrshift__ = map(_operator, ("__rshift__", "__rrshift__"))
    __xor__, __rxor__ = map(_operator, ("__xor__", "__rxor__"))

    def __eq__(self, other: object) -> Any:
        return self.__torch_function__(torch.Tensor.__eq__, (Array,), (self, other))

    def __ne__(self, other: object) -> Any:
        return self.__torch_function__(torch.Tensor.__ne__, (Array,), (self, other))


def _users(shards: list[torch.Tensor], i: int) -> tuple[int, int]:
    """How many refer to tensor i of a list, and to the storage below it."""
    storage = shards[i].untyped_storage()
    return sys.getrefcount(shards[i]), torch._C._storage_Use_Count(storage._cdata)


@cache
def _users_when_alone() -> tuple[int, int]:
    return _users([torch.empty(1)], 0)


def _is_sole_holder(shards: list[torch.Tensor], i: int) -> bool:
    """Whether nothing but this list refers to its tensor i or to the storage below it."""
    return all(a <= b for a, b in zip(_users(shards, i), _users_when_alone()))
