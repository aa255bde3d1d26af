"""`shard_map` by behaviour: derivatives of every kind, taken outside and inside, and what they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from region_calls import LINE, MESH, both, count, counts, draw, equal, mapped, same_bits
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import vescale_fn as vf
from vescale_fn.tree import flatten


def layer(x: Tensor, w: Tensor) -> Tensor:
    """Rows of x over x, columns of w and of the result over y; the result is normalized over all of it."""
    y = (x @ w).sin()
    return y / vf.pmean((y * y).sum() + 1, ("x", "y"))


LAYER = mapped(layer, ("a/x k", "k b/y"), "a/x b/y")


def plain(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).sin()
    return y / ((y * y).sum() / 6 + 1)


X, W, VX, VW, CT = draw(4, 2), draw(2, 6, seed=1), draw(4, 2, seed=2), draw(2, 6, seed=3), draw(4, 6, seed=4)

Transform = Callable[[Callable[[Tensor, Tensor], Tensor]], Callable[[Tensor, Tensor], Any]]

TRANSFORMS: dict[str, Transform] = {
    "jvp": lambda f: lambda x, w: jvp(f, (x, w), (VX, VW)),
    "vjp": lambda f: lambda x, w: vjp(f, x, w)[1](CT),
    "grad": lambda f: grad(lambda x, w: f(x, w).exp().sum(), (0, 1)),
    "grad of one": lambda f: grad(lambda x, w: f(x, w).exp().sum(), 1),
    "grad of grad": lambda f: grad(lambda x, w: grad(lambda x, w: f(x, w).exp().sum(), 1)(x, w).sin().sum(), (0, 1)),
    "jvp of grad": lambda f: lambda x, w: jvp(grad(lambda x, w: f(x, w).exp().sum()), (x, w), (VX, VW)),
    "grad of jvp": lambda f: grad(lambda x, w: jvp(f, (x, w), (VX, VW))[1].sin().sum(), (0, 1)),
    "jvp of jvp": lambda f: lambda x, w: jvp(lambda w: jvp(f, (x, w), (VX, VW))[1], (w,), (VW,)),
    "jacrev": lambda f: jacrev(f),
    "jacfwd": lambda f: jacfwd(f, 1),
    "hessian": lambda f: hessian(lambda x, w: f(x, w).exp().sum()),
    "vmap": lambda f: lambda x, w: vmap(f, (0, None))(torch.stack([x, 2 * x]), w),
    "vmap of grad": lambda f: (
        lambda x, w: vmap(grad(lambda x, w: f(x, w).exp().sum(), (0, 1)), (0, None))(torch.stack([x, 2 * x, x]), w)
    ),
    "grad of vmap": lambda f: (
        lambda x, w: grad(lambda w: vmap(f, (0, None))(torch.stack([x, 2 * x]), w).exp().sum())(w)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_outside(name: str) -> None:
    transform = TRANSFORMS[name]
    expected = flatten(transform(plain)(X, W))[0]
    found = flatten(both(transform(LAYER), X, W))[0]
    for a, b in zip(found, expected, strict=True):
        equal(a, b)


def test_a_linearization_is_its_jvp() -> None:
    value, tangent = linearize(plain, X, W)
    _, pushed = jvp(LAYER, (X, W), (VX, VW))
    equal(pushed, tangent(VX, VW))
    equal(LAYER(X, W), value)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(("x_spec", "w_spec"), [("a/x k", "k b"), ("a k", "k b/x"), ("a k/x", "k/x b"), ("a k", "k b")])
def test_gradients_of_whole_and_of_cut_arguments(x_spec: str, w_spec: str, checked: bool) -> None:
    contracted = x_spec.endswith("k/x")
    out = "a/x b" if x_spec == "a/x k" else "a b/x" if w_spec == "k b/x" else "a b"

    def body(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return (vf.psum(y, "x") if contracted else y).sin()

    f = mapped(body, (x_spec, w_spec), out, LINE, check_vma=checked)
    x, w = draw(4, 4), draw(4, 4, seed=1)
    found = both(grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1)), x, w, mesh=LINE)
    expected = grad(lambda x, w: ((x @ w).sin() ** 2).sum(), (0, 1))(x, w)
    for a, b in zip(found, expected, strict=True):
        equal(a, b)


@pytest.mark.parametrize("axes", ["x", ("x", "y")], ids=str)
def test_the_table_of_gradients_inside(axes: Any) -> None:
    """A weight that all ranks share, a number for each: its gradient is the whole one, wherever the loss is summed.
    Unchecked it is each rank's own, or as many times too large as there are ranks."""
    spec = "d/x" if axes == "x" else "d/(x y)"
    n = 2 if axes == "x" else 6
    w, d = torch.tensor(1.0, dtype=torch.float64), count(n) + 1
    for checked, reduced, expected in [
        (True, False, d.sum().expand(n)),
        (True, True, d.sum().expand(n)),
        (False, False, d),
        (False, True, n * d),
    ]:
        loss = (lambda w, d: vf.psum((w * d).sum(), axes)) if reduced else (lambda w, d: (w * d).sum())
        given = mapped(lambda w, d: grad(loss)(w, d)[None], ("", spec), spec, check_vma=checked)  # noqa: B023
        closed = mapped(lambda d: grad(lambda w: loss(w, d))(w)[None], spec, spec, check_vma=checked)  # noqa: B023
        assert torch.equal(both(given, w, d), expected)
        assert torch.equal(both(closed, d), expected)


