"""Starting without a full copy: shapes without values, and parameters that are drawn where they live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad

import vescale_fn as vf

MESH = vf.make_mesh(dp=2, tp=2)


def init(key: torch.Tensor, layers: int = 2, d: int = 64, f: int = 96, v: int = 128) -> dict[str, Any]:
    """Parameters of a gated transformer, layers stacked."""
    keys = iter(vf.random.split(key, 7))

    def normal(*shape: int) -> torch.Tensor:
        return vf.random.normal(next(keys), shape) * shape[-2] ** -0.5

    return {
        "wte": normal(v, d),
        "attention": normal(layers, d, 2 * d),
        "out": normal(layers, d, d),
        "gate": normal(layers, d, f),
        "up": normal(layers, d, f),
        "down": normal(layers, f, d),
        "head": normal(d, v),
        "norm": torch.ones(layers, d),
    }


RULES = vf.rules(
    {
        "wte": "v/tp d/dp",
        "head": "d/dp v/tp",
        "attention": "l d/dp h/tp",
        "out": "l h/tp d/dp",
        "gate": "l d/dp f/tp",
        "up": "l d/dp f/tp",
        "down": "l f/tp d/dp",
        "norm": "l d/dp",
    }
)


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}])
def test_init_gives_the_same_numbers_on_any_mesh(sizes: dict[str, int]) -> None:
    key = vf.random.key(3)
    started = vf.pjit(init, mesh=vf.make_mesh(**sizes), out_shardings=RULES)
    got, alone = started(key), init(key)
    for name, x in alone.items():
        assert torch.equal(got[name].full(), x)
        assert got[name].shards[0].numel() == x.numel() // (4 if name != "norm" else sizes["dp"])
    assert not started.lower(key).collectives


def test_no_rank_of_a_large_model_holds_more_than_its_share() -> None:
    """70 billion parameters in float32 on 64 ranks: the results, and while they are made less than the draw of the
    largest again, three times over (random bits, their floats, and their scaled copy)."""
    mesh = vf.abstract_mesh(dp=8, tp=8)

    def large(key: torch.Tensor) -> Any:
        return init(key, layers=80, d=8192, f=34_000, v=128_000)

    lowered = vf.pjit(large, mesh=mesh, out_shardings=RULES).lower(vf.ShapeDtype((2,), torch.int64))
    shapes = vf.eval_shape(large, vf.ShapeDtype((2,), torch.int64))
    count = sum(torch.Size(x.shape).numel() for x in shapes.values())
    largest = max(torch.Size(x.shape).numel() for x in shapes.values())
    memory = lowered.memory_analysis()
    assert count > 70e9
    assert not lowered.collectives
    assert memory.output <= 4 * count / 64 * 1.001
    assert memory.peak <= memory.output + 3 * 4 * largest / 64


def test_shapes_of_results() -> None:
    params = {"w": torch.ones(4, 3), "b": vf.device_put(torch.ones(3).bfloat16(), "d/tp", vf.make_mesh(tp=3))}

    def several(p: Any, x: torch.Tensor, n: int) -> Any:
        return grad(lambda w: (x @ w).sum())(p["w"]), p["b"] * n, n, None

    found = vf.eval_shape(several, params, torch.ones(2, 4), 2)
    assert found == (vf.ShapeDtype((4, 3)), vf.ShapeDtype((3,), torch.bfloat16), 2, None)
    assert vf.eval_shape(lambda x, lr: (x * lr, lr * 2), torch.ones(2), 0.5) == (vf.ShapeDtype((2,)), float)
    step = vf.pjit(lambda x: x.sum(), mesh=MESH)
    assert step.eval_shape(vf.ShapeDtype((8, 8))) == vf.eval_shape(step, torch.ones(8, 8)) == vf.ShapeDtype(())


def test_a_module_on_meta_is_drawn_where_it_lives() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    apply, described, buffers = vf.functionalize(module)

    shapes = {name: tuple(p.shape) for name, p in described.items()}

    def draw(key: torch.Tensor) -> dict[str, torch.Tensor]:
        keys = vf.random.split(key, len(shapes))
        return {name: vf.random.normal(k, shape) * 0.1 for k, (name, shape) in zip(keys, shapes.items())}

    key, x = vf.random.key(1), torch.ones(2, 8)
    alone = draw(key)
    expected = apply(alone, buffers, x)
    for sizes in ({"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}):
        mesh = vf.make_mesh(**sizes)
        params = vf.pjit(draw, mesh=mesh, out_shardings=vf.rules({"*.weight": "o/tp i/dp", "*": "..."}))(key)
        assert all(torch.equal(params[n].full(), p) for n, p in alone.items())
        torch.testing.assert_close(vf.pjit(apply, mesh=mesh)(params, buffers, x).full(), expected)
