"""Rules that users add for operations that have none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vescale_fn.sharding.rules.registry import Entry, form

# The one registry of the process: what a user registers holds for every step lowered afterwards.
_REGISTERED: dict[Any, Entry] = {}


def register_rule(op: Any, rule: str, *, linear: Iterable[Iterable[int]] = ()) -> None:
    """Say how an operation's result dims come from its operands' dims.

    op: an OpOverload such as `torch.ops.mylib.myop.default`, or a packet for all its overloads.
    rule: a line of rule notation. The same letter is the same dim; `!d` must be whole; a letter missing on the right
        is summed.
    linear: groups of operands in which the operation is linear, so that partial sums pass.

    >>> import torch
    >>> register_rule(torch.ops.aten.cummax.default, "b !d -> b !d, b !d")
    """
    entry = form(rule, linear=list(linear))
    overloads = [getattr(op, n) for n in op.overloads()] if isinstance(op, torch._ops.OpOverloadPacket) else [op]
    _REGISTERED.update(dict.fromkeys(overloads, entry))


def registered_rules() -> Mapping[Any, Entry]:
    """What has been registered so far."""
    return dict(_REGISTERED)
