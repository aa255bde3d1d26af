"""Audits find the replica that differs, and only that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vescale_fn as vf


def state() -> dict[str, Any]:
    mesh = vf.make_mesh(dp=3, tp=2)
    values = {"w": torch.randn(4, 6), "b": torch.randn(6), "x": torch.randn(6, 2)}
    return vf.device_put(values, {"w": "d f/tp", "b": "f", "x": "b/(dp tp) d"}, mesh)  # type: ignore[no-any-return]


def flip_lowest_bit(x: vf.Array, rank: int) -> None:
    x.shards[rank].view(-1).view(torch.int32)[0] ^= 1


def test_equal_replicas_pass() -> None:
    vf.audit(state())
    vf.audit({"nothing": None, "number": 1.0})


def test_a_flipped_bit_is_found() -> None:
    values = state()
    flip_lowest_bit(values["w"], 4)
    with pytest.raises(vf.AuditError) as caught:
        vf.audit(values, "train_step")
    assert str(caught.value) == (
        "train_step: the replicas of w (f32[4, 6] 'd f/tp' on dp=3,tp=2) differ: rank 4 against ranks 0, 2. A step "
        "cannot do this: suspect memory or a device of the ranks that stand alone, and go back to the last checkpoint."
    )


def test_parts_without_replicas_may_differ() -> None:
    values = state()
    flip_lowest_bit(values["x"], 1)
    vf.audit(values)


def test_nan_and_negative_zero_are_compared_as_bits() -> None:
    x = vf.device_put(torch.tensor([float("nan"), 0.0]), "d", vf.make_mesh(dp=2))
    vf.audit(x)
    x.shards[1][1] = -0.0
    with pytest.raises(vf.AuditError):
        vf.audit(x)


def test_partial_values_have_no_replicas_along_the_pending_axis() -> None:
    vf.audit(vf.device_put(torch.ones(3), "d {sum: dp}", vf.make_mesh(dp=2, tp=2)))