def test_closed_over_values_have_gradients() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return mapped(lambda x: (x @ w).sin(), "a/(x y) k", "a/(x y) b")(x).sum()

    x, w = draw(6, 2), draw(2, 3, seed=1)
    f = grad(loss, (0, 1))
    for a, b in zip(both(f, x, w), grad(lambda x, w: (x @ w).sin().sum(), (0, 1))(x, w), strict=True):
        equal(a, b)
    assert counts(f, x, w) == [("all_reduce", "backward")]


# ---- transposes, by what they send


@pytest.mark.parametrize(
    ("body", "in_spec", "out_spec", "forward", "backward"),
    [
        (lambda t: t, "a", "a", [], []),
        (lambda t: t, "a/x", "a/x", [], []),
        (lambda t: t, "a", "a/x", [], ["all_reduce"]),
        (lambda t: vf.psum(t, "x"), "a/x", "a", ["all_reduce"], []),
        (lambda t: vf.pcast(t, "x", to="varying"), "a", "a/x", [], ["all_reduce"]),
        (lambda t: vf.all_gather(t, "x", tiled=True), "a/x", "a/x", ["all_gather"], ["reduce_scatter"]),
        (lambda t: vf.all_gather(t, "x", tiled=True, to="invarying"), "a/x", "a", ["all_gather"], []),
        (lambda t: vf.psum_scatter(t, "x", tiled=True), "a/x", "a/x", ["reduce_scatter"], ["all_gather"]),
        (lambda t: vf.all_to_all(t, "x", tiled=True), "a/x", "a/x", ["all_to_all"], ["all_to_all"]),
        (lambda t: vf.ppermute(t, "x", shift=1), "a/x", "a/x", ["ppermute"], ["ppermute"]),
        (lambda t: vf.pbroadcast(t, "x", 1), "a/x", "a/x", ["broadcast"], ["all_reduce"]),
    ],
)
def test_what_a_transpose_sends(
    body: Callable[[Tensor], Tensor], in_spec: str, out_spec: str, forward: list[str], backward: list[str]
) -> None:
    """The region alone, from a cotangent to a cotangent in the layouts of its specs."""
    f = mapped(body, in_spec, out_spec)
    x = count(12)
    y = f(x)

    @vf.pjit(mesh=MESH, in_shardings=(in_spec, out_spec), out_shardings=(out_spec, in_spec))
    def pull(x: Tensor, ct: Tensor) -> Any:
        value, transpose = vjp(f, x)
        return value, transpose(ct)[0]

    found = pull.lower(x, torch.ones_like(y)).collectives
    assert sorted(c.kind for c in found) == sorted(forward + backward)


