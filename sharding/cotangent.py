"""Where the gradient of a value lives."""

from __future__ import annotations

from dataclasses import replace

from vescale_fn.sharding.grammar import parse

_COTANGENT = {"sum": "ct", "ct": "sum", "at": "at"}  # partial sums and their gradients; max and min have none


def cotangent_spec(spec: str) -> str:
    """Where the gradient of a value lives: where the value does, except that it is whole where the value is partial.

    >>> cotangent_spec("b/dp d {sum: tp}")
    'b/dp d {ct: tp}'
    """
    parsed = parse(spec)
    state = tuple(replace(e, kind=_COTANGENT[e.kind]) for e in parsed.state if e.kind in _COTANGENT)
    return str(replace(parsed, state=state))
