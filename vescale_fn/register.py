"""Rules that users add for operations that have none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn import errors
from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.notation import parse_pattern
from vescale_fn.sharding.rules.registry import Entry, parse_rule
from vescale_fn.sharding.rules.rule import Rule


@dataclass(frozen=True)
class UserRule:
    """A rule as the user wrote it; makes the rule of an equation. Its repr is part of the key of plan files."""

    text: str
    linear: tuple[tuple[int | str, ...], ...] = ()

    def __call__(self, eqn: Eqn) -> Rule:
        return parse_rule(self.text, eqn, linear=self.linear)


# The one registry of the process: what a user registers holds for every step lowered afterwards.
_REGISTERED: dict[Any, Entry] = {}


def register_rule(op: Any, rule: str, *, linear: Iterable[Iterable[int | str]] = ()) -> None:
    """Say how an operation's result dims come from its operands' dims.

    op: an OpOverload such as `torch.ops.mylib.myop.default`, or a packet for all its overloads.
    rule: a line of rule notation. The same letter is the same dim; `!d` must be whole; a letter missing on the right
        is summed.
    linear: groups of operand slots in which the operation is linear, so that partial sums pass.
    Raises TypeError for what is no operation, RuleError for a malformed rule.

    >>> import torch
    >>> register_rule(torch.ops.aten.cummax.default, "b !d -> b !d, b !d")
    """
    _REGISTERED.update(entries({op: UserRule(rule, tuple(map(tuple, linear)))}))


def registered_rules() -> Mapping[Any, Entry]:
    """What has been registered so far."""
    return dict(_REGISTERED)


def entries(rules: Mapping[Any, str | UserRule]) -> dict[Any, Entry]:
    """Rules by overload, for rules by overload or packet."""
    found: dict[Any, Entry] = {}
    for op, given in rules.items():
        if not isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            raise TypeError(errors.not_an_operation(op))
        rule = UserRule(given) if isinstance(given, str) else given
        parse_pattern(rule.text)  # a malformed rule is an error where it is written
        names = [] if isinstance(op, torch._ops.OpOverload) else op.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(op, n) for n in names] or [op]
        found.update(dict.fromkeys(overloads, rule))
    return found
