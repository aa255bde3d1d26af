"""Checkpoints of ragged Arrays: whatever was saved loads into units, owners, merged dims, shards and whole tensors."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

import vescale_fn as vf

PAIRS = [
    ((2, 64), "a b~[0 1 0 0]/x", "a b"),
    ((2, 64), "a~@1/x b", "(a b)~[42 42 44 0]/x"),
    ((2, 64), "(a b)~[1 1 1 1]/x", "a~@3/x b"),
    ((2, 64), "(a b)~[1 1 1 1]/x", "(a b)~[21 21 22 0]/x"),
    ((2, 64), "a~[1 1 0 0]/x b", "(a b)~[21 21 22 0]/x"),
    ((5, 3, 6, 7), "(a b)~[3 7 4 1]/x c d", "(a b c)~[43 23 7 17]/x d"),
    ((5, 3, 6, 7), "(a b)~[3 7 4 1]/x c d", "a b c d"),
    ((5, 3, 6, 7), "a b c d", "(a b c d)~[17 13 31 2]/x"),
    ((5, 3, 6, 7), "(a b)~[5 3 7 0]/x c d", "(a b c d)~[17 13 31 2]/x"),
    ((5, 3, 8, 7), "(a b)~[5 3 7 0]/x c d", "a b c/x d"),
    *[
        ((2, 3, 2, 7), f"(a b c)~[{' '.join(map(str, s))}]/x d", f"(a b c)~[{' '.join(map(str, t))}]/x d")
        for s, t in itertools.pairwise(u for u in itertools.combinations(range(13), 4) if sum(u) == 12)
    ],
]


@pytest.mark.parametrize("beside", ["", "a", "d"])
@pytest.mark.parametrize(("shape", "saved", "wanted"), PAIRS)
def test_any_cut_loads_into_any_other(
    tmp_path: Path, shape: tuple[int, ...], saved: str, wanted: str, beside: str
) -> None:
    """`beside`: whether another axis cuts one more dim, in front or behind."""
    mesh = vf.make_mesh(x=4, y=2)
    front, back = ("n/y " if beside == "a" else "", " m/y" if beside == "d" else "")
    shape = (*((4,) if front else ()), *shape, *((4,) if back else ()))
    x = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    vf.save(tmp_path, {"x": vf.device_put(x, front + saved + back, mesh)})
    want = vf.device_put(x, front + wanted + back, mesh)
    like = vf.device_put(torch.zeros_like(x), front + wanted + back, mesh)
    got = vf.load(tmp_path, {"x": like})["x"]
    assert got.sharding == want.sharding
    assert all(
        torch.equal(a.data, b.data) for a, b in zip(got.addressable_shards, want.addressable_shards, strict=True)
    )
