"""The exact text of what is said about bad input: what was asked, where, what exists, and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.testing._internal.distributed.fake_pg import FakeStore

import vescale_fn as vf

MESH = vf.make_mesh(dp=2, tp=2)
X = torch.arange(24.0).reshape(4, 6)
PARAMS = {"blocks": [{"up": torch.ones(6, 10), "down": torch.ones(10, 6)}], "wte": torch.ones(8, 6)}
CAPTURED = torch.zeros(6)


def said(fn: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    """What fn raises, its notes below, with paths of this file and line numbers left out."""
    with pytest.raises(kind) as e:
        fn()
    text = "\n".join([str(e.value), *getattr(e.value, "__notes__", [])])
    return re.sub(re.escape(__file__) + r":\d+", "FILE", text)


def put(x: Any = X, spec: Any = "b/dp d", mesh: Any = MESH) -> Any:
    return vf.device_put(x, spec, mesh)


# ---- specs and trees


def test_unknown_axis() -> None:
    assert said(lambda: put({"x": X}, {"x": "b/dpp d"})) == (
        "vf.device_put: x: There is no mesh axis 'dpp': this mesh has dp=2, tp=2.\n  b/dpp d\n    ^"
    )


def test_axis_twice() -> None:
    assert said(lambda: put({"x": X}, {"x": "b/dp d/dp"})) == (
        "vf.device_put: x: The axis 'dp' is used twice: a mesh axis can cut a tensor only once.\n"
        "  b/dp d/dp\n         ^"
    )


def test_not_divisible() -> None:
    assert said(lambda: put({"x": torch.ones(5, 2)}, {"x": "b/dp d"})) == (
        "vf.device_put: x: Dim 0 has size 5, which is not divisible by dp=2. "
        "Make it a multiple of 2, or write b~/dp for unequal shards.\n  b/dp d\n    ^"
    )


def test_factor_of_unknown_size() -> None:
    assert said(lambda: put({"w": torch.ones(6, 24)}, {"w": "d (qkv h/tp k)"})) == (
        "vf.device_put: w: Where 'h' is cut depends on the size of 'qkv', which is unknown: qkv=1 puts rows 0:12 on "
        "the first rank, qkv=2 puts rows 0:6, 12:18 on the first rank. Write qkv=SIZE in the spec, "
        "or pass it as a keyword.\n  d (qkv h/tp k)\n         ^"
    )


def test_rank_of_spec_and_tensor() -> None:
    assert said(lambda: put({"b": torch.ones(6)}, {"b": "d f/tp"})) == (
        "vf.device_put: b: The spec has 2 dims, but the tensor of shape [6] has 1 dim.\n  d f/tp\n  ^"
    )


def test_spec_tree_of_another_form() -> None:
    assert said(lambda: put(PARAMS, {"blocks": [{"up": "d f"}], "wte": "v d"})) == (
        "vf.device_put: the specs at 'blocks.0' say nothing about down, but the tree has up, down. "
        "Specs form a prefix of the tree."
    )
    assert said(lambda: put(PARAMS, ["v d"])) == (
        "vf.device_put: the specs are a list or tuple, but the tree has a dict there. Specs form a prefix of the tree."
    )


def test_rule_that_matches_nothing() -> None:
    assert said(lambda: put(PARAMS, vf.rules({"wpe": "t d", "*": "..."}))) == (
        "rules: 'wpe' matches no leaf. The leaves are: 'blocks.0.up', 'blocks.0.down', 'wte'."
    )


def test_leaf_without_a_rule() -> None:
    assert said(lambda: put(PARAMS, vf.rules({"wte": "v d"}))) == (
        "rules: no rule matches 'blocks.0.up', 'blocks.0.down'. "
        "Add rules for them, or end with '*': '...', which keeps the rest whole."
    )


def test_leaf_that_is_no_value() -> None:
    assert said(lambda: put({"m": object()}, None), TypeError) == (
        "vf.device_put: m is of type object. Leaves must be Arrays, tensors, numbers or None: "
        "convert it with torch.as_tensor, or leave it out of the tree."
    )
    assert said(lambda: put({"w": vf.ShapeDtype((4,))}, None)) == (
        "vf.device_put: w is a ShapeDtype, which holds no values to put on mesh dp=2,tp=2. "
        "Use vf.abstract_mesh to lower without values, or pass a tensor."
    )


def test_reshard() -> None:
    bad_axis = "There is no mesh axis 'dq': this mesh has dp=2, tp=2.\n  b/dq d\n    ^"
    assert said(lambda: vf.reshard(put(), "b/dq d")) == f"vf.reshard: {bad_axis}"
    code = 'f = vf.pjit(lambda x: vf.reshard(x, "b/dq d"))'
    f = vf.pjit(lambda x: vf.reshard(x, "b/dq d"))
    assert said(lambda: f(put())) == f"vf.reshard at FILE: {code}: {bad_axis}"


# ---- meshes


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_mesh_larger_than_the_world(world: None) -> None:
    assert said(lambda: vf.make_mesh(dp=8)) == (
        "make_mesh: dp=8 has 8 ranks, but the world has 4 process(es). "
        "Start 8 processes, or pass processes=4 to let each hold 2."
    )


def test_arrays_on_two_meshes() -> None:
    def step(params: Any, batch: Any) -> Any:
        return batch[0] @ params["w"]

    other = put(X, "b/x d", vf.make_mesh(x=4))
    assert said(lambda: vf.pjit(step)({"w": put(torch.ones(6, 4), "d f")}, [other])) == (
        "step: argument params.w is on mesh dp=2,tp=2 (virtual) and argument batch.0 is on mesh x=4 (virtual). "
        "Everything in one call must be on one mesh; move one of them with vf.device_put(x, spec, mesh)."
    )
    assert said(lambda: vf.pjit(step, mesh=MESH)({"w": torch.ones(6, 4)}, [other])).startswith(
        "step: mesh= is on mesh dp=2,tp=2 (virtual) and argument batch.0 is on mesh x=4 (virtual). "
    )
    captured = put()
    assert said(lambda: vf.pjit(lambda x: x + captured)(other)).startswith(
        "<lambda>: argument x is on mesh x=4 (virtual) and an Array that it captures is on mesh dp=2,tp=2 (virtual). "
    )


def test_no_mesh() -> None:
    assert said(lambda: vf.pjit(lambda x: x)(X)) == (
        "<lambda>: no argument is an Array and no mesh= was given, so there is no mesh to run on. "
        "Put the arguments on a mesh with vf.device_put(x, spec, mesh), or pass mesh=."
    )
    assert said(lambda: vf.device_put(X, "b d")) == (
        "vf.device_put: nothing says on which mesh. Pass mesh=vf.make_mesh(...), a vf.NamedSharding in the place of a "
        "spec, or Arrays that are on a mesh already."
    )


# ---- what a step must not do


def at(code: str) -> str:
    return f"FILE: {code}"


def test_writing_to_a_captured_tensor() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return CAPTURED.add_(x.sum(0))

    assert said(lambda: vf.pjit(step)(put()), RuntimeError) == (
        "step writes in place (aten.add_.Tensor) to a tensor that it captures, at "
        f"{at('return CAPTURED.add_(x.sum(0))')}\n"
        "A step is a pure function. Write to a copy (.clone()), return the new value, and pass it to the next call."
    )
    assert torch.equal(CAPTURED, torch.zeros(6))


READS = (
    "step reads the value of a tensor (`if tensor:`, float(), .item(), .tolist()) at {}\n"
    "A step is traced without values. Choose with torch.where, return the tensor and read it after the call, "
    "or pass the number as a Python argument."
)


def test_deciding_on_a_tensor() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    assert said(lambda: vf.pjit(step)(put()), RuntimeError) == READS.format(at("if x.sum() > 0:"))


def test_item() -> None:
    def step(x: torch.Tensor) -> Any:
        return x.sum().item()

    assert said(lambda: vf.pjit(step)(put()), RuntimeError) == READS.format(at("return x.sum().item()"))


def test_shapes_that_depend_on_values() -> None:
    def step(x: torch.Tensor) -> Any:
        return x.nonzero()

    assert said(lambda: vf.pjit(step)(put()), RuntimeError) == (
        "step: the shape of the result of aten.nonzero depends on the values of a tensor, at "
        f"{at('return x.nonzero()')}\n"
        "A step is traced with fixed shapes. Use a mask of fixed shape and torch.where instead of selecting elements."
    )


def test_random_numbers_without_a_key() -> None:
    def step(x: torch.Tensor) -> Any:
        return F.dropout(x, 0.5)

    assert said(lambda: vf.pjit(step)(put()), RuntimeError) == (
        f"step calls the random operation aten.bernoulli_.float without a key, at {at('return F.dropout(x, 0.5)')}\n"
        "Its values would depend on the mesh and on how often the step ran. Pass a key to the step, and write "
        "`with vf.random.scope(key):` around the draw, inside the step; or switch the layer to eval mode."
    )


def test_a_step_that_raises() -> None:
    def step(x: torch.Tensor) -> Any:
        raise ArithmeticError("too hot")

    assert said(lambda: vf.pjit(step)(put()), ArithmeticError) == (
        f"too hot\nwhile tracing step, at {at('raise ArithmeticError(' + chr(34) + 'too hot' + chr(34) + ')')}"
    )


def test_a_result_that_is_no_value() -> None:
    assert said(lambda: vf.pjit(lambda x: {1, 2})(put()), TypeError).startswith(
        "<lambda> returns a set (leaf 0). A step returns tensors, numbers, strings and None."
    )


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: grad(torch.sum)(x),
        lambda x: vjp(torch.sin, x),
        lambda x: jvp(torch.sin, (x,), (x,)),
        lambda x: jacrev(torch.sum)(x),
        lambda x: vmap(torch.sin)(x),
    ],
)
def test_transforms_over_an_array(transform: Any) -> None:
    assert (
        "vescale_fn.Array (to use it here, pass it as an argument to a function decorated with vescale_fn.pjit)"
    ) in said(lambda: transform(put()), Exception)


# ---- arguments and options of pjit


def test_unhashable_static_argument() -> None:
    assert said(lambda: vf.pjit(lambda x, sizes: x, static_argnums=1)(put(), [1])) == (
        "<lambda>: static argument sizes is a list, which is not hashable. Static arguments are part of the cache key; "
        "pass a hashable value (a tuple instead of a list), or make it a dynamic argument."
    )


def test_argument_that_is_no_value() -> None:
    assert said(lambda: vf.pjit(lambda tree: tree)({"a": put(), "b": {1, 2}}), TypeError) == (
        "<lambda>: argument tree.b is of type set. Leaves must be Arrays, tensors, numbers, None or constants: "
        "convert it with torch.as_tensor, or name the parameter in static_argnames."
    )
    assert said(lambda: vf.pjit(lambda x: x, mesh=MESH)(vf.ShapeDtype((4,))), TypeError) == (
        "<lambda>: argument x is a ShapeDtype, which holds no values to compute with. "
        "Use .lower(...) with it, or an abstract mesh; pass a tensor or an Array to run."
    )


def test_donated_twice() -> None:
    x = put()
    assert said(lambda: vf.pjit(lambda state, batch: state, donate_argnums=0)({"w": x}, [x])) == (
        "<lambda>: argument state.w and argument batch.0 are the same Array, and one of them is donated. "
        "Pass a copy (vf.device_put of it copies), or do not donate it."
    )
    assert not x.is_deleted


def test_donated_and_used_again() -> None:
    x = put()
    step = vf.pjit(lambda state: state["w"] + 1, donate_argnums=0)
    step({"w": x})
    assert said(lambda: step({"w": x}), RuntimeError) == (
        "<lambda>: argument state.w is an Array (f32[4, 6] 'b/dp d' on dp=2,tp=2) that was donated to <lambda>: it "
        "holds nothing any more. Pass the value that the call returned, or leave the argument out of donate_argnums."
    )
    assert said(lambda: vf.pjit(lambda y: x + y)(put()), RuntimeError).startswith(
        "<lambda>: a captured value is an Array"
    )


def test_in_shardings() -> None:
    def step(params: Any, batch: Any) -> Any:
        return batch[0] @ params["w"]

    def call(shardings: Any) -> str:
        return said(lambda: vf.pjit(step, mesh=MESH, in_shardings=shardings)({"w": torch.ones(6, 4)}, (X, X)))

    assert call(({"w": "d f/tp"}, ("b/dp d", "b/dp"))) == (
        "step: in_shardings: batch.1: The spec has 1 dim, but the tensor of shape [4, 6] has 2 dims.\n  b/dp\n  ^"
    )
    assert call(({"w": "d f/tq"}, None)) == (
        "step: in_shardings: params.w: There is no mesh axis 'tq': this mesh has dp=2, tp=2.\n  d f/tq\n      ^"
    )
    assert call(({"w": "d f/tp"},)) == (
        "step: in_shardings has 1 entries, but the call has 2 arguments: params, batch. "
        "Give one for each, None where an argument keeps its own sharding."
    )
    assert call({"w": "d f/tp"}) == (
        "step: in_shardings: the specs say nothing about params, batch and name w, which the tree does not have, "
        "but the tree has params, batch. Specs form a prefix of the tree."
    )
    assert said(lambda: vf.pjit(lambda x: x, in_shardings="b d/tp")(put())) == (
        "<lambda>: argument x is an Array f32[4, 6] 'b/dp d' on dp=2,tp=2, but in_shardings asks for 'b d/tp'. "
        "Move it first with vf.device_put(x, spec), or leave its sharding out of in_shardings."
    )


def test_out_shardings() -> None:
    def call(shardings: Any) -> str:
        return said(lambda: vf.pjit(lambda x: {"y": x.sum(0)}, out_shardings=shardings)(put()))

    assert call({"y": "b/dp d"}) == (
        "<lambda>: out_shardings: y: The spec has 2 dims, but the tensor of shape [6] has 1 dim.\n  b/dp d\n  ^"
    )
    assert call(("b/dp", "d")) == (
        "<lambda>: out_shardings: the specs are a list or tuple, but the tree has a dict there. "
        "Specs form a prefix of the tree."
    )


OPTIONS = {
    "in_specs": (
        {"in_specs": "b/dp"},
        "got in_specs=, which belongs to vf.shard_map (the per-rank view). pjit has the global view: "
        "write in_shardings=.",
    ),
    "out_specs": (
        {"out_specs": "b/dp"},
        "got out_specs=, which belongs to vf.shard_map (the per-rank view). pjit has the global view: "
        "write out_shardings=.",
    ),
    "unknown": (
        {"donate_args": 0},
        "there is no option 'donate_args'. The options are: mesh, in_shardings, out_shardings, donate_argnums, donate, "
        "static_argnums, static_argnames, data_argnums, rules, compile, deterministic, keep, cache_dir, audit.",
    ),
    "donate": ({"donate": "maybe"}, "donate='maybe' is not known. It must be one of 'reuse', 'safe'."),
    "compile": ({"compile": "c++"}, "compile='c++' is not known. It must be one of None, 'inductor'."),
    "static_argnames": ({"static_argnames": "y"}, "static_argnames names 'y', but the parameters are: x, k."),
    "donate_argnums": ({"donate_argnums": 2}, "donate_argnums names argument 2, but there are 2: x, k."),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options, text = OPTIONS[name]
    assert said(lambda: vf.pjit(lambda x, k: x, **options), Exception) == f"vf.pjit(<lambda>): {text}"


def test_inductor_with_collectives() -> None:
    assert said(lambda: vf.pjit(lambda x: x.sum(), compile="inductor")(put())) == (
        '<lambda>: compile="inductor" compiles whole programs without collectives, and this one has 1. '
        "Leave compile out, or lower onto a mesh of one rank."
    )


def test_running_on_an_abstract_mesh() -> None:
    x = put(X, "b/dp d", vf.abstract_mesh(dp=2))
    assert said(lambda: vf.pjit(lambda x: x).lower(x).compile()).startswith("Mesh dp=2 is abstract")
