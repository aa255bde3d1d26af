"""Which outputs continue which arguments."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_fn.continuation import Leaves, OutputLeaf, continued
from vescale_fn.tree import flatten_with_paths, map_leaves

F = torch.float32


def out(tree: Any) -> Any:
    """A tree of OutputLeafs from a tree of shapes; None stands for what is no tensor."""
    return map_leaves(lambda n: OutputLeaf(None if n is None else ((n,), F)), tree)


def argument(tree: Any) -> Leaves:
    paths, leaves, _ = flatten_with_paths(tree)
    return [(p, None if n is None else ((n,), F)) for p, n in zip(paths, leaves)]


def test_a_state_continues_whole() -> None:
    state = {"w": 3, "m": [4, 5]}
    assert continued(out((state, 1)), [argument(state)]) == {0: (0, 0), 1: (0, 1), 2: (0, 2)}


def test_the_largest_subtree_counts() -> None:
    inner = {"w": 3}
    assert continued(
        out({"a": inner, "b": {"s": inner, "n": 1}}), [argument(inner), argument({"s": inner, "n": 1})]
    ) == {
        0: (0, 0),
        1: (1, 0),
        2: (1, 1),
    }


def test_in_order_and_each_once_before_twice() -> None:
    assert continued(out((3, 3, 3)), [argument(3), argument(3)]) == {0: (0, 0), 1: (1, 0), 2: (0, 0)}


def test_order_of_keys_does_not_matter() -> None:
    assert continued(out({"b": 2, "a": 1}), [argument({"a": 1, "b": 2})]) == {0: (0, 1), 1: (0, 0)}


def test_shapes_dtypes_and_paths_do() -> None:
    for other in ({"w": 4}, {"v": 3}, {"w": 3, "v": 3}, [3], {"w": None}):
        assert continued(out({"w": 3}), [argument(other)]) == {}
    assert continued(OutputLeaf(((3,), torch.float64)), [argument(3)]) == {}


def test_what_is_no_tensor_continues_only_along_with_tensors() -> None:
    assert continued(out((None, {"n": None})), [argument(None), argument({"n": None})]) == {}
    assert continued(out({"w": 3, "n": None}), [argument({"w": 3, "n": None})]) == {0: (0, 0), 1: (0, 1)}


trees = st.recursive(
    st.sampled_from([None, 1, 2]),
    lambda t: st.lists(t, max_size=3) | st.dictionaries(st.sampled_from("abc"), t, max_size=3),
    max_leaves=8,
)


@given(trees, st.lists(trees, max_size=3))
def test_pairs_have_equal_types(tree: Any, arguments: list[Any]) -> None:
    given_leaves = [argument(a) for a in arguments]
    found = continued(out(tree), given_leaves)
    mine = argument(tree)
    for o, (a, k) in found.items():
        assert mine[o][1] == given_leaves[a][k][1]
        assert mine[o][0].endswith(given_leaves[a][k][0])
    for i, a in enumerate(given_leaves):  # all of an argument, or nothing
        assert len([o for o, (j, _) in found.items() if j == i]) % max(len(a), 1) == 0
