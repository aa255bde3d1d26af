"""`debug`: steps that watch their own values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from vescale_fn.tracing import current_trace


@dataclass(frozen=True)
class Debug:
    """What steps watch for. infs: infinities too, not NaN only."""

    infs: bool


_current: ContextVar[Debug | None] = ContextVar("vescale_fn_debug", default=None)


def current_debug() -> Debug | None:
    """What the steps called here watch for, if anything."""
    return _current.get()


@contextlib.contextmanager
def debug(*, nans: bool = True, infs: bool = True) -> Iterator[None]:
    """Inside, a pjit-ted step stops at the first operation that makes a NaN or an infinity out of finite numbers, with
    a NonFiniteError that names the rank, the user's line, the phase, and the ranges of the operands; and before it
    starts, at an argument that holds a NaN. Around calls, or a decorator of a function that makes them.

    nans: False switches the watch off again.
    infs: False watches for NaN only, for steps in which infinities are meant. A number that the step writes itself
        (`masked_fill(mask, -inf)`) is always meant.
    A step is lowered anew for it, writes nothing in place, and reads every value once more; donated arguments survive
    an error. Raises RuntimeError inside a step, whose program is made already.

    >>> import torch, vescale_fn as vf
    >>> x = vf.device_put(torch.tensor([1.0, -1.0]), "d/dp", vf.make_mesh(dp=2))
    >>> try:
    ...     with vf.debug(nans=True):
    ...         vf.pjit(lambda x: x.log().sum())(x)
    ... except vf.NonFiniteError as error:
    ...     print(str(error).partition(", on")[0])
    <lambda>: aten.log makes 1 NaN of 2 values from operands without NaN
    """
    if current_trace() is not None:
        raise RuntimeError(
            "vf.debug stands inside a step, which is traced once and runs without it. Put it around the call of the "
            "step: with vf.debug(nans=True): step(state, batch)."
        )
    token = _current.set(Debug(infs) if nans else None)
    try:
        yield
    finally:
        _current.reset(token)
