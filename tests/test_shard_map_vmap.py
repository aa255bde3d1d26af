"""`shard_map` by behaviour: vmap, and what else runs in a region or around it. Each call runs at once and as a program.

Numbers are those of the groups of JAX's own tests; (56), (58) and (62) are in the table of `test_shard_map`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from region_calls import LINE, MESH, both, count, counts, draw, equal, mapped, same_bits
from torch import Tensor
from torch.func import grad, vmap

import vescale_fn as vf

PAIR = vf.make_mesh(x=2)

# ---- (55), (57): vmap


def layer(x: Tensor, w: Tensor) -> Tensor:
    return vf.psum((x @ w).sin(), "x") + vf.all_gather(x, "x", 1, tiled=True, to="invarying").sum()


def plain(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, :2] @ w[:2]).sin() + (x[:, 2:] @ w[2:]).sin() + x.sum()


X, W = draw(5, 3, 4), draw(5, 4, 2, seed=1)


@pytest.mark.parametrize("out_dim", [0, 1, 2, -1])
@pytest.mark.parametrize("in_dims", [*itertools.product([0, 1, 2, -1, None], repeat=2)][:-1], ids=str)
def test_vmap_over_every_dim(in_dims: tuple[int | None, int | None], out_dim: int) -> None:
    """One call for each example, whichever dims it is in, and whichever dim the results come in."""
    f = mapped(layer, ("a k/x", "k/x b"), "a b", PAIR)
    xs, ws = ([t[i] for i in range(5)] if d is not None else [t[0]] * 5 for t, d in zip((X, W), in_dims))
    given = [t[0] if d is None else t.movedim(0, d) for t, d in zip((X, W), in_dims)]
    equal(both(vmap(f, in_dims, out_dim), *given, mesh=PAIR), torch.stack([*map(plain, xs, ws)], out_dim))


def test_vmap_in_vmap() -> None:
    f = mapped(layer, ("a k/x", "k/x b"), "a b", PAIR)
    found = both(vmap(vmap(f, (None, 0)), (0, None)), X[:2], W[:3], mesh=PAIR)
    equal(found, torch.stack([torch.stack([plain(x, w) for w in W[:3]]) for x in X[:2]]))


@pytest.mark.parametrize("inside", [False, True])
def test_vmap_of_what_is_closed_over(inside: bool) -> None:
    """By a region in the mapped function, or by a mapped function in the region."""
    w = W[0]

    def around(x: Tensor, w: Tensor) -> Tensor:
        return mapped(lambda x: vf.psum((x @ w[:2]).sin(), "x"), "a k/x", "a b", PAIR)(x)

    def expected(x: Tensor, w: Tensor) -> Tensor:
        return (x[:, :2] @ w[:2]).sin() + (x[:, 2:] @ w[:2]).sin()

    if inside:
        f = mapped(lambda x: vmap(lambda row: vf.psum((row @ w[:2]).sin(), "x"))(x), "a k/x", "a b", PAIR)
        equal(both(f, X[0], mesh=PAIR), expected(X[0], w))
    else:
        equal(both(vmap(around), X, W, mesh=PAIR), torch.stack([*map(expected, X, W)]))


def test_vmap_draws_and_prints_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    def body(t: Tensor) -> Tensor:
        vf.debug_print("{:.0f}", t.sum())
        return 0 * t + torch.rand(2, dtype=t.dtype)

    f = vmap(mapped(body, "n/x", "n/x", PAIR), randomness="different")
    drawn = f(count(3, 4))
    assert torch.equal(drawn[:, :2], drawn[:, 2:])  # ranks draw alike
    assert len(set(drawn.flatten().tolist())) == 6
    assert capsys.readouterr().out.split("\n")[:3] == ["x=0: 1", "x=0: 9", "x=0: 17"]


def test_names_of_vmap_are_no_axes() -> None:
    with pytest.raises(ValueError, match=r"^vf.psum: no axis 'batch'\. The region is over x\.$"):
        vmap(mapped(lambda t: vf.psum(t, "batch"), "n/x", "n", PAIR))(count(3, 4))


# ---- (59): what nobody reads is not computed, nor sent


@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_result_sends_nothing(used: int) -> None:
    f = mapped(lambda a: (a * 2, vf.all_gather(a, "x", tiled=True)), "n/x", ("n/x", "n/x"), PAIR)
    step = lambda a: f(a)[used]  # noqa: E731
    assert counts(step, count(4), mesh=PAIR) == [("all_gather", "forward")] * used
    gradient = grad(lambda a: step(a).sum())
    assert counts(gradient, count(4), mesh=PAIR) == [("reduce_scatter", "backward")] * used
    equal(both(gradient, count(4), mesh=PAIR), torch.full((4,), 2.0).double())


def test_an_unused_argument_and_an_unused_collective_cost_nothing() -> None:
    def body(a: Tensor, b: Tensor) -> Tensor:
        vf.psum(b.sin(), "x")
        return a * 2

    a, b = (vf.device_put(count(400), "n/x", PAIR) for _ in range(2))
    lowered = vf.pjit(mapped(body, ("n/x", "n/x"), "n/x", PAIR)).lower(a, b)
    alone = vf.pjit(mapped(lambda a: a * 2, "n/x", "n/x", PAIR)).lower(a)
    assert not list(lowered.collectives)
    assert lowered.cost_analysis().flops == alone.cost_analysis().flops


# ---- (60): keys over ranks


def test_keys_are_cut_like_any_value() -> None:
    """Each draws the numbers that it draws on one device."""

    def draws(keys: Tensor) -> Tensor:
        rows = []
        for key in keys:
            with vf.random.scope(key):
                rows.append(torch.rand(3))
        return torch.stack(rows)

    keys = torch.stack([vf.random.key(i) for i in range(4)])
    assert torch.equal(both(mapped(draws, "n/x two", "n/x d", PAIR), keys, mesh=PAIR), draws(keys))


# ---- (61): a rank places nothing


@pytest.mark.parametrize("put", [vf.device_put, vf.local_put])
@pytest.mark.parametrize("lowered", [False, True])
def test_a_rank_places_nothing(put: Any, lowered: bool) -> None:
    f = mapped(lambda a: put(a, "n", PAIR), "n/x", "n/x", PAIR)
    with pytest.raises(ValueError, match="in the region of <lambda>") as error:
        (vf.pjit(f, mesh=PAIR) if lowered else f)(count(4))
    assert str(error.value) == (
        f"vf.{put.__name__}: in the region of <lambda>, a rank holds its part of a value and can place no other. "
        "Write the collective, as in vf.reshard(x, 'b/dp d -> b d'), or place the value before the region."
    )


def test_a_step_places_nothing() -> None:
    with pytest.raises(ValueError, match="being traced") as error:
        vf.pjit(lambda a: vf.device_put(a, "n/x", PAIR), mesh=PAIR)(count(4))
    assert str(error.value) == (
        "vf.device_put: <lambda> is being traced, and its values have no place yet. Write vf.reshard(x, spec), "
        "which says where a value is to live; or place it before the call."
    )


def test_the_device_and_the_dtype_may_change() -> None:
    f = mapped(lambda a: a.to("cpu").to(torch.float32).double() * 2, "n/x", "n/x", PAIR)
    assert torch.equal(both(f, count(4), mesh=PAIR), count(4) * 2)


# ---- (62): writes in place


def test_writes_in_place() -> None:
    """Into what the region made, part by part, and into an argument, whose caller keeps what it was."""

    def body(a: Tensor) -> Tensor:
        total = vf.pcast(torch.zeros(2, dtype=a.dtype), "x", to="varying")
        for i in range(2):
            total[i] += a[i] * (i + 1)
        return a.add_(total)

    x = count(4)
    assert both(mapped(body, "n/x", "n/x", PAIR), x, mesh=PAIR).tolist() == [0, 3, 4, 9]
    assert torch.equal(x, count(4))


# ---- (63), (89): the solver's axes, manual axes, and steps in each other


def test_a_constraint_on_an_axis_of_the_solver() -> None:
    """In the region the solver keeps y where it is told to, and sends nothing along it."""
    f = mapped(lambda a, w: vf.psum(vf.reshard(a @ w, "b d/y").sin(), "x"), ("b k/x", "k/x d"), "b d", axis_names={"x"})
    a, w = draw(4, 6), draw(6, 6, seed=1)
    equal(both(f, a, w), (a[:, :3] @ w[:3]).sin() + (a[:, 3:] @ w[3:]).sin())
    step = vf.pjit(f, mesh=MESH, out_shardings="b d/y")
    assert [(c.kind, c.axes, c.shape) for c in step.lower(a, w).collectives] == [("all_reduce", ("x",), (4, 2))]


def test_a_constraint_on_a_manual_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="manual here") as error:
        mapped(lambda a: vf.reshard(a, "n/x"), "n/x", "n/x", PAIR)(count(4))
    assert str(error.value) == (
        "vf.reshard: 'n/x' names 'x', which is manual here: a rank cannot ask for a layout along it. Write the "
        "collective as a pattern, 'before -> after', or leave the axis out."
    )


def test_step_region_step_region() -> None:
    """Constraints, a region over x, a step in it, a region over y in that: values and gradients are the plain ones."""
    inner = mapped(lambda t: vf.psum(t, "y"), "a b/y", "a b", axis_names={"y"})

    @vf.pjit
    def jitted(t: Tensor) -> Tensor:
        return inner(t).cos()

    def outer(t: Tensor, w: Tensor) -> Tensor:
        return vf.psum(jitted(vf.reshard(t @ w, "a b/y")), "x")

    region = mapped(outer, ("a k/x", "k/x b"), "a b", axis_names={"x"})

    def step(x: Tensor, w: Tensor) -> Tensor:
        return region(vf.reshard(x * 2, "a/y k"), w).sin()

    def reference(x: Tensor, w: Tensor) -> Tensor:
        halves = [(2 * x)[:, i : i + 2] @ w[i : i + 2] for i in (0, 2)]
        return sum(h.reshape(6, 3, 2).sum(1).cos() for h in halves).sin()  # type: ignore[union-attr]

    x, w = draw(6, 4), draw(4, 6, seed=1)
    for f, g in (
        (step, reference),
        *((grad(lambda x, w, h=h: (h(x, w) ** 2).sum(), i) for h in (step, reference)) for i in (0, 1)),
    ):
        equal(f(x, w), g(x, w))
        equal(vf.pjit(f, mesh=MESH)(x, w), g(x, w))
    sent = vf.pjit(step, mesh=MESH).lower(x, w).collectives
    assert {c.axes for c in sent if c.kind == "all_reduce"} == {("x",), ("y",)}


def test_a_step_in_a_region_is_its_function() -> None:
    step = vf.pjit(lambda t: vf.psum(t, "x"))
    same_bits(both(mapped(step, "n/x", "n", LINE), count(8), mesh=LINE), count(4, 2).sum(0))


# ---- (64): prints


@pytest.mark.parametrize("per_rank", [False, True])
def test_prints_of_every_rank(per_rank: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of ranks; a value that is cut along the solver's axes prints once, or as each rank holds it."""

    def body(t: Tensor) -> Tensor:
        vf.debug_print("{}", t.sum(), per_rank=per_rank)
        return t

    both(mapped(body, "n/(x y)", "n/(x y)"), count(6))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == lines[6:]
    assert [line.rpartition(" ")[2] for line in lines[:6]] == [f"{float(i)}" for i in range(6)]
    assert all(f"x={i // 3}" in line and f"y={i % 3}" in line for i, line in enumerate(lines[:6]))
