"""`shard_map` by behaviour: the basics, and what composes with it. Each call runs at once and as a program.

Behaviours of JAX's own tests of shard_map that have no counterpart here:

| there                                | here                                                                |
|--------------------------------------|---------------------------------------------------------------------|
| axis_index_groups of collectives     | a mesh axis for the groups, and one for the ranks in a group        |
| psend, precv                         | ppermute with the pairs                                             |
| spmd_axis_name of vmap               | not needed: a batch dim stays whole in the region                   |
| vmap(axis_name=) in collectives      | torch.vmap has no names                                             |
| lax.switch, lax.cond, lax.while_loop | torch.where, or Python on values that all ranks share               |
| closed_call, pjit in a region        | vf.call; a pjit-ted function runs as the plain one in a trace       |
| linearize                            | torch.func.linearize, which records jvp; vjp and jvp are tested     |
| float0 cotangents                    | torch has none: whole numbers have no gradient                      |
| symbolic zeros of custom_vjp         | autograd.Function materializes zeros                                |
| device_put in a region               | refused: values of a rank have no other place                       |
| mutable refs                         | writes in place, made functional by the trace                       |
| PRNG keys as sharded values          | vf.random keys are plain tensors                                    |
| auto_axes, explicit_axes             | axes that a region does not name are the solver's                   |
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from region_calls import LINE, MESH, both, count, counts, mapped, same_bits
from torch import Tensor

import vescale_fn as vf

# ---- basics


@pytest.mark.parametrize("spec", ["a b", "a/x b", "a b/y", "a/y b/x", "a/(x y) b", "a/(y x) b", "a (b/x c)", "a/x ..."])
def test_the_identity_with_the_same_specs(spec: str) -> None:
    x = count(6, 6)
    assert torch.equal(both(mapped(lambda t: t, spec, spec), x), x)


def test_whole_in_cut_out_repeats() -> None:
    x = count(2, 3)
    assert torch.equal(both(mapped(lambda t: t, "a b", "a/x b/y"), x), x.repeat(2, 3))


@pytest.mark.parametrize(("before", "after"), [("x y", "y x"), ("y x", "x y")])
def test_tuple_axes_in_both_orders(before: str, after: str) -> None:
    """The first is major: rank (i, j) holds piece 3 i + j, or piece 2 j + i."""
    x = count(12, 2)
    found = both(mapped(lambda t: t, f"a/({before}) b", f"a/({after}) b"), x)
    pieces = x.reshape(2, 3, 2, 2) if before == "x y" else x.reshape(3, 2, 2, 2)
    assert torch.equal(found, pieces.transpose(0, 1).reshape(12, 2))


def test_specs_are_prefixes_of_trees() -> None:
    weights = {"first": (count(4, 2), count(4, 2) + 1), "second": count(6)}

    def body(w: Any, x: Tensor) -> Any:
        return {"sizes": [w["first"][0].sum(1), w["second"]], "x": (x, x + 1)}

    specs = ({"first": "a/x b", "second": "c/y"}, vf.P("x"))
    f = mapped(body, specs, {"sizes": ["a/x", "c/y"], "x": "a/x"})
    found = both(f, weights, count(2))
    same_bits(found, {"sizes": [weights["first"][0].sum(1), count(6)], "x": (count(2), count(2) + 1)})


def test_rules_give_the_specs() -> None:
    x = {"w": count(4, 3), "b": count(3)}
    by_name = vf.rules({"w": "i/x j", "b": "j"})
    same_bits(both(mapped(lambda t: t, by_name, by_name), x), x)


@pytest.mark.parametrize("static", [3, "mean", (1, 2), None, {"a": 1}], ids=str)
def test_a_static_argument_arrives_as_it_is(static: Any) -> None:
    seen = []
    f = mapped(lambda t, s: seen.append(s) or t, ("a/x b", None), "a/x b")
    at_once = f(count(2, 2), static)
    same_bits(at_once, vf.pjit(lambda t: f(t, static), mesh=MESH)(count(2, 2)))
    assert seen == [static, static]


def test_a_varying_scalar_needs_a_dim() -> None:
    with pytest.raises(ValueError, match="promises the same value"):
        mapped(lambda t: t.sum(), "a/x b", "")(count(4, 2))
    found = both(mapped(lambda t: t.sum()[None], "a/x b", "n/x"), count(4, 2))
    assert torch.equal(found, count(2, 4).sum(1))


def test_closed_over_values_used_and_unused() -> None:
    w, unused = count(3), count(5)
    f = mapped(lambda t: (t * w, w * 2, unused)[:2], "a/x b", ("a/x b", "b"))
    found = both(f, count(4, 3))
    same_bits(found, (count(4, 3) * w, w * 2))


def test_a_closed_over_array_is_gathered_once() -> None:
    w = vf.device_put(count(6, 3), "a/x b", MESH)
    f = mapped(lambda t: t @ w + (t @ w).cos(), "a/x b", "a/x b")
    x = count(4, 6)
    assert counts(f, x) == [("all_gather", "forward")]
    same_bits(both(f, x), x @ w.full() + (x @ w.full()).cos())


@pytest.mark.parametrize(
    "use", [lambda w, t: w * 2, lambda w, t: -w, lambda w, t: torch.stack([w, w]), lambda w, t: w[1:]]
)
def test_operations_on_a_closed_over_array(use: Any) -> None:
    """As methods, operators and functions of torch, alone and with values of the region."""
    w = vf.device_put(count(6, 3), "a/x b/y", MESH)
    f = mapped(lambda t: use(w, t).sum() + t, "a/x", "a/x")
    same_bits(both(f, count(4)), use(w.full(), None).sum() + count(4))


def test_an_axis_of_size_one() -> None:
    mesh = vf.make_mesh(x=2, one=1)

    def body(t: Tensor) -> Tensor:
        gathered = vf.all_gather(vf.pcast(vf.psum(t, "one"), "one", to="varying"), "one", tiled=True)
        return vf.ppermute(gathered, "one", shift=1) + vf.axis_index("one") + vf.axis_size("one")

    f = mapped(body, "a/(x one) b", "a/(x one) b", mesh)
    assert torch.equal(both(f, count(4, 2), mesh=mesh), count(4, 2) + 1)
    assert counts(f, count(4, 2), mesh=mesh) == []


def test_a_function_without_arguments() -> None:
    f = mapped(lambda: torch.ones(2) * vf.axis_index("x"), (), "a/x")
    assert both(f).tolist() == [0, 0, 1, 1]


def test_any_number_of_arguments() -> None:
    f = mapped(lambda *ts: sum(ts), ("a/x", "a/x", "a"), "a/x")
    assert both(f, count(4), count(4), count(2)).tolist() == [0, 3, 4, 7]
    same = mapped(lambda *ts: ts, "a/x", "a/x")
    same_bits(both(same, count(4), count(2)), (count(4), count(2)))


def test_one_region_in_another() -> None:
    """Each over an axis of its own; the body of the inner one sees both."""

    def inner(t: Tensor) -> Tensor:
        assert t.shape == (2, 2)
        return vf.psum(vf.psum(t, "x"), "y") + vf.axis_index("x") * 10 + vf.axis_index("y")

    def outer(t: Tensor) -> Tensor:
        assert t.shape == (2, 6)
        return vf.shard_map(inner, in_specs="a b/y", out_specs="a b/y", axis_names={"y"})(t)

    x = count(4, 6)
    found = both(mapped(outer, "a/x b", "a/x b", axis_names={"x"}), x)
    total = x.reshape(2, 2, 3, 2).sum((0, 2))
    where = torch.tensor([[0, 1, 2], [10, 11, 12]]).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(found, total.repeat(2, 3) + where)


def test_an_abstract_mesh_lowers() -> None:
    mesh = vf.abstract_mesh(x=2, y=3)
    f = mapped(lambda t: vf.psum(t, "x"), "a/x b/y", "a b/y", mesh)
    lowered = vf.pjit(f, mesh=mesh).lower(vf.ShapeDtype((4, 6), torch.float32))
    assert [(c.kind, c.axes) for c in lowered.collectives] == [("all_reduce", ("x",))]


def test_the_mesh_comes_from_pjit_from_the_argument_and_from_the_region_around() -> None:
    f = vf.shard_map(lambda t: vf.psum(t, "x"), in_specs="a/x b", out_specs="a b")
    x = count(4, 6)
    expected = x[:2] + x[2:]
    same_bits(vf.pjit(f, mesh=MESH)(x), expected)
    same_bits(f(vf.device_put(x, "a b/y", MESH)), expected)
    around = mapped(f, "a b/y", "a b/y", axis_names={"y"})
    over_x = vf.shard_map(lambda t: vf.psum(t, "x"), in_specs="a/x b", out_specs="a b", axis_names={"x"})
    same_bits(mapped(lambda t: over_x(t), "a b/y", "a b/y", axis_names={"y"})(x), expected)
    with pytest.raises(ValueError, match="manual already"):
        mapped(lambda t: around(t), "a b", "a b", axis_names={"x"})(x)


def test_arrays_in_arrays_out() -> None:
    x = vf.device_put(count(4, 6), "a b/y", MESH)
    out = mapped(lambda t: t * 2, "a/x b", "a b/x")(x)
    assert isinstance(out, vf.Array)
    assert str(out.sharding.spec) == "a b/x"
    same_bits(out, torch.cat([count(2, 6) * 2, (count(4, 6) * 2)[2:]], 1))


def test_a_second_call_does_not_trace_again() -> None:
    runs = []
    step = vf.pjit(mapped(lambda t: runs.append(1) or t + 1, "a/x", "a/x"), mesh=MESH)
    same_bits(step(count(4)), step(count(4)))
    assert len(runs) == 1
    assert step.cache_info() == (1, 1)
    step(count(6))
    assert len(runs) == 2


def test_a_decorator_keeps_the_name() -> None:
    @vf.shard_map(mesh=LINE, in_specs="a/x", out_specs="a/x")
    def double(t: Tensor) -> Tensor:
        """Twice."""
        return t * 2

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert torch.equal(both(double, count(4), mesh=LINE), count(4) * 2)
