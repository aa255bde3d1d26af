"""Calls of a function with regions: at once and as a program, which give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import vescale_fn as vf
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.tree import flatten

MESH = vf.make_mesh(x=2, y=3)
LINE = vf.make_mesh(x=4)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def count(*shape: int) -> Tensor:
    """Whole numbers, all different, so that sums are exact in any order."""
    return torch.arange(np.prod(shape, dtype=int), dtype=torch.float64).reshape(shape)


def mapped(body: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Mesh = MESH, **options: Any) -> Any:
    return vf.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def both(f: Callable[..., Any], *args: Any, mesh: Mesh = MESH) -> Any:
    """What f gives at once. Raises AssertionError unless its program gives the same bits."""
    at_once = f(*args)
    same_bits(at_once, vf.pjit(f, mesh=mesh)(*args))
    return at_once


def same_bits(a: Any, b: Any) -> None:
    (xs, form), (ys, other) = flatten(a), flatten(b)
    assert form == other
    for x, y in zip(xs, ys, strict=True):
        if isinstance(x, (Tensor, vf.Array)):
            x, y = (t.full() if isinstance(t, vf.Array) else t for t in (x, y))
            assert x.dtype == y.dtype
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
        else:
            assert x == y


def equal(a: Any, b: Any) -> None:
    """Equal but for the last bits of float64."""
    a, b = (torch.as_tensor(t.full() if isinstance(t, vf.Array) else t) for t in (a, b))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def counts(f: Callable[..., Any], *args: Any, mesh: Mesh = MESH) -> list[tuple[str, str]]:
    """The collectives of the program, (kind, phase), in order."""
    return [(c.kind, c.phase) for c in vf.pjit(f, mesh=mesh).lower(*args).collectives]
