"""Shardings of single tensors, rules by path, and the layouts that specs give to a tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vescale_fn.mesh import abstract_mesh, make_mesh
from vescale_fn.sharding.bind import bind
from vescale_fn.sharding.forms import P, S
from vescale_fn.sharding.spec import SpecError
from vescale_fn.shardings import NamedSharding, Rules, layouts_for, rules

MESH = make_mesh(dp=2, tp=4)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


PARAMS = {
    "wte": empty(16, 8),
    "blocks": [{"w_qkv": empty(8, 48), "w_o": empty(16, 8), "ln": empty(8)} for _ in range(3)],
    "step": empty(),
}
RULES = rules({"wte": "v/tp d", "*.w_qkv": "d (qkv h/tp k)", "*.w_o": "(h/tp k) d", "*": "..."}, qkv=3, h=4)


# ---- NamedSharding


def test_a_sharding_of_a_tensor() -> None:
    sharding = NamedSharding(MESH, "b/dp (h/tp k)", h=4)
    assert sharding.layout((4, 8)) == bind("b/dp (h/tp k)", (4, 8), MESH.shape, h=4)
    assert sharding.shard_shape((4, 8)) == (2, 2)
    assert sharding.indices((4, 8))[5] == (slice(2, 4), slice(2, 4))
    assert repr(sharding) == "NamedSharding(dp=2,tp=4: 'b/dp (h=4/tp k)')"


def test_indices_of_strided_uneven_and_flat_shards() -> None:
    assert NamedSharding(MESH, "(3 h/tp)").indices((12,))[1] == ((slice(1, 2), slice(5, 6), slice(9, 10)),)
    assert NamedSharding(MESH, "b~/tp").indices((5,))[3] == (slice(5, 5),)
    assert NamedSharding(MESH, "b/tp").indices((0,))[3] == (slice(0, 0),)
    assert NamedSharding(MESH, "(a b)~[1 2]/dp").indices((3, 4))[4] == (slice(4, 12),)


def test_equality_is_meaning_not_names() -> None:
    same = ["b/dp t", "x/dp y", "b/dp", "b/dp ...", P("dp"), S("b/dp (h k)", h=4)]
    assert len({NamedSharding(MESH, s) for s in same}) == 1
    other = ["b t/dp", "b/tp", "b/(dp tp)", "b~/dp", "b/dp {sum: tp}", "(2 b/dp)", "(3 b/dp)", "... b/dp"]
    assert len({NamedSharding(MESH, s) for s in [*other, same[0]]}) == len(other) + 1
    assert NamedSharding(MESH, "b/dp") != NamedSharding(make_mesh(dp=2), "b/dp")


def test_equivalence_for_a_shape() -> None:
    a, b = NamedSharding(MESH, "b~/dp"), NamedSharding(MESH, "b/dp")
    assert a != b
    assert a.is_equivalent_to(b, (4,))
    assert NamedSharding(MESH, "d~[3 3]/dp").is_equivalent_to(b, (6,))
    assert not a.is_equivalent_to(NamedSharding(MESH, "b"), (4,))


# ---- rules


def test_the_first_rule_that_matches_the_end_of_the_path_wins() -> None:
    specs = RULES.specs(PARAMS)
    assert specs == ["v/tp d", *["d (qkv h/tp k)", "(h/tp k) d", "..."] * 3, ""]
    assert rules({"ln": "d", "w_*": "a/tp b", "params.wte": "c d", "*": "..."}).specs({"params": PARAMS})[0] == "c d"


def test_globs_match_whole_steps_of_a_path() -> None:
    assert rules({"w": "a/tp", "*": "..."}).specs({"xw": empty(4), "a": {"w": empty(4)}}) == ["...", "a/tp"]


def test_rules_of_optimizer_state_match_its_moments_too() -> None:
    assert RULES.specs({"exp_avg": PARAMS, "step": empty()})[0] == "v/tp d"


def test_a_rule_that_matches_nothing() -> None:
    with pytest.raises(ValueError) as e:
        rules({"wtx": "v/tp d", "*": "..."}).specs(PARAMS)
    assert str(e.value) == (
        "rules: 'wtx' matches no leaf. The leaves are: 'wte', 'blocks.0.w_qkv', 'blocks.0.w_o', 'blocks.0.ln', "
        "'blocks.1.w_qkv' and 6 more."
    )


def test_a_leaf_that_no_rule_matches() -> None:
    with pytest.raises(ValueError) as e:
        rules({"wte": "v/tp d", "ln": "d"}).specs(PARAMS)
    assert str(e.value) == (
        "rules: no rule matches 'blocks.0.w_qkv', 'blocks.0.w_o', 'blocks.1.w_qkv', 'blocks.1.w_o', 'blocks.2.w_qkv' "
        "and 1 more. Add rules for them, or end with '*': '...', which keeps the rest whole."
    )


def test_a_malformed_rule_is_an_error_where_it_is_written() -> None:
    with pytest.raises(SpecError, match="Several axes on one dim"):
        rules({"w": "b/dp/tp"})


def test_the_table() -> None:
    tree = {"wte": torch.empty(2**19, 8, device="meta"), "step": empty()}
    lines = rules({"wte": "v/tp d"}).table(tree, MESH).splitlines()
    assert [x.split() for x in lines] == [
        ["path", "shape", "spec", "MiB", "per", "rank"],
        ["wte", "[524288,", "8]", "'v/tp", "d'", "4.00"],
        ["step", "[]", "''", "0.00"],
    ]
    assert len({len(x) for x in lines}) == 1


def test_rules_are_values() -> None:
    assert rules({"a": "b/dp"}, h=2) == rules({"a": "b/dp"}, h=2)
    assert isinstance(hash(rules({"a": "b~u/dp"}, u=[1, 2])), int)
    assert isinstance(RULES, Rules)


# ---- layouts of trees


def test_layouts_of_a_tree() -> None:
    tree = {"w": empty(8, 4), "b": empty(4), "flag": None, "n": 3}
    placed = layouts_for({"w": P("dp"), "b": "f/tp", "flag": None, "n": "..."}, tree, MESH)
    assert [layout for layout, _ in placed] == [
        bind("a/dp b", (8, 4), MESH.shape),
        bind("f/tp", (4,), MESH.shape),
        bind("", (), MESH.shape),
        bind("", (), MESH.shape),
    ]
    assert [str(spec) for _, spec in placed] == ["a/dp ...", "f/tp", "None", "None"]


def test_specs_come_back_with_their_sizes() -> None:
    placed = layouts_for(RULES, PARAMS, MESH)
    assert str(placed[1][1]) == "d (qkv=3 h=4/tp k)"
    assert placed[1][0] == bind("d (3 h/tp)", (8, 48), MESH.shape)
    assert placed[-1][0].is_whole
    ((_, spec),) = layouts_for("(h/tp k)", empty(24), MESH, h=4)
    assert str(spec) == "(h=4/tp k)"


@pytest.mark.parametrize(
    "specs",
    [
        {"params": RULES, "opt": {"m": RULES, "v": RULES}},
        {"params": RULES, "opt": RULES},
        RULES,
    ],
)
def test_rules_stand_for_subtrees(specs: Any) -> None:
    tree = {"params": PARAMS, "opt": {"m": PARAMS, "v": PARAMS}}
    assert [str(s) for _, s in layouts_for(specs, tree, MESH)] == [
        str(s) for _, s in layouts_for(RULES, PARAMS, MESH)
    ] * 3


def test_a_named_sharding_stands_for_a_subtree() -> None:
    sharding = NamedSharding(MESH, "(h/tp k) ...", h=4)
    placed = layouts_for((sharding, None), ([empty(16), empty(8, 3)], empty(2)), MESH)
    assert [str(s) for _, s in placed] == ["(h=4/tp k) ...", "(h=4/tp k) ...", "None"]
    with pytest.raises(ValueError) as e:
        layouts_for(sharding, empty(16), abstract_mesh(tp=4), what="step")
    assert str(e.value) == (
        "step: the tensor: NamedSharding(dp=2,tp=4: '(h=4/tp k) ...') is on another mesh than the one in use, tp=4."
    )


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            {"w": "b/dp t/tp", "b": None},
            "device_put: w: Dim 1 has size 6, which is not divisible by tp=4. Make it a multiple of 4, or write t~/tp "
            "for unequal shards.\n  b/dp t/tp\n         ^",
        ),
        (
            {"w": "b/dp/tp t", "b": None},
            "device_put: w: Several axes on one dim stand in parentheses, major to minor: b/(dp tp).\n"
            "  b/dp/tp t\n      ^",
        ),
        (
            {"w": "b/pp t", "b": None},
            "device_put: w: There is no mesh axis 'pp': this mesh has dp=2, tp=4.\n  b/pp t\n    ^",
        ),
        (
            "b/dp t",
            "device_put: b: The spec has 2 dims, but the tensor of shape [4] has 1 dim.\n  b/dp t\n  ^",
        ),
        (
            {"w": "b/dp t"},
            "device_put: the specs say nothing about b, but the tree has w, b. Specs form a prefix of the tree.",
        ),
    ],
)
def test_specs_that_do_not_fit_name_the_leaf(specs: Any, message: str) -> None:
    with pytest.raises(ValueError) as e:
        layouts_for(specs, {"w": empty(4, 6), "b": empty(4)}, MESH)
    assert str(e.value) == message


def test_a_single_tensor_has_no_path() -> None:
    with pytest.raises(SpecError, match=r"^step: the tensor: The spec has 2 dims"):
        layouts_for("b t", empty(4), MESH, what="step")


def test_sizes_that_name_nothing() -> None:
    with pytest.raises(ValueError) as e:
        layouts_for("b/dp (h/tp k)", empty(4, 8), MESH, hh=4)
    assert str(e.value) == "device_put: the sizes hh name no factor of the specs, which are: b, h, k."


def test_something_that_is_no_spec() -> None:
    with pytest.raises(
        TypeError, match=r"^device_put: w: A spec is a string such as 'b/dp d', a vf.P or a vf.S, not int"
    ):
        layouts_for({"w": 3}, {"w": empty(4)}, MESH)
