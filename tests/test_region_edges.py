"""Values that cross the edge of a region together, of all dtypes, under every transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

import vescale_fn as vf

MESH = vf.make_mesh(x=2)
A = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
B, INDEX = A[0] + 1, torch.arange(4)


def plain(a: Tensor, b: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return (a.sin() * b).sum(0), a * 2, i + 1


def on_rank(a: Tensor, b: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return vf.psum((a.sin() * b).sum(0), "x"), a * 2, i + 1


REGION = vf.shard_map(on_rank, mesh=MESH, in_specs=("b/x n", "n", "b/x"), out_specs=("n", "b/x n", "b/x"))


def agree(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        whole = one.full() if isinstance(one, vf.Array) else one
        torch.testing.assert_close(whole, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lowered", [False, True])
def test_several_values_cross_at_once(lowered: bool) -> None:
    agree((vf.pjit(REGION, mesh=MESH) if lowered else REGION)(A, B, INDEX), plain(A, B, INDEX))


@pytest.mark.parametrize("lowered", [False, True])
def test_tangents_of_some(lowered: bool) -> None:
    def along(f: Any) -> Any:
        return lambda a: jvp(lambda b: f(a, b, INDEX)[:2], (B,), (torch.ones_like(B),))[1]

    found = along(REGION)
    agree((vf.pjit(found, mesh=MESH) if lowered else found)(A), along(plain)(A))


@pytest.mark.parametrize("out_dims", [0, (1, 0, 0)])
def test_some_are_mapped(out_dims: Any) -> None:
    many = torch.stack([A, A + 1, A - 1])
    found, wanted = (vmap(f, (0, None, None), out_dims)(many, B, INDEX) for f in (REGION, plain))
    agree(found, wanted)


@pytest.mark.parametrize("transform", [jacfwd, jacrev, hessian])
def test_derivatives(transform: Any) -> None:
    agree(*([transform(lambda b: f(A, b, INDEX)[0].sin())(B)] for f in (REGION, plain)))  # noqa: B023
    agree(*([transform(lambda a: f(a, B, INDEX)[0].sin().sum())(A)] for f in (REGION, plain)))  # noqa: B023


def test_what_a_region_closes_over_is_gathered_once_and_reported() -> None:
    w = vf.device_put(A, "n/x d", MESH)
    region = vf.shard_map(lambda x: x @ w + (2 * x) @ w, mesh=MESH, in_specs="b/x n", out_specs="b/x d")
    step, x = vf.pjit(lambda x: region(x)), vf.device_put(A @ A.mT, "b/x n", MESH)
    lowered = step.lower(x)
    assert [c.kind for c in lowered.collectives] == ["all_gather"]
    line = lowered.collectives[0].source
    assert lowered.plan.messages == (
        f"captured_0 is gathered along x: the region at {line} takes it whole; pass it as an argument, with an in_spec "
        "that shards it, to keep it in parts.",
    )
    agree([step(x)], [3 * (A @ A.mT) @ A])
