"""`pjit`: a step written once, over global values, run on any mesh.

The first call with new types traces, solves and partitions the step (`request`, `lowering`); later calls look the
program up and run it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import torch

from vescale_fn import errors
from vescale_fn.arguments import CallArguments, Signature, ambient_key, leaf_key
from vescale_fn.array import Array, ArrayType
from vescale_fn.engines import Executable
from vescale_fn.lowering import Lowered, lower, output_types
from vescale_fn.placement import cut
from vescale_fn.request import Shardings, request_of, trace_call
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.trace import Traced, current_trace
from vescale_fn.tree import flatten, unflatten

P = ParamSpec("P")
R = TypeVar("R")

_disabled: ContextVar[bool] = ContextVar("vescale_fn_pjit_disabled", default=False)


@contextlib.contextmanager
def disable_pjit() -> Iterator[None]:
    """Inside, functions decorated with pjit run as the plain functions that they are."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


class CacheInfo(NamedTuple):
    """Calls that found their program, and programs that had to be lowered."""

    hits: int
    misses: int


class Jitted(Generic[P, R]):
    """A pjit-ted function. Call it like the plain function, which is `.fn`."""

    def __init__(
        self, fn: Callable[P, R], signature: Signature, shardings: Shardings, rules: Mapping[Any, Any] | None = None
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self._signature = signature
        self._shardings = shardings
        self._rules = dict(rules or {})
        self._cache: dict[Any, _Loaded] = {}
        self._static_floats: dict[Any, list[int]] = {}  # key -> leaves whose value the program depends on
        self._hits = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _disabled.get() or current_trace() is not None:
            return self.fn(*args, **kwargs)
        static_args, static_kwargs = self._signature.wrap_static(args, kwargs)
        leaves, treedef = flatten((static_args, static_kwargs))
        key = (treedef, tuple(map(leaf_key, leaves)), ambient_key())
        loaded = self._cache.get(self._with_floats(key, leaves))
        if loaded is None:
            lowered, dynamic, out_treedef = self._lower(static_args, static_kwargs)
            loaded = _Loaded.of(lowered, dynamic, out_treedef)
            if lowered.traced.static:
                self._static_floats[key] = [dynamic[k] for k in sorted(lowered.traced.static)]
            self._cache[self._with_floats(key, leaves)] = loaded
        else:
            self._hits += 1
        result: R = loaded(leaves)
        return result

    def _with_floats(self, key: Any, leaves: list[Any]) -> Any:
        static = self._static_floats.get(key)
        return (key, tuple(leaves[i] for i in static)) if static else key

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """The program for these arguments, not run. Arrays on an abstract mesh will do."""
        return self._lower(*self._signature.wrap_static(args, kwargs))[0]

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """The global graph for these arguments."""
        call = CallArguments.of(self._signature, *self._signature.wrap_static(args, kwargs))
        return trace_call(self._signature, call).traced

    def cache_info(self) -> CacheInfo:
        return CacheInfo(self._hits, len(self._cache))

    def _lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Lowered, tuple[int, ...], Any]:
        call = CallArguments.of(self._signature, args, kwargs)
        staged = trace_call(self._signature, call)
        request = request_of(self._signature, self._shardings, call, staged, self._rules)
        return lower(self._signature.name, staged.traced, request), staged.dynamic, staged.out_treedef

    def __repr__(self) -> str:
        return f"pjit({self._signature.name})"


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A program ready to run, and how its inputs and outputs map to the leaves of a call."""

    name: str
    run: Executable
    mesh: Mesh
    dynamic: tuple[int, ...]
    donated: frozenset[int]  # of the dynamic leaves
    captured: tuple[Any, ...]
    layouts: tuple[Layout | None, ...]  # of the program's inputs
    out_types: tuple[ArrayType | None, ...]
    out_constants: tuple[Any, ...]
    out_treedef: Any

    @staticmethod
    def of(lowered: Lowered, dynamic: tuple[int, ...], out_treedef: Any) -> _Loaded:
        graph, mesh = lowered.program.graph, lowered.request.mesh
        return _Loaded(
            lowered.name,
            lowered.compile(),
            mesh,
            dynamic,
            lowered.program.donated,
            tuple(lowered.traced.captured),
            tuple(lowered.program.layouts.get(v) for v in graph.inputs),
            tuple(output_types(lowered.program, mesh)),
            tuple(None if isinstance(v, Var) else v for v in graph.outputs),
            out_treedef,
        )

    def __call__(self, leaves: list[Any]) -> Any:
        values = [leaves[i] for i in self.dynamic]
        if self.donated:
            self._check_donation(values)
        columns = [self._shards(v, k) for k, v in enumerate([*values, *self.captured])]
        outs = self.run([list(row) for row in zip(*columns)] if columns else [[] for _ in self.mesh.local_ranks])
        results: list[Any] = list(self.out_constants)
        for k, (column, t) in enumerate(zip(zip(*outs), self.out_types)):
            if t is not None:
                results[k] = Array(t, list(column))
            elif results[k] is None and column[0] is not None:
                results[k] = column[0]
        return unflatten(self.out_treedef, results)

    def _shards(self, value: Any, k: int) -> list[Any]:
        """What each rank of this process gets for program input k."""
        if isinstance(value, Array):
            return value.take(self.name) if k in self.donated else value.shards
        if isinstance(value, torch.Tensor):
            layout = self.layouts[k]
            assert layout is not None
            coords = self.mesh.shape.coords
            return [cut(value.to(self.mesh.device_of(r)), layout, coords(r)) for r in self.mesh.local_ranks]
        return [value] * len(self.mesh.local_ranks)

    def _check_donation(self, values: Sequence[Any]) -> None:
        seen: dict[int, int] = {}
        for k, v in enumerate(values):
            first = seen.setdefault(id(v), k)
            if first != k and isinstance(v, Array) and (k in self.donated or first in self.donated):
                raise ValueError(errors.donated_twice(f"leaf {first}", f"leaf {k}", self.name))


@overload
def pjit(fn: Callable[P, R], /) -> Jitted[P, R]: ...


@overload
def pjit(fn: Callable[P, R], /, **options: Any) -> Jitted[P, R]: ...


@overload
def pjit(**options: Any) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def pjit(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    data_argnums: int | Sequence[int] | None = None,
    rules: Mapping[Any, Any] | None = None,
    **wrong: Any,
) -> Any:
    """Run a pure function of global values on a mesh. A decorator, a decorator factory, or a call.

    mesh: where to run; not needed when an argument is an Array.
    in_shardings, out_shardings: prefix trees of specs for the positional arguments and the result. Unspecified
        inputs keep their own; unspecified outputs continue the argument they are shaped like, else the solver chooses.
    donate_argnums: arguments whose storage may be reused; they are dead after the call.
    static_argnums, static_argnames: arguments that are constants of the program (hashable).
    data_argnums: arguments whose sharding decides first where two conflict; by default all but the first.
    rules: extra sharding rules by operation, see `register_rule`.

    >>> import torch, vescale_fn as vf
    >>> mesh = vf.make_mesh(dp=2)
    >>> double = vf.pjit(lambda x: (2 * x).sum())
    >>> float(double(vf.device_put(torch.ones(4), "b/dp", mesh)))
    8.0
    """
    name = getattr(fn, "__name__", "step")
    for keyword in wrong:
        if keyword in ("in_specs", "out_specs"):
            raise TypeError(errors.specs_in_pjit(name, keyword))
        raise TypeError(errors.unknown_keyword("vf.pjit", keyword))

    def wrap(f: Callable[..., Any]) -> Jitted[..., Any]:
        signature = Signature.of(f, static_argnums, static_argnames, donate_argnums, data_argnums)
        return Jitted(f, signature, Shardings(mesh, in_shardings, out_shardings), rules)

    return wrap if fn is None else wrap(fn)
