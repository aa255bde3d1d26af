"""Random numbers addressed by key and global position: each rank draws its own part."""

from __future__ import annotations

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import parse_rule
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.rules.view import letters


def drawn(eqn: Eqn) -> Rule:
    """The rule of `draw(key, ...)`, whose result has the dims of a batch of keys, then its own. Every rank needs both
    words of a key, and a position is global."""
    (key,), (out,) = eqn.operands, eqn.outs
    dims = letters(len(out.shape))
    batch, own = dims[: len(key.shape) - 1], dims[len(key.shape) - 1 :]
    return parse_rule(f"{' '.join(batch)} !word -> {' '.join(dims)}", eqn, masked=own)


def folded(eqn: Eqn) -> Rule:
    """The rule of `fold(keys, numbers)`: a number for each key."""
    batch = " ".join(letters(len(eqn.outs[0].shape) - 1))
    return parse_rule(f"{batch} !word, {batch} -> {batch} !word", eqn)
