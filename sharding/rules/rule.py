"""Factor rules: how the dims of an operation's results come from the dims of its operands.

Notation, one token per dim: the same letter is the same factor; a letter missing on the right is reduced there (the
result is partial on an axis that shards it); `!d` must be whole on every rank; `1` is a dim of size one or one that
is broadcast; `(a b)` is a dim made of two factors, major first; `...` stands for the leading dims that all
operands share. A letter only on the right is created (each rank makes its own part).

    mm          "m k, k n -> m n"
    softmax     "... !d -> ... !d"
    view        "(b t) d -> b t d"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vescale_fn.sharding.layout import Kind

Dims = tuple[tuple[str, ...], ...]  # per dim: its factors' letters, major first; () for a dim of size one

Merges = Literal["never", "alike", "freely"]
ALL_KINDS = "any"  # in `Rule.through`: partial sums, maxima and minima all pass


@dataclass(frozen=True)
class Rule:
    """A rule bound to the shapes of one equation.

    operands, results: one entry per tensor operand slot (as `Eqn.operands`) and per result.
    sizes: global size of each letter.
    whole: letters that must not be sharded.
    linear: groups of operand slots. If all operands of one group are partial sums (and the others whole), the
        results are partial sums. mul is ({0}, {1}): linear in each alone; add is ({0, 1},): linear in both together;
        zeros is ({},): nothing is asked, its result already is a partial sum.
    through: operand slots through which partial values of any kind pass unchanged (views, clones, slices).
    reduces: how a letter missing from a result is pending there; "sum" when not named.
    masked: letters whose operand holds indices into it, or whose global position matters: partition rewrites the
        local operation (offset and mask).
    apart: results depend only on operands with which they share letters, or which have none: a result without letters
        is no reduction of anything.
    merges: whether dims that a Ragged state merges may be one dim of the local tensors. "alike": where the same dims
        of all tensors are, because the operation does not care where one ends and the next begins; "freely": of a view.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    through: frozenset[int] = frozenset()
    reduces: Mapping[str, Kind] = field(default_factory=dict)
    masked: frozenset[str] = frozenset()
    apart: bool = False
    merges: Merges = "never"

    def __str__(self) -> str:
        def dims(ds: Dims) -> str:
            marked = [[("!" if x in self.whole else "") + x for x in d] for d in ds]
            return " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in marked)

        return f"{', '.join(map(dims, self.operands))} -> {', '.join(map(dims, self.results))}"
