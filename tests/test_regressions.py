"""One example for each fault that a random program has found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import vescale_fn as vf


def assert_equal(f: Callable[..., Any], args: list[torch.Tensor], specs: list[str], **mesh: int) -> None:
    """pjit(f) equals f for arguments with these specs."""
    devices = vf.make_mesh(**mesh)
    got = vf.pjit(f)(*(vf.device_put(x, s, devices) for x, s in zip(args, specs)))
    torch.testing.assert_close(got.full(), f(*args), rtol=1e-10, atol=1e-12)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_convolution_without_bias_over_a_sharded_window_is_lowered() -> None:
    """It was split into itself for ever."""
    assert_equal(F.conv2d, [normal(2, 3, 4, 4), normal(4, 3, 3, 2)], ["n c h w", "o c k l/y"], y=2)


@pytest.mark.parametrize("order", [1, 2])
def test_gradient_through_a_constraint_to_partial_sums(order: int) -> None:
    """The gradient's own constraint was refused."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (vf.reshard(x * x, "a {sum: x}") ** 2).sum()

    for _ in range(order):
        f = grad(lambda x, f=f: f(x).sum())
    assert_equal(f, [normal(4)], ["a/x"], x=2)
