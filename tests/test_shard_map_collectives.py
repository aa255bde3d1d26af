"""`shard_map` by behaviour: every collective, by its definition on what the members of a group hold, in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from region_calls import LINE, MESH, both, count, counts, draw, equal, mapped
from torch import Tensor
from torch.func import grad

import vescale_fn as vf
from vescale_fn.tree import map_leaves

AXES = [("x",), ("y",), ("x", "y"), ("y", "x")]


def on_ranks(body: Callable[..., Any], *held: Tensor) -> Any:
    """What every rank ends up with, [x, y, ...], of what every rank holds, [x, y, ...]."""

    def local(*ts: Tensor) -> Any:
        return map_leaves(lambda t: t[None, None], body(*(t[0, 0] for t in ts)))

    return both(mapped(local, "i/x j/y ...", "i/x j/y ..."), *held)


def by_group(rule: Callable[[Sequence[Any], int], Any], held: Tensor, axes: Sequence[str]) -> Tensor:
    """rule(what the members of a group hold, position in it), on each rank."""
    sizes = [MESH.shape[a] for a in axes]

    def rank(i: int, j: int) -> Any:
        at = [{"x": i, "y": j, **dict(zip(axes, k))} for k in itertools.product(*map(range, sizes))]
        pieces = [held[c["x"], c["y"]].numpy() for c in at]
        return np.asarray(rule(pieces, at.index({"x": i, "y": j})))

    return torch.from_numpy(np.stack([np.stack([rank(i, j) for j in range(3)]) for i in range(2)]))


Case = tuple[Callable[[Tensor, Any], Any], Callable[[Sequence[Any], int], Any]]

# What is cut has 6 entries, which 2, 3 and 6 ranks divide.
COLLECTIVES: dict[str, Case] = {
    "psum": (vf.psum, lambda ps, i: sum(ps)),
    "pmean": (vf.pmean, lambda ps, i: sum(ps) / len(ps)),
    "pmax": (vf.pmax, lambda ps, i: np.max(ps, 0)),
    "pmin": (vf.pmin, lambda ps, i: np.min(ps, 0)),
    "all_gather": (vf.all_gather, lambda ps, i: np.stack(ps)),
    "all_gather in the middle": (lambda t, a: vf.all_gather(t, a, 1), lambda ps, i: np.stack(ps, 1)),
    "all_gather at the end": (lambda t, a: vf.all_gather(t, a, -1), lambda ps, i: np.stack(ps, -1)),
    "all_gather tiled": (lambda t, a: vf.all_gather(t, a, -1, tiled=True), lambda ps, i: np.concatenate(ps, -1)),
    "all_gather to invarying": (lambda t, a: vf.all_gather(t, a, to="invarying"), lambda ps, i: np.stack(ps)),
    "all_gather to reduced": (lambda t, a: vf.all_gather(t, a, to="reduced"), lambda ps, i: np.stack(ps)),
    "psum_scatter tiled": (
        lambda t, a: vf.psum_scatter(t, a, -1, tiled=True),
        lambda ps, i: np.split(sum(ps), len(ps), -1)[i],
    ),
    "psum_scatter": (
        lambda t, a: vf.psum_scatter(t.unflatten(0, (vf.axis_size(a), -1)), a),
        lambda ps, i: sum(ps).reshape(len(ps), -1, 6)[i],
    ),
    "all_to_all tiled": (
        lambda t, a: vf.all_to_all(t, a, 0, 1, tiled=True),
        lambda ps, i: np.concatenate([np.split(p, len(ps))[i] for p in ps], 1),
    ),
    "all_to_all along one dim": (
        lambda t, a: vf.all_to_all(t, a, -1, -1, tiled=True),
        lambda ps, i: np.concatenate([np.split(p, len(ps), 1)[i] for p in ps], 1),
    ),
    "all_to_all": (
        lambda t, a: vf.all_to_all(t.unflatten(0, (vf.axis_size(a), -1)), a, 0, 2),
        lambda ps, i: np.stack([p.reshape(len(ps), -1, 6)[i] for p in ps], 2),
    ),
    "ppermute around": (lambda t, a: vf.ppermute(t, a, shift=1), lambda ps, i: ps[i - 1]),
    "ppermute back": (lambda t, a: vf.ppermute(t, a, shift=-1), lambda ps, i: ps[(i + 1) % len(ps)]),
    "ppermute of a pair": (lambda t, a: vf.ppermute(t, a, [(1, 0)]), lambda ps, i: ps[1] if i == 0 else 0 * ps[i]),
    "pbroadcast": (lambda t, a: vf.pbroadcast(t, a, 1), lambda ps, i: ps[1]),
    "axis_index": (lambda t, a: vf.axis_index(a), lambda ps, i: i),
    "axis_size": (lambda t, a: t * vf.axis_size(a), lambda ps, i: ps[i] * len(ps)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_its_definition(name: str) -> None:
    collective, rule = COLLECTIVES[name]
    held = torch.round(100 * draw(2, 3, 6, 6))
    found = on_ranks(lambda t: [collective(t, a[0] if len(a) == 1 else a) for a in AXES], held)
    for axes, value in zip(AXES, found, strict=True):
        equal(value, by_group(rule, held, axes))


@pytest.mark.parametrize("collective", [vf.psum, vf.pmean, vf.pmax, vf.all_gather, vf.all_to_all, vf.pbroadcast])
def test_over_no_axes_nothing_happens(collective: Any) -> None:
    held = draw(2, 3, 4)
    rest = (0,) if collective is vf.pbroadcast else ()
    assert torch.equal(on_ranks(lambda t: collective(t, (), *rest), held), held)


def test_collectives_of_trees_and_numbers() -> None:
    def body(t: Tensor) -> Any:
        assert vf.psum(1, ("x", "y")) == 6
        assert vf.pmax(2.5, "x") == 2.5
        return vf.psum({"a": t, "b": (t, 2 * t)}, "x")

    held = count(2, 3, 4)
    found = on_ranks(body, held)
    total = held.sum(0, keepdim=True).expand(2, 3, 4)
    assert torch.equal(found["a"], total)
    assert torch.equal(found["b"][1], 2 * total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.complex64, torch.bool])
def test_collectives_in_every_dtype(dtype: torch.dtype) -> None:
    held = count(2, 3, 4).to(dtype)
    moved = on_ranks(lambda t: [vf.ppermute(t, "y", shift=1), vf.all_gather(t, "x")], held)
    assert torch.equal(moved[0], held.roll(1, 1))
    assert torch.equal(moved[1], held.transpose(0, 1).expand(2, 3, 2, 4).contiguous())
    if dtype is not torch.bool:  # sums of small whole numbers are exact
        total = on_ranks(lambda t: vf.psum(t, "y"), held)
        assert torch.equal(total, count(2, 3, 4).sum(1, keepdim=True).to(dtype).expand(2, 3, 4))


def test_axis_size_is_a_number_and_axis_index_a_tensor_without_dims() -> None:
    seen = []

    def body(t: Tensor) -> Tensor:
        index = vf.axis_index(("x", "y"))
        seen.append((vf.axis_size(("x", "y")), tuple(index.shape), index.dtype))
        return t + index

    on_ranks(body, count(2, 3, 1))
    assert set(seen) == {(6, (), torch.int64)}


def test_a_matmul_over_cut_rows_scattered_or_left_as_parts() -> None:
    """One reduce_scatter, in the region or, for parts that leave it, outside."""
    x, w = draw(4, 8), draw(8, 4)
    specs = ("a b/x", "b/x c")
    scattered = mapped(lambda x, w: vf.psum_scatter(x @ w, "x", tiled=True), specs, "a/x c", LINE)
    parts = mapped(lambda x, w: vf.pcast(x @ w, "x", to="unreduced"), specs, "a c {sum: x}", LINE)
    for f in (scattered, lambda x, w: vf.reshard(parts(x, w), "a/x c")):
        equal(both(f, x, w, mesh=LINE), x @ w)
        assert counts(f, x, w, mesh=LINE) == [("reduce_scatter", "forward")]


# ---- rows, as many as data says


def ragged(rows: Tensor, sends: Tensor) -> Tensor:
    """Rows grouped by destination go there; what arrives is grouped by source."""
    n = vf.axis_size("x")
    table = vf.all_gather(sends, "x")  # [source, destination]
    me = vf.axis_index("x")
    starts = sends.cumsum(0) - sends
    lands = (table.cumsum(0) - table)[me]
    receives = table[:, me]
    out = torch.zeros(n * rows.shape[0], rows.shape[1], dtype=rows.dtype)
    return vf.ragged_all_to_all(rows, out, starts, sends, lands, receives, "x")


SENDS = torch.tensor([[2, 0, 1, 1], [0, 0, 4, 0], [1, 1, 1, 1], [0, 3, 0, 0]])


def ragged_reference(rows: Any, sends: Any) -> Any:
    n, m, d = rows.shape
    out = np.zeros((n, n * m, d))
    for target in range(n):
        at = 0
        for source in range(n):
            start, k = sends[source, :target].sum(), sends[source, target]
            out[target, at : at + k] = rows[source, start : start + k]
            at += k
    return out


def test_ragged_all_to_all_and_its_gradient() -> None:
    rows, weights = draw(4, 4, 3), draw(4, 16, 3, seed=1)
    f = mapped(lambda r, s: ragged(r[0], s[0])[None], "n/x ...", "n/x ...", LINE)
    found = both(f, rows, SENDS, mesh=LINE)
    equal(found, ragged_reference(rows.numpy(), SENDS.numpy()))
    back = both(grad(lambda r: (f(r, SENDS) * weights).sum()), rows, mesh=LINE)
    for source in range(4):
        for row in range(4):
            unit = np.zeros((4, 4, 3))
            unit[source, row] = 1
            landed = torch.from_numpy(ragged_reference(unit, SENDS.numpy()))
            equal(back[source, row], (landed * weights).sum((0, 1)))
