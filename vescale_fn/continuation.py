"""Which outputs continue which arguments: `return new_state, metrics` keeps the layouts of `state`.

An output subtree continues an argument when treedef, shapes and dtypes are equal: donated arguments are tried first,
then the others in order, those that nothing continues yet before the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fn.tree import children, flatten

Aval = tuple[tuple[int, ...], Any]  # shape and dtype


@dataclass(frozen=True)
class OutputLeaf:
    """A leaf of the output; `aval` is None when it is no tensor."""

    aval: Aval | None


def continued(out: Any, arguments: Sequence[tuple[Any, Sequence[Aval | None]]]) -> dict[int, tuple[int, int]]:
    """Output leaf -> (argument, leaf of that argument) that it continues.

    out: the output pytree, with an OutputLeaf at each leaf.
    arguments: treedef and leaf avals, in the order in which they are tried.
    """
    found: dict[int, tuple[int, int]] = {}
    order = list(range(len(arguments)))  # those already continued move to the end
    for start, subtree in _subtrees(out, 0):
        if start in found:
            continue
        leaves, treedef = flatten(subtree)
        avals = [x.aval for x in leaves]
        if not any(avals):
            continue
        match = next((i for i in order if arguments[i] == (treedef, avals)), None)
        if match is not None:
            found.update({start + k: (match, k) for k in range(len(leaves))})
            order.remove(match)
            order.append(match)
    return found


def _subtrees(tree: Any, start: int) -> Iterator[tuple[int, Any]]:
    """Every subtree with the index of its first leaf, larger ones first."""
    yield start, tree
    for child in children(tree):
        yield from _subtrees(child, start)
        start += len(flatten(child)[0])
