"""A function cut into stages is the function, cut evenly where little passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from typing import Any

import gpt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vescale_fn as vf
from vescale_fn.schedules import split
from vescale_fn.schedules.pieces import _choose
from vescale_fn.schedules.split import Part, cuts

F64 = torch.float64


def chained(stages: tuple[Part, ...], params: Any, x: Any) -> Any:
    return reduce(lambda h, stage: stage(params, h), stages, x)


def deep(params: Any, x: Any) -> Any:
    """A tied weight, a skip from the input to the end, a name, a cast, and a wish for a layout."""
    h = vf.named(x @ params["in"], "hidden")
    for w in params["layers"]:
        h = vf.reshard(h + torch.tanh(h @ w), "b d")
    h = vf.cast(vf.cast(h, torch.complex128).real, F64) + torch.sin(x @ params["in"])
    return {"out": h @ params["in"].T, "text": "done", "mean": h.mean()}


def looped(params: Any, x: Any) -> Any:
    """A loop over stacked layers, and a part that is computed again."""
    h, _ = vf.scan(lambda h, w: (h + torch.tanh(h @ w), None), x @ params["in"], torch.stack(params["layers"]))
    out = vf.call(lambda h: torch.relu(h @ params["in"].T), h, remat=True)
    return {"out": out, "text": "done", "mean": h.mean()}


def drawn(params: Any, x: Any) -> Any:
    """Dropout in every layer."""
    h = x @ params["in"]
    for w in params["layers"]:
        h = h + torch.nn.functional.dropout(torch.tanh(h @ w), 0.5)
    return {"out": h, "text": "done", "mean": h.mean()}


def weights() -> Any:
    draw = torch.Generator().manual_seed(0)
    return {
        "in": torch.randn(6, 8, dtype=F64, generator=draw),
        "layers": [torch.randn(8, 8, dtype=F64, generator=draw) / 3 for _ in range(5)],
    }


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("fn", [deep, looped, drawn])
def test_stages_one_after_the_other_are_the_function(fn: Callable[..., Any], n: int) -> None:
    x = torch.linspace(-1, 1, 24, dtype=F64).view(4, 6)
    stages = split(fn, n)

    def loss(run: Callable[..., Any]) -> Callable[..., Any]:
        def of(params: Any, x: Any) -> Any:
            with vf.random.scope(vf.random.key(3)):
                found = run(params, x)
                assert found["text"] == "done"
                return found["out"].square().sum() + found["mean"] + (found["mean"] * torch.rand((), dtype=F64))

        return torch.func.grad_and_value(of)

    mesh = vf.make_mesh(dp=2)
    want = vf.pjit(loss(fn), mesh=mesh)(weights(), x)
    found = vf.pjit(loss(lambda params, x: chained(stages, params, x)), mesh=mesh)(weights(), x)
    flat = [vf.tree.flatten(t)[0] for t in (found, want)]
    assert len(flat[0]) == 7
    for a, b in zip(*flat, strict=True):
        torch.testing.assert_close(a.full(), b.full(), rtol=1e-12, atol=1e-12)
    assert torch.equal(chained(stages, weights(), x)["out"].isnan(), torch.zeros(4, 8 if fn is drawn else 6) > 0)


def test_a_transformer_is_cut_between_its_blocks() -> None:
    """Only the residual stream passes, and every stage has a share of the work."""
    sizes = gpt.Sizes(layers=8, width=32, heads=2, vocab=16)
    stages = split(lambda params, x: gpt.forward(params, x, sizes), 4)
    found = cuts(stages, gpt.init(sizes), torch.zeros(2, 16, dtype=torch.int64))
    assert [[tuple(v.shape) for v in p.passed] for p in found.pieces[1:]] == [[(2, 16, 32)]] * 3
    total = sum(p.cost for p in found.pieces)
    assert max(p.cost for p in found.pieces) < 0.3 * total


def test_the_cuts_as_text() -> None:
    found = cuts(split(looped, 2), weights(), torch.ones(4, 6, dtype=F64))
    rows = [line.split() for line in str(found).splitlines()]
    assert rows[0] == ["stage", "cost", "passes", "on", "bytes", "first", "line"]
    assert rows[1][:6] == ["0", "56%", "f64[4,", "8]", "256", "test_split_stages.py:39"]
    assert rows[2][:3] == ["1", "44%", "0"]


def test_shapes_are_enough_and_the_line_is_that_of_own_work() -> None:
    def fn(params: Any, x: Any) -> Any:
        scale = torch.arange(3, dtype=F64, device=x.device).exp()  # computed again by every stage
        for w in params:
            x = torch.sin(x @ w) * scale
        return x

    described = [vf.ShapeDtype((3, 3), F64)] * 2, vf.ShapeDtype((4, 3), F64)
    meta = [torch.empty(3, 3, dtype=F64, device="meta")] * 2, torch.empty(4, 3, dtype=F64, device="meta")
    texts = [str(cuts(split(fn, 2), *given)) for given in (described, meta)]
    assert texts[0] == texts[1]
    assert [line.endswith("x = torch.sin(x @ w) * scale") for line in texts[0].splitlines()] == [False, True, True]


costs = st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(lambda c: sum(c) > 0)


@given(costs, st.data(), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_longest_is_within_the_limit_and_the_least_passes(cost: list[int], data: Any, n: int, slack: float) -> None:
    n = min(n, sum(c > 0 for c in cost))
    widths = data.draw(st.lists(st.integers(0, 9), min_size=len(cost) + 1, max_size=len(cost) + 1))

    def longest(cuts: tuple[int, ...]) -> int:
        return max(sum(cost[a:b]) for a, b in itertools.pairwise((0, *cuts, len(cost))))

    every = list(itertools.combinations(range(1, len(cost)), n - 1))
    limit = (1 + slack) * min(map(longest, every))
    best = min(sum(widths[c] for c in cuts) for cuts in every if longest(cuts) <= limit)
    found = tuple(_choose(cost, widths, n, slack))
    assert longest(found) <= limit
    assert sum(widths[c] for c in found) == best


def test_too_many_stages() -> None:
    with pytest.raises(ValueError) as e:
        cuts(split(lambda p, x: torch.sin(x @ p), 3), torch.ones(2, 2), torch.ones(2, 2))
    assert str(e.value) == (
        "schedules.split: <lambda> has 2 operations that do any work, too few for 3 stages. Ask for fewer stages."
    )


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"^schedules\.split: 0 stages; it must be at least 1\.$"):
        split(deep, 0)
    with pytest.raises(ValueError, match=r"^schedules\.split: slack=-1 must not be negative\.$"):
        split(deep, 2, slack=-1)


def test_a_region_cannot_be_cut() -> None:
    mesh = vf.make_mesh(tp=2)

    def model(params: Any, x: Any) -> Any:
        return vf.shard_map(lambda x: vf.psum(x, "tp"), mesh=mesh, in_specs="b d/tp", out_specs="b d")(x) @ params

    def step(params: Any, x: Any) -> Any:
        return chained(split(model, 2), params, x)

    with pytest.raises(ValueError) as e:
        vf.pjit(step, mesh=mesh)(torch.ones(2, 2), torch.ones(2, 4))
    assert str(e.value).startswith("schedules.split: model has a region of vf.shard_map (at test_split_stages.py:")
    assert "which it cannot cut. Write the stages by hand, as a list of functions, for schedules.pipeline." in str(
        e.value
    )