def test_unchecked_a_sum_is_its_own_transpose() -> None:
    body = lambda t: grad(lambda t: vf.psum(t, "x").sum())(t)  # noqa: E731
    assert torch.equal(both(mapped(body, "a/x", "a/x", check_vma=False), count(4)), torch.full((4,), 2.0).double())
    assert torch.equal(both(mapped(body, "a/x", "a/x"), count(4)), torch.ones(4).double())


# ---- other kinds of values


def test_whole_numbers_go_along_and_have_no_gradient() -> None:
    table, at = draw(6, 3), torch.tensor([5, 0, 0, 3])
    f = mapped(lambda t, i: (t[i] ** 2, i + 1), ("v k", "n/x"), ("n/x k", "n/x"))
    g = grad(lambda t, i: f(t, i)[0].sum())
    equal(both(g, table, at), grad(lambda t: (t[at] ** 2).sum())(table))
    _, tangents = jvp(lambda t: f(t, at)[0], (table,), (torch.ones_like(table),))
    equal(tangents, 2 * table[at])
    same_bits(both(f, table, at)[1], at + 1)
    with pytest.raises(RuntimeError, match=r"floating point|real number"):
        grad(lambda i: f(table, i)[0].sum())(at)


def test_scalars_between_forward_and_backward() -> None:
    """A residual without dims varies all the same."""
    f = mapped(lambda t: t * t.sum().sin(), "a/x", "a/x")
    x = draw(6)

    def reference(x: Tensor) -> Tensor:
        return torch.cat([t * t.sum().sin() for t in (x[:3], x[3:])])

    equal(both(grad(lambda x: f(x).sum()), x), grad(lambda x: reference(x).sum())(x))


def test_a_residual_is_held_once() -> None:
    """The argument itself, not a copy that crossed the edge of the region."""
    n = 1000
    f = mapped(lambda x, w: x * w, ("a/x", "a/x"), "a/x", LINE)
    step = vf.pjit(grad(lambda x, w: f(x, w).sum(), (0, 1)), mesh=LINE)
    args = [vf.device_put(draw(4 * n), "a/x", LINE) for _ in range(2)]
    stats = step.lower(*args).memory_analysis()
    plain = vf.pjit(grad(lambda x, w: (x * w).sum(), (0, 1)), mesh=LINE).lower(*args).memory_analysis()
    assert stats.peak == plain.peak


# ---- computed again


def deep(t: Tensor, w: Tensor) -> Tensor:
    return vf.psum(t @ w, "x").sin()


@pytest.mark.parametrize("inside", [True, False])
def test_remat_of_a_region_and_in_a_region(inside: bool) -> None:
    body = vf.call(deep, remat=True) if inside else deep
    f = mapped(body, ("a k/x", "k/x b"), "a b", LINE)
    step = f if inside else vf.call(f, remat=True)
    x, w = draw(4, 8), draw(8, 4, seed=1)
    g = grad(lambda x, w: (step(x, w) ** 2).sum(), (0, 1))
    expected = grad(lambda x, w: ((x @ w).sin() ** 2).sum(), (0, 1))(x, w)
    for a, b in zip(both(g, x, w, mesh=LINE), expected, strict=True):
        equal(a, b)
    assert Counter(k for k, _ in counts(g, x, w, mesh=LINE))["all_reduce"] == 2


