"""Faults that random programs found in regions, each by its kind."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, jvp

import vescale_fn as vf

MESH = vf.make_mesh(x=2, one=1)


def test_a_spec_that_names_an_axis_of_one_rank_says_that_the_value_varies() -> None:
    f = vf.shard_map(lambda x: x * (1 + vf.axis_index("one")), mesh=MESH, in_specs="d", out_specs="d/one")
    assert f(torch.ones(3)).tolist() == [1, 1, 1]
    assert vf.pjit(f, mesh=MESH)(torch.ones(3)).full().tolist() == [1, 1, 1]


def test_operations_that_change_a_shape_in_place() -> None:
    """A vector times a matrix squeezes its result so."""

    def body(x: Tensor) -> Tensor:
        y = (x @ torch.ones(2, 2)).clone()
        return y.unsqueeze_(0).transpose_(0, 1).squeeze_(1)

    f = vf.shard_map(body, mesh=MESH, in_specs="(r d)/x", out_specs="(r d)/x")
    assert f(torch.arange(4.0)).tolist() == [1, 1, 5, 5]
    assert vf.pjit(f, mesh=MESH)(torch.arange(4.0)).full().tolist() == [1, 1, 5, 5]


def test_the_result_of_a_collective_whose_shape_changes_in_place() -> None:
    """A node keeps the shape that its result had, whatever its operand's strides are."""

    def body(x: Tensor) -> Tensor:
        y = vf.psum_scatter(x.T, "x", dim=1, tiled=True)
        assert y.is_contiguous()
        return y.unsqueeze_(0).transpose_(1, 2).squeeze_(0) + 0

    f = vf.shard_map(body, mesh=MESH, in_specs="a/x b", out_specs="a/x b")
    x = torch.arange(12.0).reshape(4, 3)
    want = x[:2] + x[2:]
    assert torch.equal(f(x), want)
    assert torch.equal(vf.pjit(f, mesh=MESH)(x).full(), want)


def test_second_derivatives_through_parts_of_a_sum() -> None:
    """Shapes are compared, and copied to the device meta, on the way; neither is about values."""
    f = vf.shard_map(lambda x: (3 * x + x / 2).sum(0), mesh=MESH, in_specs="k d {ct: x}", out_specs="d {ct: x}")
    x = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
    _, second = jvp(grad(lambda t: (f(t) ** 2).sum() / 2), (x,), (torch.ones_like(x),))
    assert second.tolist() == [[36.75, 36.75]] * 3


def test_one_rank_that_does_not_send_to_itself_gets_zeros() -> None:
    """As any rank that is nobody's destination; so a chain along an axis means the same on every mesh."""

    def chain(t: Tensor) -> Tensor:
        return vf.ppermute(t, "x", [(i, i + 1) for i in range(vf.axis_size("x") - 1)])

    for n in (1, 2):
        mesh = vf.make_mesh(x=n)
        f = vf.shard_map(chain, mesh=mesh, in_specs="b/x", out_specs="b/x")
        expected = [0, 0] if n == 1 else [0, 1]
        assert f(torch.ones(2)).tolist() == expected
        assert vf.pjit(f, mesh=mesh)(torch.ones(2)).full().tolist() == expected
