"""Patterns: each is its named collective, bit for bit; every other is refused with the collective that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad

import vescale_fn as vf
from vescale_fn.regions.pattern import read
from vescale_fn.regions.texts import RegionError
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.spec import SpecError

MESH = vf.make_mesh(x=2, y=3)


def in_region(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return vf.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


NAMED = {
    "b s/x d -> b s d": lambda t: vf.all_gather(t, "x", 1, tiled=True),
    "... s d/(x y) -> ... s d": lambda t: vf.all_gather(t, ("x", "y"), -1, tiled=True),
    "b (s/y k) d -> b (s k) d": lambda t: vf.all_gather(t, "y", 1, tiled=True),
    "b s/(x y) d -> b s/x d": lambda t: vf.all_gather(t, "y", 1, tiled=True),
}


@pytest.mark.parametrize("pattern", NAMED)
def test_gathers(pattern: str) -> None:
    x = draw(12, 12, 12)
    specs = "b/x s/y d"
    found = in_region(lambda t: vf.all_gather(t, pattern), specs, "b/(x y) ...")(x)
    assert torch.equal(found, in_region(NAMED[pattern], specs, "b/(x y) ...")(x))


@pytest.mark.parametrize(
    ("by_pattern", "by_name", "in_spec", "out_spec"),
    [
        (
            lambda t: vf.psum_scatter(t, "b s d -> b s/x d"),
            lambda t: vf.psum_scatter(t, "x", 1, tiled=True),
            "b/x s d",
            "b s/x d",
        ),
        (
            lambda t: vf.psum_scatter(vf.pcast(t, "x", to="unreduced"), "b s d {sum: x} -> b s/x d"),
            lambda t: vf.psum_scatter(t, "x", 1, tiled=True),
            "b/x s d",
            "b s/x d",
        ),
        (
            lambda t: vf.all_to_all(t, "e c/y d -> e/y c d"),
            lambda t: vf.all_to_all(t, "y", 0, 1, tiled=True),
            "e c/y d",
            "e/y c d",
        ),
        (lambda t: vf.psum(t, "b s d {sum: (x y)} -> b s d"), lambda t: vf.psum(t, ("x", "y")), "b/x s/y d", "b s d"),
        (
            lambda t: vf.all_gather(t, "b s/x d -> b s d {ct: x}"),
            lambda t: vf.all_gather(t, "x", 1, tiled=True, to="reduced"),
            "b s/x d",
            "b s d",
        ),
        (
            lambda t: vf.reshard(t, "b s/x d -> b s d"),
            lambda t: vf.all_gather(t, "x", 1, tiled=True, to="invarying"),
            "b s/x d",
            "b s d",
        ),
    ],
)
def test_a_pattern_is_its_named_collective(by_pattern: Any, by_name: Any, in_spec: str, out_spec: str) -> None:
    x = draw(6, 12, 6)
    one, other = in_region(by_pattern, in_spec, out_spec), in_region(by_name, in_spec, out_spec)
    assert torch.equal(one(x), other(x))
    assert torch.equal(grad(lambda t: one(t).sin().sum())(x), grad(lambda t: other(t).sin().sum())(x))
    kinds = [[(c.kind, c.axes) for c in vf.pjit(f, mesh=MESH).lower(x).collectives] for f in (one, other)]
    assert kinds[0] == kinds[1]


def test_reshard_in_a_region_keeps_the_value() -> None:
    x = draw(6, 6, 6)

    def around(t: Tensor) -> Tensor:
        whole = vf.reshard(t, "a b/x c -> a b c")
        slices = vf.reshard(whole, "a b c -> a b c/x")
        return vf.reshard(slices, "a b c/x -> a/x b c")

    assert torch.equal(in_region(around, "a b/x c", "a/x b c")(x), x)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_what_a_pattern_reads_is_what_it_says(data: st.DataObject) -> None:
    """One axis, or two together, go from one place to another among three dims and a pending sum."""
    axes = data.draw(st.sampled_from([("x",), ("y",), ("x", "y"), ("y", "x")]))
    places = ["sum", 0, 1, 2, None]
    source, target = data.draw(st.permutations(places))[:2]

    def layout(place: Any) -> str:
        text = " ".join(axes)
        dims = [f"{n}/({text})" if i == place else n for i, n in enumerate("abc")]
        return " ".join([*dims, *([f"{{sum: ({text})}}"] if place == "sum" else [])])

    pattern = f"{layout(source)} -> {layout(target)}"
    mesh = MeshShape(("x", "y"), (2, 3))
    if target == "sum" and source is not None:
        with pytest.raises(SpecError, match="A pattern is one collective, but this one is all_gather"):
            read("reshard", pattern, mesh)
        return
    moved = read("reshard", pattern, mesh)
    by_ends = {
        ("sum", None): "psum",
        ("sum", "dim"): "psum_scatter",
        ("dim", None): "all_gather",
        ("dim", "dim"): "all_to_all",
        (None, "dim"): "own_slice",
        (None, "sum"): "pcast",
    }
    ends = tuple("dim" if isinstance(p, int) else p for p in (source, target))
    assert moved.kind == by_ends[ends]
    assert moved.axes == axes
    if moved.kind == "all_to_all":
        assert (moved.dim, moved.split_dim) == (source, target)


@pytest.mark.parametrize(
    ("pattern", "result"),
    [("b s f/x, f/x d -> b s d", "b s d"), ("b s f/x, f/x d -> b s/x d", "b s/x d")]
    + [("b s f/x, f/x d -> b s d {sum: x}", "b s d {sum: x}")],
)
def test_einsum_types_what_it_contracts(pattern: str, result: str) -> None:
    x, w = draw(3, 4, 6), draw(6, 5)
    product = in_region(lambda x, w: vf.einsum(x, w, pattern), ("b s f/x", "f/x d"), result)
    torch.testing.assert_close(product(x, w), x @ w, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vf.pjit(product, mesh=MESH)(x, w).full(), x @ w, rtol=1e-12, atol=1e-12)
    found = grad(lambda w: product(x, w).sin().sum())(w)
    torch.testing.assert_close(found, grad(lambda w: (x @ w).sin().sum())(w), rtol=1e-12, atol=1e-12)


def test_einsum_of_many_operands_and_outside_regions() -> None:
    a, b, c = draw(4, 6), draw(6, 6), draw(6, 2)
    pattern = "i/x j, j k/y, k/y l -> i/x l"
    plain = torch.einsum("ij,jk,kl->il", a, b, c)
    torch.testing.assert_close(vf.einsum(a, b, c, pattern), plain)
    chain = in_region(lambda *t: vf.einsum(*t, pattern), ("i/x j", "j k/y", "k/y l"), "i/x l")
    torch.testing.assert_close(chain(a, b, c), plain)
    step = vf.pjit(lambda *t: vf.einsum(*t, pattern), mesh=MESH)
    torch.testing.assert_close(step(a, b, c).full(), plain)
    assert [(x.kind, x.axes) for x in step.lower(a, b, c).collectives] == [("all_reduce", ("y",))]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda t: vf.all_gather(t, "a b/x c -> a/x b c"),
            "vf.all_gather: This pattern is an all_to_all over x, cut at dim 0 and joined at dim 1: write "
            "vf.all_to_all(x, 'a b/x c -> a/x b c').\n  a b/x c -> a/x b c\n  ^",
        ),
        (
            lambda t: vf.psum(t, "a b c -> a b/x c"),
            "vf.psum: This pattern is an own_slice over x along dim 1: write vf.reshard(x, 'a b c -> a b/x c').\n"
            "  a b c -> a b/x c\n  ^",
        ),
        (
            lambda t: vf.all_gather(t, "a b/x c -> a c b"),
            "vf.all_gather: Both sides of '->' must name the same dims in the same order; rearrange the dims before or "
            "after.\n  a b/x c -> a c b\n          ^",
        ),
        (
            lambda t: vf.all_gather(t, "a/y b/x c -> a b c"),
            "vf.all_gather: A pattern is one collective, but this one is all_gather over y along dim 0; then "
            "all_gather over x along dim 1.\n  a/y b/x c -> a b c\n            ^",
        ),
        (
            lambda t: vf.psum_scatter(t, "a b c -> a b c"),
            "vf.psum_scatter: A pattern is one collective, but this one is nothing: both sides are the same.\n"
            "  a b c -> a b c\n        ^",
        ),
        (
            lambda t: vf.all_gather(t, "a b/(x y) c -> a b/y c"),
            "vf.all_gather: The axes of dim 1 change from (x y) to y: only the last ones can come or go. Use "
            "vf.ppermute first.\n  a b/(x y) c -> a b/y c\n  ^",
        ),
        (
            lambda t: vf.all_gather(t, "a (k b/x) c -> a (k b) c"),
            "vf.all_gather: This pattern moves a factor that does not lead its dim; split the dim with x.unflatten "
            "first.\n  a (k b/x) c -> a (k b) c\n  ^",
        ),
        (
            lambda t: vf.psum(t, "a b/x c"),
            "vf.psum: A pattern has one layout on each side of '->', as in 'b s/tp d -> b s d'.\n  a b/x c\n  ^",
        ),
        (
            lambda t: vf.all_gather(t, "a b/x -> a b"),
            "vf.all_gather: The spec has 2 dims, but the tensor of shape [6, 3, 6] has 3 dims.\n  a b/x -> a b\n  ^",
        ),
        (
            lambda t: vf.einsum(t, t, "a b/x c, a b c -> c"),
            "vf.einsum: 'b' is sharded over x in one operand and over none in another. Bring them together first: "
            "gather one, or take this rank's slice of the other.\n  a b/x c, a b c -> c\n  ^",
        ),
        (
            lambda t: vf.einsum(t, "a b c -> a b/x"),
            "vf.einsum: 'b' has the axes none in the operands and x in the result. Only axes that are contracted can "
            "be added.\n  a b c -> a b/x\n        ^",
        ),
        (
            lambda t: vf.einsum(t, "a b c -> a {sum: x}"),
            "vf.einsum: Nothing is contracted over x, so no sum over it is pending.\n  a b c -> a {sum: x}\n  ^",
        ),
        (
            lambda t: vf.einsum(t, t, "a b c -> a"),
            "vf.einsum: The pattern needs a layout for each of the 2 operands, and one for the result: "
            "'b f, f d -> b d'.\n  a b c -> a\n  ^",
        ),
        (
            lambda t: vf.einsum(t, "a b c -> a z"),
            "vf.einsum: The result has a dim 'z' that no operand has.\n  a b c -> a z\n        ^",
        ),
        (
            lambda t: vf.einsum(t, "(a b) c -> c"),
            "vf.einsum: '(a b)' is no single name; every dim of an einsum is one.\n  (a b) c -> c\n  ^",
        ),
    ],
)
def test_what_is_no_such_collective_is_refused(body: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        in_region(body, "a b/x c", "a b c")(draw(6, 6, 6))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda t: vf.reshard(t, "a b/x c"),
            "vf.reshard: 'a b/x c' names 'x', which is manual here: a rank cannot ask for a layout along it. Write "
            "the collective as a pattern, 'before -> after', or leave the axis out.",
        ),
        (
            lambda t: vf.reshard(t, "a b c -> a b c/x"),
            "vf.reshard: 'a b c -> a b c/x' takes this rank's slice of a value that all ranks along 'x' hold, but the "
            "value is varying over 'x'. For the slice of a sum, write {sum: x} on the left.",
        ),
    ],
)
def test_reshard_in_a_region_says_what_it_cannot(body: Any, message: str) -> None:
    with pytest.raises(RegionError) as error:
        in_region(body, "a b/x c", "a b c")(draw(6, 6, 6))
    assert str(error.value) == message


def test_patterns_need_a_region() -> None:
    with pytest.raises(RegionError, match=r"^vf.psum: no region is under way"):
        vf.psum(torch.ones(2), "a {sum: x} -> a")
