"""Ambient randomness: inside `with scope(key):`, torch's own random functions draw from the key.

A scope watches the operations that reach the dispatcher, where forward, backward, transforms and fused kernels all
come by, and replaces those that torch says draw from a generator. It numbers its draws in the order of the program, so
the same function draws the same numbers inside pjit and outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from vescale_fn.array import Array
from vescale_fn.random import errors
from vescale_fn.random.ambient import draw_like
from vescale_fn.random.bits import random_bits
from vescale_fn.random.draws import checked, split_keys
from vescale_fn.random.source import Source
from vescale_fn.trace import Trace
from vescale_fn.tracing import current_trace

R = TypeVar("R")

AMBIENT = "ambient"  # the stream of these draws


def scope(key: Any) -> Scope:
    """Inside, `F.dropout`, `nn.Dropout`, attention with dropout, `torch.rand`, `randn`, `randint`, `randperm`,
    `bernoulli`, `multinomial`, `normal_` and their like draw from `key`, on any mesh the same.

    key: as for the other functions of vf.random; inside pjit usually an argument of the step. The n-th draw of a scope
        is a draw of its own, which shares no number with those made with the key itself. An inner scope takes the place
        of the outer one. Each iteration of `vf.scan` draws its own numbers, what `vf.call(remat=True)` computes again
        draws the same ones, and `torch.vmap(randomness=...)` decides whether the examples of a batch differ.
    Raises TypeError if the key is none.

    >>> import vescale_fn as vf
    >>> def step(key, x):
    ...     with vf.random.scope(key):
    ...         return torch.nn.functional.dropout(x, 0.5) + torch.rand(4)
    >>> key, x, mesh = vf.random.key(0), torch.ones(4), vf.make_mesh(dp=2)
    >>> torch.equal(vf.pjit(step, mesh=mesh, out_shardings="b/dp")(key, x).full(), step(key, x))
    True
    """
    return Scope(key)


class _ExplicitAttention(TorchFunctionMode):
    """Attention with dropout as products, a softmax and a dropout: fused kernels make masks of their own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and (args[4:5] or (kwargs.get("dropout_p", 0),))[0]:
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class Scope(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A key, and how many draws have been made with it."""

    def __init__(self, key: Any, count: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace: Trace | None = current_trace()
        key = checked("vf.random.scope", key)
        if self.trace is None and isinstance(key, Array):
            raise TypeError(errors.array_key(key))
        self.key = _plain(key if self.trace is None else self.trace.bring(key))
        self.count = count
        self._attention = _ExplicitAttention()

    def __enter__(self) -> Scope:
        self._attention.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._attention.__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch imports its compiler, which takes seconds, to keep it away from modes that do not say no."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if not draws or self.trace is not current_trace():  # a step that begins inside a scope needs one of its own
            return func(*args, **(kwargs or {}))
        return draw_like(func, args, kwargs or {}, self.next)

    def next(self) -> Source:
        """The next draw."""
        self.count += 1
        return Source(self.key, self.count - 1, AMBIENT)


def _plain(key: Tensor) -> Tensor:
    """The key below the wrappers of torch.func, which operations that reach the dispatcher have left behind."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(key):
        if functorch.is_batchedtensor(key):
            raise ValueError(errors.batched_key())
        key = functorch.get_unwrapped(key)
    return key


def current_scope() -> Scope | None:
    """The innermost scope that was opened in the trace under way, or outside of traces if none is."""
    trace = current_trace()
    scopes = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, Scope) and m.trace is trace]
    return scopes[-1] if scopes else None


# ---- sub-programs


def per_iteration(body: Callable[[Any, Any], R], xs: Any, length: int) -> tuple[Callable[[Any, Any], R], Any]:
    """The body of a loop, and what it iterates over, such that each iteration has a scope with a key of its own.
    Without a scope around the loop they stay as they are."""
    around = current_scope()
    if around is None:
        return body, xs
    draw = around.next()

    @functools.wraps(body)
    def with_key(carry: Any, x: Any) -> R:
        key, rest = x
        with Scope(key):
            return body(carry, rest)

    return with_key, (split_keys(draw.key, length, draw.draw, "loop"), xs)


def resumed(fn: Callable[..., R]) -> Callable[..., R]:
    """A function that draws what it would draw if it were called here, whenever it runs and however often: it becomes
    a sub-program, and is traced again for each derivative."""
    around = current_scope()
    if around is None:
        return fn
    start = around.count

    @functools.wraps(fn)
    def from_here(*args: Any, **kwargs: Any) -> R:
        with Scope(around.key, start) as inner:
            result = fn(*args, **kwargs)
        around.count = max(around.count, inner.count)
        return result

    return from_here


# ---- replays


class _Replay(Scope):  # type: ignore[no-untyped-call]
    """Numbers of a form in place of `torch.randint`, in the shape that torch.vmap has given it."""

    def __init__(self, key: Any, draw: int, form: str, dtype: torch.dtype) -> None:
        super().__init__(key, draw)
        self.how = form, dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.randint.default:
            return self.next().numbers(args[1], *self.how)
        return func(*args, **(kwargs or {}))


def again(key: Tensor, draw: int, shape: Sequence[int], stream: str, form: str, dtype: torch.dtype) -> Any:
    """The numbers of a recorded draw, in a program that is transformed again. Whether the examples of torch.vmap differ
    in what a scope draws is for `randomness=` to say, so an operation of torch that draws asks it."""
    if stream != AMBIENT:
        return random_bits(key, draw, shape, stream, form, dtype)
    with _Replay(key, draw, form, dtype):
        return torch.randint(2, tuple(shape), dtype=dtype)
