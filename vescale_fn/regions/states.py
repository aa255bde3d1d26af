"""The four states of a value along a manual axis, and how they combine.

| state            | ranks hold                                              | cotangent |
|------------------|---------------------------------------------------------|-----------|
| V, varying       | different values                                        | V         |
| I, invarying     | the same value                                          | I         |
| U, unreduced     | parts of a sum                                          | R         |
| R, reduced       | the same value, whose gradient arrives as parts of a sum | U         |

They are those of JAX's `shard_map` (varying manual axes, unreduced and reduced). A fifth, "?", marks what nobody
checks: values of a region with `check_vma=False`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Literal

from vescale_fn.sharding.mesh import axes_text

State = Literal["V", "I", "U", "R", "?"]
States = Mapping[str, State]  # by manual axis

V: Final = "V"
I: Final = "I"  # noqa: E741 - the field's name
U: Final = "U"
R: Final = "R"
UNCHECKED: Final = "?"

NAMES: Mapping[State, str] = MappingProxyType(
    {V: "varying", I: "invarying", U: "unreduced", R: "reduced", UNCHECKED: "unchecked"}
)
COTANGENT: Mapping[State, State] = MappingProxyType({V: V, I: I, U: R, R: U, UNCHECKED: UNCHECKED})

# What an operation makes of operands that are not unreduced: the last of their states in this order. The steps are
# casts, free in the value, that gradients must know of.
_ORDER: Final = (I, R, V, UNCHECKED)


def state_named(name: str) -> State | None:
    """The state of a name, `varying` or `V`."""
    for state, word in NAMES.items():
        if name in (state, word) and state != UNCHECKED:
            return state
    return None


def join(states: Iterable[State]) -> State:
    """The state of what is computed from values in these states, none of which is unreduced.

    >>> join(["I", "R"]), join(["I", "V"]), join([])
    ('R', 'V', 'I')
    """
    return max(states, key=_ORDER.index, default=I)


def states_text(states: States) -> str:
    """`{V: dp, U: tp}`; what is invarying is left out.

    >>> states_text({"dp": "V", "tp": "I"})
    '{V: dp}'
    """
    by_state: dict[State, list[str]] = {}
    for axis, state in states.items():
        if state != I:
            by_state.setdefault(state, []).append(axis)
    entries = [f"{s}: {axes_text(axes)}" for s, axes in by_state.items()]
    return "{" + ", ".join(entries) + "}" if by_state else ""
