"""The arguments of a call: which leaves are Arrays, tensors, numbers or constants, and what they are called.

Arrays, tensors and floats vary from call to call; everything else (ints, bools, strings, None, any hashable object) is
a constant of the program and part of the key under which the program is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn import errors
from vescale_fn.array import Array, ArrayType
from vescale_fn.debug import current_debug
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.tracing import ShapeDtype
from vescale_fn.tree import flatten, flatten_with_paths


@dataclass(frozen=True)
class Static:
    """A static argument: part of the cache key, opaque to the pytree."""

    value: Any


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a plain tensor argument, whose layout the solver chooses."""

    shape: tuple[int, ...]
    dtype: torch.dtype


LeafKey = ArrayType | TensorType | type[float] | tuple[Any, ...]


def leaf_key(x: Any) -> LeafKey:
    """What a leaf contributes to the cache key. A tuple is a constant of the program."""
    if isinstance(x, Array):
        return x.type
    if isinstance(x, (torch.Tensor, ShapeDtype)):
        return TensorType(tuple(x.shape), x.dtype)
    if type(x) is float:
        return float
    if isinstance(x, slice):
        return (slice, x.start, x.stop, x.step)
    return (type(x), x)


def check_hashable(fn: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise TypeError for the first leaf that cannot be part of a key."""
    for path, x in zip(paths, leaves):
        try:
            hash(leaf_key(x))
        except TypeError:
            raise TypeError(errors.bad_leaf(fn, path, type(x).__name__)) from None


def ambient_key() -> tuple[Any, ...]:
    """Ambient settings that a trace bakes in."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        current_debug(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


@dataclass(frozen=True)
class Signature:
    """How a function's parameters are treated by pjit: names of its static, donated and data arguments. Arguments that
    a `*args` collects are called `args[2]`, by their position in the call."""

    fn: Callable[..., Any]
    name: str
    params: tuple[str, ...]
    static: frozenset[str]
    donated: frozenset[str]
    data: frozenset[str] | None

    @staticmethod
    def of(
        fn: Callable[..., Any],
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        donate_argnums: int | Sequence[int] = (),
        data_argnums: int | Sequence[int] | None = None,
    ) -> Signature:
        name = getattr(fn, "__name__", type(fn).__name__)
        params, more_args, more_kwargs = parameters_of(fn)

        def param(i: int, what: str) -> str:
            if not (more_args and i >= len(params)) and not -len(params) <= i < len(params):
                raise ValueError(errors.argnum_out_of_range(name, what, i, params))
            return params[i] if i < len(params) else f"args[{i}]"

        def named(which: int | Sequence[int], what: str) -> frozenset[str]:
            return frozenset(param(i, what) for i in ((which,) if isinstance(which, int) else which))

        names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        for n in names:
            if not more_kwargs and n not in params:
                raise ValueError(errors.no_such_parameter(name, n, params))
        return Signature(
            fn,
            name,
            params,
            named(static_argnums, "static_argnums") | frozenset(names),
            named(donate_argnums, "donate_argnums"),
            None if data_argnums is None else named(data_argnums, "data_argnums"),
        )

    def param(self, index: int) -> str:
        """Name of the positional argument `index`."""
        return self.params[index] if index < len(self.params) else f"args[{index}]"

    def wrap_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with static ones made opaque."""
        if not self.static:
            return args, kwargs
        wrapped = tuple(self._static(self.param(i), x) for i, x in enumerate(args))
        return wrapped, {k: self._static(k, x) for k, x in kwargs.items()}

    def _static(self, name: str, x: Any) -> Any:
        if name not in self.static:
            return x
        try:
            hash(x)
        except TypeError:
            raise ValueError(errors.unhashable_static(self.name, name, type(x).__name__)) from None
        return Static(x)


def parameters_of(fn: Callable[..., Any]) -> tuple[tuple[str, ...], bool, bool]:
    """Names of the parameters, and whether there is a *args and a **kwargs."""
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not say
        return (), True, True
    kinds = {p.kind for p in found}
    params = tuple(p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return params, inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds


def unwrap_static(tree_part: Any) -> Any:
    return tree_part.value if isinstance(tree_part, Static) else tree_part


@dataclass(frozen=True, eq=False)
class Shardings:
    """The keyword arguments of pjit that say where things live."""

    mesh: Mesh | None
    inputs: Any
    outputs: Any


@dataclass(frozen=True, eq=False)
class CallArguments:
    """One call's leaves, with the path and the top-level parameter of each."""

    leaves: list[Any]
    treedef: Any
    paths: tuple[str, ...]
    tops: tuple[str, ...]
    trees: dict[str, Any]  # each argument by the name of its parameter

    @staticmethod
    def of(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        leaves, treedef = flatten((args, kwargs))
        paths: list[str] = []
        tops: list[str] = []
        trees = {**{signature.param(i): a for i, a in enumerate(args)}, **kwargs}
        for top, value in trees.items():
            below, _, _ = flatten_with_paths(value)
            paths += [f"{top}.{p}" if p else top for p in below]
            tops += [top] * len(below)
        return CallArguments(leaves, treedef, tuple(paths), tuple(tops), trees)

    def of_top(self, top: str) -> list[int]:
        """Indices of the leaves of one argument."""
        return [i for i, t in enumerate(self.tops) if t == top]
