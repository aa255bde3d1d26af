"""Ambient settings under which a function was called, to call it again under the same ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

AutocastState = dict[str, tuple[bool, torch.dtype]]
NO_AUTOCAST: AutocastState = {"cpu": (False, torch.bfloat16), "cuda": (False, torch.float16)}


def autocast_state() -> AutocastState:
    """For each device type, whether autocast is on, and to what dtype."""
    return {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in NO_AUTOCAST}


@contextlib.contextmanager
def autocast(state: AutocastState) -> Iterator[None]:
    """Inside, autocast is as in `state`."""
    with contextlib.ExitStack() as stack:
        for device, now in autocast_state().items():
            enabled, dtype = state[device]
            if state[device] != now and (enabled or now[0]):
                stack.enter_context(torch.autocast(device, dtype, enabled))
        yield
