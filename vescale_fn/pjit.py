"""`pjit`: a step written once, over global values, run on any mesh.

The first call with new types traces, solves and partitions the step (`request`, `lowering`); later calls look the
program up and run it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

from vescale_fn import errors
from vescale_fn.arguments import CallArguments, Shardings, Signature, ambient_key, check_hashable, leaf_key
from vescale_fn.array import Array
from vescale_fn.audit import audit
from vescale_fn.debug import current_debug
from vescale_fn.loaded import CallForm, Loaded
from vescale_fn.lowered import Keep, Lowered
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.tracing import REGION, Traced, current_trace
from vescale_fn.tree import flatten
from vescale_fn.variety import Variety

if TYPE_CHECKING:
    from vescale_fn.register import UserRule
    from vescale_fn.verify import Verified

P = ParamSpec("P")
R = TypeVar("R")

_disabled: ContextVar[bool] = ContextVar("vescale_fn_pjit_disabled", default=False)


@contextlib.contextmanager
def disable_pjit() -> Iterator[None]:
    """Inside, functions decorated with pjit run as the plain functions that they are.

    >>> import torch, vescale_fn as vf
    >>> with vf.disable_pjit():
    ...     vf.pjit(lambda x: print("called with", x) or x + 1)(torch.ones(1))
    called with tensor([1.])
    tensor([2.])
    """
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


class CacheInfo(NamedTuple):
    """Calls that found their program, and programs that had to be lowered."""

    hits: int
    misses: int


@dataclass(frozen=True)
class Options:
    """The keyword arguments of pjit that say how a program is made and run; see `pjit`."""

    rules: Mapping[Any, Any]
    safe: bool
    backend: str | None
    deterministic: bool
    cache_dir: Path | None
    audit: int  # every how many calls, 0 for never
    keep: Keep


class Jitted(Generic[P, R]):
    """A pjit-ted function. Call it like the plain function, which is `.fn`."""

    def __init__(self, fn: Callable[P, R], signature: Signature, shardings: Shardings, options: Options) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self._signature = signature
        self._shardings = shardings
        self._options = options
        self._cache: dict[Any, Loaded] = {}
        self._static_floats: dict[Any, list[int]] = {}  # key -> leaves whose value the program depends on
        self._variety = Variety(signature.name)
        self._hits = 0
        self._calls = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _disabled.get() or current_trace() is not None or REGION.get() is not None:
            return self.fn(*args, **kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """The call as a program, whatever `disable_pjit` says."""
        args, kwargs = self._signature.wrap_static(args, kwargs)
        leaves, treedef = flatten((args, kwargs))
        key = (treedef, tuple(map(leaf_key, leaves)), ambient_key())
        try:
            loaded = self._cache.get(self._with_floats(key, leaves))
        except TypeError:
            call = CallArguments.of(self._signature, args, kwargs)
            check_hashable(self._signature.name, call.paths, call.leaves)
            raise
        if loaded is None:
            loaded = self._load(key, CallArguments.of(self._signature, args, kwargs))
        else:
            self._hits += 1
        result: R = loaded(leaves)
        self._calls += 1
        if self._options.audit and self._calls % self._options.audit == 0:
            audit(result, self._signature.name)
        return result

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """The program for these arguments, not run. Arrays on an abstract mesh, and with `mesh=` also `ShapeDtype`s,
        will do."""
        return self._lower(self._call(args, kwargs))[0]

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """The global graph for these arguments."""
        from vescale_fn.request import trace_call

        return trace_call(self._signature, self._shardings, self._call(args, kwargs)).traced

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """What a call would return, as a tree of `ShapeDtype`; see `eval_shape`."""
        from vescale_fn.request import shapes_of_results

        return shapes_of_results(self._signature, self._shardings, self._call(args, kwargs))

    def verify(self, *args: P.args, **kwargs: P.kwargs) -> Verified:
        """Run the plain function and the program for these arguments on virtual ranks, operation by operation, and
        name the first one whose result differs. Nothing is donated."""
        from vescale_fn.verify import verify

        call = self._call(args, kwargs)
        lowered, form = self._lower(call)
        values = [*(call.leaves[i] for i in form.dynamic), *lowered.traced.captured]
        whole = [x.full() if isinstance(x, Array) else x for x in values]
        return verify(lowered.program, lowered.plan.graph, whole)

    def cache_info(self) -> CacheInfo:
        """Calls that found their program, and programs that had to be lowered."""
        return CacheInfo(self._hits, len(self._cache))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        call = CallArguments.of(self._signature, *self._signature.wrap_static(args, kwargs))
        check_hashable(self._signature.name, call.paths, call.leaves)
        return call

    def _with_floats(self, key: Any, leaves: list[Any]) -> Any:
        static = self._static_floats.get(key)
        return (key, tuple(leaves[i] for i in static)) if static else key

    def _lower(self, call: CallArguments) -> tuple[Lowered, CallForm]:
        # Imported by who lowers: solver, rules and partition would double the time that importing the package takes.
        from vescale_fn.lowering import lower
        from vescale_fn.request import request_of, trace_call

        signature = self._signature
        staged = trace_call(signature, self._shardings, call)
        request = request_of(signature, self._shardings, call, staged, dict(self._options.rules))
        donated, paths, watched = request.donated, tuple(call.paths[i] for i in staged.dynamic), current_debug()
        reused = frozenset[int]() if self._options.safe or watched else donated
        request = replace(request, donated=reused, keep=self._options.keep, paths=paths, debug=watched)
        lowered = lower(signature.name, staged.traced, request, self._options.cache_dir)
        return lowered, CallForm(staged.dynamic, paths, donated, staged.out_treedef)

    def _load(self, key: Any, call: CallArguments) -> Loaded:
        """Lower and keep the program for a call."""
        self._variety.note(call)
        lowered, form = self._lower(call)
        run = None
        if lowered.request.mesh.kind != "abstract":
            run = lowered.compile(deterministic=self._options.deterministic, backend=self._options.backend)
        loaded = Loaded.of(lowered, form, run)
        if lowered.traced.static:
            self._static_floats[key] = [form.dynamic[k] for k in sorted(lowered.traced.static)]
        self._cache[self._with_floats(key, call.leaves)] = loaded
        return loaded

    def __repr__(self) -> str:
        return f"pjit({self._signature.name})"


def eval_shape(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The tree that fn(*args, **kwargs) would return, with a `ShapeDtype` in the place of each tensor. Nothing is
    computed, and nothing allocated.

    Arguments may be tensors, Arrays, `ShapeDtype`s and constants. A number that depends on an argument comes as its
    type. Raises what tracing raises, as `pjit` does.

    >>> import torch, vescale_fn as vf
    >>> vf.eval_shape(lambda k: {"w": vf.random.normal(k, (8192, 28672)), "depth": 80}, vf.random.key(0))
    {'w': ShapeDtype(shape=(8192, 28672), dtype=torch.float32, device='cpu'), 'depth': 80}
    """
    jitted = fn if isinstance(fn, Jitted) else pjit(fn)
    return jitted.eval_shape(*args, **kwargs)


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
    donate: Literal["reuse", "safe"] = "reuse",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    data_argnums: int | Sequence[int] | None = None,
    rules: Mapping[Any, str | UserRule] | None = None,
    compile: Literal["inductor"] | None = None,
    deterministic: bool = False,
    keep: Keep = "all",
    cache_dir: str | Path | None = None,
    audit: int = 0,
    **wrong: Any,
) -> Any:
    """Run a pure function of global values on a mesh. A decorator, a decorator factory, or a call.

    mesh: where to run; not needed when an argument is an Array.
    in_shardings: a tuple with a prefix tree of specs for each argument, a dict of them by parameter, or one spec or
        vf.rules for all. Unspecified inputs keep their own.
    out_shardings: a prefix tree of specs for the result. Unspecified outputs continue the argument that they are
        shaped like, else the solver chooses.
    donate_argnums: arguments whose storage may be reused; they are dead after the call.
    donate: "safe" keeps donated arguments until the call has succeeded, and so a second copy of them in memory.
    static_argnums, static_argnames: arguments that are constants of the program (hashable).
    data_argnums: arguments whose sharding decides first where two conflict; by default all but the first.
    rules: extra sharding rules by operation, see `register_rule`.
    compile: "inductor" compiles programs without collectives, see `Lowered.compile`.
    deterministic: the same bits on any number of processes.
    keep: what of the parameters that forward gathers is kept whole for backward, which gathers the rest again: "all",
        "none", or so many bytes on each rank.
    cache_dir: a folder that keeps plans as files, so that a step which was solved once is not solved again.
    audit: every so many calls, compare what ranks hold alike, bit for bit (see `audit`).

    >>> import torch, vescale_fn as vf
    >>> mesh = vf.make_mesh(dp=2)
    >>> double = vf.pjit(lambda x: (2 * x).sum())
    >>> float(double(vf.device_put(torch.ones(4), "b/dp", mesh)))
    8.0
    """
    name = getattr(fn, "__name__", "step")
    _check_options(name, wrong, donate, compile)
    if not (keep in ("all", "none") or (type(keep) is int and keep >= 0)):
        raise ValueError(errors.bad_option(name, "keep", keep, ["all", "none", "a number of bytes"]))
    folder = None if cache_dir is None else Path(cache_dir)
    options = Options(_entries(rules), donate == "safe", compile, deterministic, folder, audit, keep)

    def wrap(f: Callable[..., Any]) -> Jitted[..., Any]:
        signature = Signature.of(f, static_argnums, static_argnames, donate_argnums, data_argnums)
        return Jitted(f, signature, Shardings(mesh, in_shardings, out_shardings), options)

    return wrap if fn is None else wrap(fn)


def _entries(rules: Mapping[Any, str | UserRule] | None) -> Mapping[Any, Any]:
    if not rules:
        return {}
    from vescale_fn.register import entries  # with the tables of all operations, which lowering needs

    return entries(rules)


def _check_options(name: str, wrong: Mapping[str, Any], donate: str, compile: str | None) -> None:
    for keyword in wrong:
        if keyword in ("in_specs", "out_specs"):
            raise TypeError(errors.specs_in_pjit(name, keyword))
        known = [p for p in inspect.signature(pjit).parameters if p not in ("fn", "wrong")]
        raise TypeError(errors.unknown_keyword(name, keyword, known))
    if donate not in ("reuse", "safe"):
        raise ValueError(errors.bad_option(name, "donate", donate, ["reuse", "safe"]))
    if compile not in (None, "inductor"):
        raise ValueError(errors.bad_option(name, "compile", compile, [None, "inductor"]))
