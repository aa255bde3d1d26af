"""Operations that are there for what they do, not for a result: they print.

An equation without results is kept by everything that drops dead code, runs once in a step even where its operands are
computed again for backward, and stays in order with others of its kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import product
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("vescale_fn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("debug_print(Tensor[] values, str text, int batch_dims, bool per_rank) -> ()")

_silent: ContextVar[bool] = ContextVar("vescale_fn_silent", default=False)


def show(values: Sequence[Tensor], text: str, batch_dims: int, before: str = "") -> None:
    """Print `text`, with `{0}`, `{1}`, ... standing for values: once for each index of their first `batch_dims` dims,
    in one piece. Tensors that are only described have nothing to show.

    >>> show([torch.tensor([1.0, 2.0])], "x is {0:.1f}", 1, "rank 0: ")
    rank 0: x is 1.0
    rank 0: x is 2.0
    """
    if any(hasattr(v, "fake_mode") for v in values):
        return
    indices = product(*(range(n) for n in values[0].shape[:batch_dims]))
    lines = [before + text.format(*(v[index] for v in values)) for index in indices]
    if lines:
        print("\n".join(lines), flush=True)


def _show(values: Sequence[Tensor], text: str, batch_dims: int, per_rank: bool) -> None:
    show(values, text, batch_dims)


def _batched(
    info: Any, in_dims: Any, values: Sequence[Tensor], text: str, batch_dims: int, per_rank: bool
) -> tuple[None, None]:
    """Under vmap: printed for each element of the batch."""
    n = info.batch_size
    moved = [v.expand(n, *v.shape) if d is None else v.movedim(d, 0) for v, d in zip(values, in_dims[0])]
    DEBUG_PRINT(moved, text, batch_dims + 1, per_rank)
    return None, None


_LIBRARY.impl("debug_print", _show, "CompositeExplicitAutograd")
_LIBRARY.impl("debug_print", torch.library.fallthrough_kernel, "Autograd")  # it has no derivative
torch.library.register_fake("vescale_fn::debug_print", lambda *_: None, lib=_LIBRARY)
torch.library.register_vmap("vescale_fn::debug_print", _batched, lib=_LIBRARY)

DEBUG_PRINT = torch.ops.vescale_fn.debug_print.default
EFFECTS = frozenset({DEBUG_PRINT})


def is_silent() -> bool:
    """Whether a function is being traced for the second time, whose effects the step has already."""
    return _silent.get()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Inside, functions are traced without their effects."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)
