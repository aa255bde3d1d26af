"""A pipeline's gradients are those of its stages one after the other, on any schedule and mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vescale_fn as vf
from vescale_fn.schedules import accumulate, pipeline, sequential
from vescale_fn.schedules.pipelines import Table

F64 = torch.float64
WIDTH = 6

SCHEDULES = {  # by name: chunks on a rank
    "gpipe": 1,
    "1f1b": 1,
    "zb_h1": 1,
    "zb_h2": 1,
    "interleaved": 2,
    "looped_bfs": 3,
    "zbv": 2,
    "dualpipev": 2,
    "auto": 1,
}


def stage(w: Any, x: Any) -> Any:
    return torch.tanh(x @ w["a"]) @ w["b"] + x


def mse(y: Any, t: Any) -> Any:
    return (y - t).square().mean()


def weights(n: int) -> list[Any]:
    draw = torch.Generator().manual_seed(n)
    return [{k: torch.randn(WIDTH, WIDTH, dtype=F64, generator=draw) / 3 for k in "ab"} for _ in range(n)]


def batch(rows: int) -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(rows)
    x, t = torch.randn(2, rows, WIDTH, dtype=F64, generator=draw)
    return x, t


def home(placement: tuple[int, ...]) -> list[str]:
    return [f"... {{at: pp@{r}}}" for r in placement]


def flat(tree: Any) -> list[Any]:
    return [x.full() if isinstance(x, vf.Array) else x for x in vf.tree.flatten(tree)[0]]


def assert_close(found: Any, want: Any) -> None:
    for a, b in zip(flat(found), flat(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def assert_same(found: Any, want: Any) -> None:
    for a, b in zip(flat(found), flat(want), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_give_the_gradients_of_the_sequence(schedule: str, ranks: int) -> None:
    """Up to rounding those of the whole batch, bit for bit those of the loop over microbatches."""
    m, n = 2 * ranks, ranks * SCHEDULES[schedule]
    stages, params, data = [stage] * n, weights(n), batch(4 * ranks)
    grad_fn = pipeline(stages, mse, microbatches=m, schedule=schedule)
    mesh = vf.make_mesh(pp=ranks)
    placed = vf.device_put(params, home(grad_fn.table(ranks).placement), mesh)
    grads, value = vf.pjit(grad_fn)(placed, *data)
    assert all(g.sharding == p.sharding for g, p in zip(vf.tree.flatten(grads)[0], vf.tree.flatten(placed)[0]))
    whole = vf.grad_and_value(sequential(stages, mse))
    assert_close((grads, value), whole(params, *data))
    assert_same((grads, value), accumulate(whole, m)(params, *data))
