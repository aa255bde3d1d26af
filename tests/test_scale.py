"""Lowering grows with the graph, never with the number of ranks or with the depth of a scanned model."""

from __future__ import annotations

import gc
import re
from typing import Any

import torch
from gpt import MEGATRON, Sizes, init, make_step, rules_for
from torch.func import grad

import vescale_fn as vf
from vescale_fn.tree import map_leaves


def lowered(dp: int) -> vf.Lowered:
    """A GPT train step on an abstract mesh of dp x 4 ranks, four sequences on each."""
    s = Sizes(layers=1, batch=4 * dp)
    mesh = vf.abstract_mesh(dp=dp, tp=4)
    shapes = map_leaves(lambda p: vf.ShapeDtype(tuple(p.shape), p.dtype), init(s))
    params = vf.device_put(shapes, rules_for(MEGATRON, shapes, s), mesh)
    state = {"params": params, "opt": vf.optim.adamw(lr=1e-3).init(params)}
    x = vf.ShapeDtype((s.batch, s.seq), torch.int64)
    x, y = vf.device_put((x, x), "b/dp s", mesh)
    return vf.pjit(make_step(s), donate_argnums=0).lower(state, x, y)


def without_numbers(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"[\d,]+", "N", text))


def test_the_program_of_16384_ranks_is_that_of_8_up_to_sizes() -> None:
    small, large = lowered(2), lowered(4096)
    assert large.program.mesh.size == 16_384
    assert without_numbers(small.as_text()) == without_numbers(large.as_text())
    assert without_numbers(str(small.collectives)) == without_numbers(str(large.collectives))


def test_nothing_is_made_per_rank() -> None:
    lowered(2)  # what is made once stays out of the count
    before = {id(o) for o in gc.get_objects()}
    large = lowered(4096)
    containers = (list, tuple, dict, set, frozenset)
    made = [o for o in gc.get_objects() if id(o) not in before and isinstance(o, containers) and o is not before]
    assert large.program.mesh.size == 16_384
    assert max(map(len, made)) < 4096


def layer(h: torch.Tensor, w: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
    return h + torch.tanh(h @ w["up"]) @ w["down"], None


def stacked(layers: int) -> Any:
    g = torch.Generator().manual_seed(0)
    w = {"up": torch.randn(layers, 8, 16, generator=g), "down": torch.randn(layers, 16, 8, generator=g)}
    return {k: v.double() * 0.3 for k, v in w.items()}, torch.randn(4, 8, generator=g).double()


def scanned(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return vf.scan(layer, x, w)[0].sin().sum()


def unrolled(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for i in range(len(w["up"])):
        x, _ = layer(x, {k: v[i] for k, v in w.items()})
    return x.sin().sum()


SPECS = ({"up": "n d f/tp", "down": "n f/tp d"}, "b/dp d")


def equations(graph: Any) -> int:
    return sum(1 + (equations(e.op.body) if hasattr(e.op, "body") else 0) for e in graph.eqns)


def test_depth_costs_nothing_under_scan() -> None:
    mesh = vf.make_mesh(dp=2, tp=2)
    step = vf.pjit(grad(scanned))
    shallow, deep = (step.lower(*vf.device_put(stacked(n), SPECS, mesh)) for n in (2, 96))
    assert equations(shallow.program.graph) == equations(deep.program.graph)
    assert len(shallow.collectives) == len(deep.collectives)


def test_gradients_of_a_scanned_model_are_those_of_the_unrolled_one() -> None:
    mesh = vf.make_mesh(dp=2, tp=2)
    w, x = stacked(5)
    got = vf.pjit(grad(scanned))(*vf.device_put((w, x), SPECS, mesh))
    for k, want in grad(unrolled)(w, x).items():
        torch.testing.assert_close(got[k].full(), want, rtol=1e-12, atol=1e-12)


def test_a_70b_model_is_costed_without_allocating_it() -> None:
    mesh = vf.abstract_mesh(dp=512, tp=8)
    d, f, layers = 8192, 28672, 80
    w = {"up": vf.ShapeDtype((layers, d, f), torch.bfloat16), "down": vf.ShapeDtype((layers, f, d), torch.bfloat16)}
    args = vf.device_put((w, vf.ShapeDtype((4096, d), torch.bfloat16)), SPECS, mesh)
    low = vf.pjit(grad(scanned)).lower(*args)
    weights = 2 * layers * d * f * 2 // 8
    assert low.memory_analysis().argument == weights + 4096 // 512 * d * 2
