"""Which outputs continue which arguments: `return new_state, metrics` keeps the layouts of `state`.

An output subtree continues an argument when the paths of their leaves, and their shapes and dtypes, are equal: the
order of dict keys does not matter. Donated arguments are tried first, then the others in order, those that nothing
continues yet before the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fn.tree import children, flatten, flatten_with_paths

Aval = tuple[tuple[int, ...], Any]  # shape and dtype
Leaves = Sequence[tuple[str, Aval | None]]  # path below the argument, and type, None where a leaf is no tensor


@dataclass(frozen=True)
class OutputLeaf:
    """A leaf of the output; `aval` is None when it is no tensor."""

    aval: Aval | None


def continued(out: Any, arguments: Sequence[Leaves]) -> dict[int, tuple[int, int]]:
    """Output leaf -> (argument, leaf of that argument) that it continues.

    out: the output pytree, with an OutputLeaf at each leaf.
    arguments: their leaves, in the order in which they are tried.
    """
    found: dict[int, tuple[int, int]] = {}
    positions = [{path: k for k, (path, _) in enumerate(leaves)} for leaves in arguments]
    types = [dict(leaves) for leaves in arguments]
    order = list(range(len(arguments)))  # those already continued move to the end
    for start, subtree in _subtrees(out, 0):
        if start in found:
            continue
        paths, leaves, _ = flatten_with_paths(subtree)
        avals = {path: leaf.aval for path, leaf in zip(paths, leaves)}
        if not any(avals.values()):
            continue
        match = next((i for i in order if types[i] == avals), None)
        if match is not None:
            found.update({start + k: (match, positions[match][path]) for k, path in enumerate(paths)})
            order.remove(match)
            order.append(match)
    return found


def _subtrees(tree: Any, start: int) -> Iterator[tuple[int, Any]]:
    """Every subtree with the index of its first leaf, larger ones first."""
    yield start, tree
    for child in children(tree):
        yield from _subtrees(child, start)
        start += len(flatten(child)[0])
