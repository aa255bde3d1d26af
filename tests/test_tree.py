"""Pytrees: leaves in the order of torch's own pytree, dotted paths, dataclasses, prefix trees."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import OrderedDict, namedtuple
from typing import Annotated, Any

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given
from hypothesis import strategies as st

from vescale_fn.tree import (
    broadcast_prefix,
    children,
    flatten,
    flatten_with_paths,
    is_leaf,
    map_leaves,
    pytree,
    specs_of,
    unflatten,
)

Point = namedtuple("Point", "x y")


@pytree
class Block:
    w: "d f/tp"  # noqa: F722
    b: Annotated[Any, "f/tp"]
    heads: int = dataclasses.field(default=1, metadata={"static": True})
    scale: Any = None


@pytree
class Model:
    wte: "v/tp d"  # noqa: F722
    block: Block
    rest: Any


@pytree
class Tower:
    blocks: list[Block]


TREES = st.recursive(
    st.one_of(st.integers(), st.none(), st.text(max_size=2)),
    lambda t: st.one_of(
        st.lists(t, max_size=3),
        st.tuples(t, t),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), t, max_size=3),
        st.builds(Point, t, t),
        st.builds(Block, t, t, st.integers(), t),
    ),
    max_leaves=8,
)


@given(TREES)
def test_round_trip_and_agreement_with_torch(tree: Any) -> None:
    leaves, treedef = flatten(tree)
    assert unflatten(treedef, leaves) == tree
    assert leaves == torch_pytree.tree_leaves(tree)
    paths, again, same = flatten_with_paths(tree)
    assert (again, same) == (leaves, treedef)
    assert len(paths) == len(leaves)
    assert hash(same) == hash(treedef)


@given(TREES)
def test_children_are_the_direct_subtrees(tree: Any) -> None:
    if is_leaf(tree):
        assert children(tree) == []
    else:
        assert [x for c in children(tree) for x in flatten(c)[0]] == flatten(tree)[0]


def test_dicts_keep_insertion_order() -> None:
    assert flatten({"b": 1, "a": 2})[0] == [1, 2]
    assert list(map_leaves(str, {"b": 1, "a": 2})) == ["b", "a"]


def test_paths() -> None:
    tree = {"params": {"blocks": [Block(1, 2, 4, Point(3, None))], 0: OrderedDict(k=4)}}
    assert flatten_with_paths(tree)[0] == [
        "params.blocks.0.w",
        "params.blocks.0.b",
        "params.blocks.0.scale.x",
        "params.blocks.0.scale.y",
        "params.0.k",
    ]
    assert flatten_with_paths(7)[0] == [""]
    assert flatten_with_paths({})[0] == []


def test_static_fields_belong_to_the_treedef() -> None:
    assert flatten(Block(1, 2, heads=4))[1] != flatten(Block(1, 2, heads=8))[1]
    assert flatten(Block(1, 2, heads=4))[1] == flatten(Block(3, 4, heads=4))[1]
    assert map_leaves(lambda x: 0, Block(1, 2, heads=4)) == Block(0, 0, 4, 0)


def test_an_own_dataclass_is_kept_and_unflattening_does_not_call_init() -> None:
    @pytree
    @dataclasses.dataclass
    class Checked:
        x: Any

        def __post_init__(self) -> None:
            assert isinstance(self.x, int)

    assert map_leaves(str, Checked(1)).x == "1"
    Checked(1).x = 2  # not frozen


def test_specs_of_annotations() -> None:
    model = Model(0, Block(1, 2, heads=4), [3])
    assert specs_of(model) == Model("v/tp d", Block("d f/tp", "f/tp", 4, None), [None])
    assert specs_of(Model) == Model("v/tp d", Block("d f/tp", "f/tp", None, None), None)
    assert specs_of(Tower([Block(1, 2)])).blocks[0].w == "d f/tp"
    with pytest.raises(TypeError) as e:
        specs_of(Tower)
    assert str(e.value) == "specs_of: Tower.blocks holds several nodes; pass a tree instead of the class."


def test_specs_of_a_module_with_evaluated_annotations() -> None:
    module = types.ModuleType("evaluated_annotations")
    sys.modules[module.__name__] = module
    source = """
from typing import Any
from vescale_fn.tree import pytree
@pytree
class Block:
    w: "d f/tp"
    b: "f"
    n: "int"
    other: Any
@pytree
class Model:
    block: "Block"
    head: Block
"""
    try:
        exec(compile(source, "evaluated_annotations", "exec", dont_inherit=True), vars(module))
        found = specs_of(module.Model)
    finally:
        del sys.modules[module.__name__]
    assert flatten(found)[0] == ["d f/tp", "f", None, None] * 2


def test_transforms_of_torch_take_dataclasses_apart() -> None:
    block = Block(torch.tensor(2.0), torch.tensor(3.0), heads=5, scale=torch.tensor(1.0))
    grads = torch.func.grad(lambda b: b.w * b.w * b.b * b.heads * b.scale)(block)
    assert isinstance(grads, Block)
    assert (float(grads.w), float(grads.b), grads.heads) == (60.0, 20.0, 5)


def test_prefixes() -> None:
    tree = {"a": (1, [2, 3]), "b": Block(4, 5), "c": None}
    assert broadcast_prefix(None, tree) == [None] * 7
    assert broadcast_prefix("s", tree) == ["s"] * 7
    assert broadcast_prefix({"c": "z", "b": Block("w", "b", 1, "s"), "a": ["x", ("y0", "y1")]}, tree) == [
        "x",
        "y0",
        "y1",
        "w",
        "b",
        "s",
        "z",
    ]
    assert broadcast_prefix(["x", "y"], ([], [1]), stands_whole=lambda p: p == "y") == ["y"]


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (
            {"a": {"x": "s"}},
            "The specs at 'a' say nothing about y, but the tree has x, y. Specs form a prefix of the tree.",
        ),
        (
            {"a": {"x": "s", "y": "s", "z": "s"}},
            "The specs at 'a' name z, which the tree does not have, but the tree has x, y. Specs form a prefix of the "
            "tree.",
        ),
        (
            {"a": ["s", "s"]},
            "The specs at 'a' are a list or tuple, but the tree has a dict there. Specs form a prefix of the tree.",
        ),
        (
            {"a": {"x": {"deep": "s"}, "y": "s"}},
            "The specs at 'a.x' are a dict, but the tree has a leaf (int) there. Specs form a prefix of the tree.",
        ),
    ],
)
def test_specs_that_are_no_prefix(prefix: Any, message: str) -> None:
    with pytest.raises(ValueError) as e:
        broadcast_prefix(prefix, {"a": {"x": 1, "y": 2}})
    assert str(e.value) == message