def test_a_policy_keeps_what_a_collective_brought() -> None:
    """The sum is not computed, or sent, again."""

    def body(t: Tensor, w: Tensor) -> Tensor:
        return vf.named(vf.psum(t @ w, "x"), "total").sin()

    keep = vf.schedules.remat(body, vf.schedules.names("total"))
    f = mapped(keep, ("a k/x", "k/x b"), "a b", LINE)
    x, w = draw(4, 8), draw(8, 4, seed=1)
    g = grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))
    assert Counter(k for k, _ in counts(g, x, w, mesh=LINE))["all_reduce"] == 1


# ---- whole layers


def test_fully_sharded_weights() -> None:
    """Gathered to a reduced value; the gradient is scattered back, summed."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        whole = vf.all_gather(w, "x", tiled=True, to="reduced")
        return vf.psum(((x @ whole).sin() ** 2).sum(), "x")

    f = mapped(body, ("a/x k", "k/x b"), "", LINE)
    x, w = draw(8, 4), draw(4, 4, seed=1)
    g = grad(f, 1)
    equal(both(g, x, w, mesh=LINE), grad(lambda w: ((x @ w).sin() ** 2).sum())(w))
    args = vf.device_put(x, "a/x k", LINE), vf.device_put(w, "k/x b", LINE)
    step = vf.pjit(g, mesh=LINE, out_shardings="k/x b")
    assert [c.kind for c in step.lower(*args).collectives] == ["all_gather", "reduce_scatter"]


class Gathered(torch.autograd.Function):
    """The same, with a backward of the user's own."""

    @staticmethod
    def forward(w: Tensor) -> Tensor:
        return vf.all_gather(w, "x", tiled=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return vf.psum_scatter(ct, "x", tiled=True)


def test_fully_sharded_weights_by_a_function_with_its_own_backward() -> None:
    f = mapped(lambda x, w: (x @ Gathered.apply(w)).sin(), ("a/x k", "k/x b"), "a/x b", LINE)
    x, w = draw(8, 4), draw(4, 4, seed=1)
    g = grad(lambda w: (f(x, w) ** 2).sum())
    equal(both(g, w, mesh=LINE), grad(lambda w: ((x @ w).sin() ** 2).sum())(w))


@pytest.mark.parametrize("n", [2, 5])
def test_microbatches_are_summed_once(n: int) -> None:
    """Gradients of a reduced weight are parts of a sum, and a loop adds them without sending anything."""

    def step(w: Tensor, xs: Tensor) -> Tensor:
        def add(total: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return total + grad(lambda w: ((x @ w).sin() ** 2).sum())(vf.pcast(w, "x", to="reduced")), None

        start = vf.pcast(torch.zeros_like(w), "x", to="unreduced")
        return vf.psum(vf.scan(add, start, xs)[0], "x")

    f = mapped(step, ("k b", "n a/x k"), "k b", LINE)
    w, xs = draw(3, 2), draw(n, 4, 3, seed=1)
    equal(both(f, w, xs, mesh=LINE), grad(lambda w: ((xs.flatten(0, 1) @ w).sin() ** 2).sum())(w))
    assert [k for k, _ in counts(f, w, xs, mesh=LINE)] == ["all_reduce"]


def test_gradients_of_regions_in_regions_and_of_axes_of_the_solver() -> None:
    """y is the solver's in the outer region, and manual in the inner one."""

    def inner(t: Tensor, w: Tensor) -> Tensor:
        return vf.psum(t @ w, "y").sin()

    def outer(t: Tensor, w: Tensor) -> Tensor:
        h = vf.shard_map(inner, in_specs=("a k/y", "k/y b"), out_specs="a b", axis_names={"y"})(t, w)
        return vf.psum((h * h).sum(0), "x")

    f = mapped(outer, ("a/x k", "k b"), "b", axis_names={"x"})
    x, w = draw(4, 6), draw(6, 3, seed=1)
    g = grad(lambda x, w: f(x, w).exp().sum(), (0, 1))
    expected = grad(lambda x, w: ((x @ w).sin() ** 2).sum(0).exp().sum(), (0, 1))(x, w)
    for a, b in zip(both(g, x, w), expected, strict=True):
        equal(a, b)
