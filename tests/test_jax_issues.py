"""Faults that users of JAX reported, as they would look here: wrong gradients, and what does not compose.

Each test bears the number of an issue in github.com/jax-ml/jax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from region_calls import LINE, MESH, both, count, counts, draw, equal, mapped, same_bits
from torch import Tensor
from torch.func import grad, jacrev, vmap

import vescale_fn as vf

PAIR = vf.make_mesh(x=2)

# ---- wrong gradients


@pytest.mark.parametrize("reduced", [False, True])
def test_3970_a_summed_loss_does_not_count_n_times(reduced: bool) -> None:
    """The gradient of a sum over ranks, taken on each rank: the whole one."""

    def step(w: Tensor, d: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            local = (w * d).sum()
            return vf.psum(local, "x") if reduced else local

        return grad(loss)(w)

    w, d = torch.tensor(1.0), torch.arange(1.0, 5)
    assert both(mapped(step, ("", "d/x"), "", LINE), w, d, mesh=LINE) == 10


DATA = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])


def test_36886_gradients_of_closed_over_parameters_are_summed_unless_cast() -> None:
    """vmap gives the gradient of each row; a region gives their sum, and each rank's own after a cast."""
    w = torch.tensor([2.0, 3.0])
    loss = lambda w, row: (w * row).sum()  # noqa: E731
    per_row = vmap(grad(loss), (None, 0))(w, DATA)

    def summed(rows: Tensor) -> Tensor:
        return grad(lambda w: loss(w, rows[0]))(w)[None]

    def own(rows: Tensor) -> Tensor:
        return grad(lambda w: loss(w, rows[0]))(vf.pcast(w, "x", to="varying"))[None]

    assert torch.equal(both(mapped(summed, "b/x d", "b/x d", LINE), DATA, mesh=LINE), per_row.sum(0).expand(4, 2))
    assert torch.equal(both(mapped(own, "b/x d", "b/x d", LINE), DATA, mesh=LINE), per_row)


class Copied(torch.autograd.Function):
    """What untyped code writes before a product with a part of a weight: the gradient is summed by hand."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return vf.psum(ct, "x")


def test_19175_a_redundant_psum_in_a_backward_warns() -> None:
    """Typed, the gradient is summed already; untyped, the function does it, and the edge divides."""
    w, x = draw(3), draw(4, 3, seed=1)
    expected = grad(lambda w: (w * x).sin().sum())(w)

    def loss(copy: Callable[[Tensor], Tensor], **options: Any) -> Any:
        return mapped(lambda w, x: vf.psum((copy(w) * x).sin().sum(), "x"), ("d", "b/x d"), "", PAIR, **options)

    with pytest.warns(UserWarning, match="the sum is 2 times it"):
        equal(grad(loss(Copied.apply))(w, x), 2 * expected)
    equal(both(grad(loss(lambda w: w)), w, x, mesh=PAIR), expected)
    equal(both(grad(loss(lambda w: w, check_vma=False)), w, x, mesh=PAIR), expected)


class Scaled(torch.autograd.Function):
    """w * x, with a backward that knows of one rank only."""

    @staticmethod
    def forward(w: Tensor, x: Tensor) -> Tensor:
        return w * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        w, x = ctx.saved_tensors
        return (ct * x).sum(0), ct * w


def test_19175_a_backward_that_knows_of_one_rank_is_right_on_all() -> None:
    f = mapped(lambda w, x: vf.psum(Scaled.apply(w, x).sin().sum(), "x"), ("d", "b/x d"), "", PAIR)
    w, x = draw(3), draw(4, 3, seed=1)
    equal(both(grad(f), w, x, mesh=PAIR), grad(lambda w: (w * x).sin().sum())(w))
    assert [k for k, phase in counts(grad(f), w, x, mesh=PAIR) if phase == "backward"] == ["all_reduce"]


@pytest.mark.parametrize("power", [2, 3, -1])
def test_18711_integer_powers(power: int) -> None:
    f = mapped(lambda w, x: vf.psum(((w * x) ** power).sum(), "x"), ("d", "b/x d"), "", PAIR)
    w, x = draw(3), draw(4, 3, seed=1)
    equal(both(grad(f), w, x, mesh=PAIR), grad(lambda w: ((w * x) ** power).sum())(w))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return 2 * ct


@pytest.mark.parametrize("checked", [True, False])
def test_21855_a_backward_of_the_users_own_sends_nothing_more(checked: bool) -> None:
    """Argument and result are cut alike: neither forward nor backward has a collective."""
    f = mapped(lambda x: Double.apply(x).sin(), "b/x", "b/x", PAIR, check_vma=checked)
    args = vf.device_put(draw(4), "b/x", PAIR), vf.device_put(draw(4), "b/x", PAIR)
    step = vf.pjit(lambda x, ct: torch.func.vjp(f, x)[1](ct)[0])
    assert not list(step.lower(*args).collectives)
    equal(step(*args), 2 * (2 * draw(4)).cos() * draw(4))


@pytest.mark.parametrize("spec", ["b/x d", "b d/x", "b d"])
def test_25844_gradients_lie_where_their_parameters_do(spec: str) -> None:
    """The solver is free to choose, and keeps them there: nothing has to move for an update."""
    x = vf.device_put(draw(4, 4), spec, LINE)
    f = mapped(lambda t: t.sin(), spec, spec, LINE)
    out = vf.pjit(grad(lambda x: f(x).sum()))(x)
    assert [s.data.shape for s in out.addressable_shards] == [s.data.shape for s in x.addressable_shards]
    jacobian = both(jacrev(f), draw(4, 4), mesh=LINE)
    equal(jacobian, jacrev(torch.sin)(draw(4, 4)))


class Mean(torch.autograd.Function):
    """A mean over ranks, with its collectives in forward and in backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return vf.pmean(x, "x")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return vf.pcast(ct, "x", to="varying") / vf.axis_size("x")


def test_7047_collectives_in_both_halves_of_a_function_of_the_users_own() -> None:
    f = mapped(lambda x: Mean.apply(x).sin(), "b/x", "b", LINE)
    g = grad(lambda x: f(x).sum())
    x = draw(8)
    equal(both(g, x, mesh=LINE), grad(lambda x: x.reshape(4, 2).mean(0).sin().sum())(x))


# ---- what composes


@pytest.mark.parametrize("in_dim", [0, 1])
def test_34249_vmap_of_a_region_with_a_sum(in_dim: int) -> None:
    f = mapped(lambda x: vf.psum(x, "x"), "b/x", "b", LINE)
    x = count(8, 8)
    expected = (x if in_dim == 0 else x.T).reshape(8, 4, 2).sum(1)
    assert torch.equal(both(vmap(f, in_dim), x, mesh=LINE), expected)


def test_23476_a_batch_may_itself_be_cut() -> None:
    """vmap over a dim that lies on another axis: it stays there."""
    f = mapped(lambda x: vf.psum(x * x, "x"), "b/x", "b", axis_names={"x"})
    x = vf.device_put(count(3, 4), "n/y b/x", MESH)
    step = vf.pjit(vmap(f), out_shardings="n/y b")
    same_bits(step(x), (count(3, 4) ** 2).reshape(3, 2, 2).sum(1))
    assert [(c.kind, c.axes, c.shape) for c in step.lower(x).collectives] == [("all_reduce", ("x",), (1, 2))]


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "17691 erf": torch.erf,
    "18851 erfinv": torch.erfinv,
    "15894 a call": lambda t: vf.call(torch.tanh, t),
    "20335 pmax": lambda t: (t - vf.pmax(t.detach(), "x")).exp(),
    "lgamma": torch.lgamma,
    "digamma": lambda t: torch.digamma(t + 2),
    "igamma": lambda t: torch.special.gammainc(t + 1, t + 1),
    "bessel": torch.special.i0e,
    "cumsum": lambda t: t.cumsum(0),
    "cummax": lambda t: t.cummax(0).values,
    "sort": lambda t: t.sort(0).values,
    "argsort": lambda t: t[t.argsort(0)[:, 0]],
    "fft": lambda t: torch.fft.rfft(t, dim=1).abs(),
    "svd": lambda t: torch.linalg.svdvals(t),
    "solve": lambda t: torch.linalg.solve(t @ t.T + torch.eye(2, dtype=t.dtype), t),
    "conv": lambda t: torch.conv1d(t[None], torch.ones(2, 2, 2, dtype=t.dtype)),
    "unfold": lambda t: t.unfold(1, 2, 1),
    "bucketize": lambda t: torch.bucketize(t, torch.linspace(0, 1, 5, dtype=t.dtype)),
    "one hot": lambda t: torch.nn.functional.one_hot((4 * t).long().clamp(0, 3), 4),
    "diag": lambda t: t[:, :2].diag(),
    "tril": lambda t: t.tril(),
    "logcumsumexp": lambda t: t.logcumsumexp(1),
    "nextafter": lambda t: torch.nextafter(t, t + 1),
    "frexp": lambda t: torch.frexp(t).mantissa,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_17691_every_function_has_a_rule(name: str) -> None:
    """Of what a rank holds any function can be taken, with a rule of its own or without."""
    function, x = FUNCTIONS[name], draw(4, 3).sigmoid()
    f = mapped(lambda t: function(t)[None], "b/x k", "n/x ...", PAIR)
    halves = [x[:2], x[2:]]
    if name == "20335 pmax":
        expected = [(t - torch.maximum(*halves)).exp() for t in halves]
    else:
        expected = [function(t) for t in halves]
    equal(both(f, x, mesh=PAIR), torch.stack(expected))


def test_22356_static_arguments() -> None:
    f = mapped(lambda t, kind, n: getattr(t, kind)(0) * n, ("b/x k", None, None), "k/x", PAIR)
    assert both(f, count(4, 3), "sum", 2, mesh=PAIR).tolist() == [6, 10, 14, 30, 34, 38]


def test_17077_keyword_arguments_say_what_to_do() -> None:
    f = mapped(lambda t, scale: t * scale, ("b/x", ""), "b/x", PAIR)
    with pytest.raises(TypeError, match=r"scale came as keyword\. Pass it by position, or bind"):
        f(count(4), scale=torch.tensor(2.0))


def test_15368_an_argument_of_a_region_can_be_donated() -> None:
    """Its storage is reused, and it is gone afterwards."""
    f = mapped(lambda t: t.neg() * 2, "b/x", "b/x", PAIR)
    x = vf.device_put(count(1000), "b/x", PAIR)
    plain, donating = (vf.pjit(f, donate_argnums=d).lower(x).memory_analysis() for d in ((), (0,)))
    assert donating.peak < plain.peak
    same_bits(vf.pjit(f, donate_argnums=(0,))(x), count(1000) * -2)
    with pytest.raises((RuntimeError, ValueError), match="donated"):
        x.full()


def test_38845_an_out_spec_of_a_partly_manual_region_names_its_axis() -> None:
    f = mapped(lambda t: t * (1 + vf.axis_index("x")), "b d", "b/x d", axis_names={"x"})
    x = count(2, 3)
    assert torch.equal(both(f, x), torch.cat([x, 2 * x]))


def test_23019_a_loop_in_a_partly_manual_region() -> None:
    def body(rows: Tensor, w: Tensor) -> Tensor:
        return vf.scan(lambda c, row: (c, vf.psum(row @ w, "x")), rows.new_zeros(()), rows)[1]

    f = mapped(body, ("n b/x k", "k d"), "n b d", axis_names={"x"})
    rows, w = draw(3, 4, 5), draw(5, 6, seed=1)
    equal(both(f, rows, w), (rows @ w)[:, :2] + (rows @ w)[:, 2:])
    placed = vf.device_put(rows, "n b/x k", MESH), vf.device_put(w, "k d/y", MESH)
    step = vf.pjit(f, out_shardings="n b d/y")
    equal(step(*placed), (rows @ w)[:, :2] + (rows @ w)[:, 2:])
    assert {c.axes for c in step.lower(*placed).collectives} == {("x",)}


def test_29162_closing_over_a_cut_array() -> None:
    w = vf.device_put(draw(4, 3), "k/x d", LINE)
    f = mapped(lambda t: t @ w, "b/x k", "b/x d", LINE)
    equal(both(f, draw(8, 4), mesh=LINE), draw(8, 4) @ draw(4, 3))


@pytest.mark.parametrize("checked", [True, False])
def test_15723_positions_of_ranks(checked: bool) -> None:
    f = mapped(lambda: vf.axis_index(("x", "y"))[None], (), "n/(x y)", check_vma=checked)
    assert both(f).tolist() == [0, 1, 2, 3, 4, 5]
    g = mapped(lambda t: t[vf.axis_index("x")][None], "n k", "n/x k", check_vma=checked)
    assert torch.equal(both(g, count(2, 3)), count(2, 3))


def test_19720_no_axes_and_negative_dims_mean_the_same_everywhere() -> None:
    x = count(4, 4, 4)

    def body(t: Tensor, dim: int) -> Any:
        none = [c(t, ()) for c in (vf.psum, vf.pmean, vf.pmax, vf.pmin, vf.all_gather, vf.psum_scatter, vf.all_to_all)]
        assert all(y is t for y in (*none, vf.ppermute(t, (), shift=0), vf.pcast(t, (), to="varying")))
        gathered = vf.all_gather(t, "x", dim, tiled=True)
        return [
            gathered,
            vf.psum_scatter(gathered, "x", dim, tiled=True),
            vf.all_to_all(t, "x", dim, dim, tiled=True),
        ]

    from_front, from_back = (mapped(lambda t, d=d: body(t, d), "a/x b c", "a/x b c", PAIR) for d in (2, -1))
    same_bits(both(from_front, x, mesh=PAIR), both(from_back, x, mesh=PAIR))


def test_15905_vmap_of_a_collective_along_an_axis_and_a_batch_that_is_cut() -> None:
    """The batch lies on one axis, the collective goes along another: each example has its own sum, also gathered."""
    f = mapped(
        lambda x: vf.all_gather(vf.psum_scatter(x, "x", tiled=True), "x", tiled=True, to="invarying"), "b/x", "b"
    )
    g = mapped(lambda xs: vmap(lambda x: vf.psum(x, "x"))(xs), "n/y b/x", "n/y b")
    x = count(3, 8)
    expected = x.reshape(3, 2, 4).sum(1)
    same_bits(both(vmap(f), x), expected)
    same_bits(both(g, x), expected)


@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (1, 1), (-1, 0)])
@pytest.mark.parametrize("axes", ["x", ("x", "y"), ("y", "x")], ids=str)
def test_5861_an_all_to_all_of_any_two_dims(split: int, concat: int, axes: Any) -> None:
    """There and back again is the identity, whatever the dims and axes."""

    def body(t: Tensor) -> Tensor:
        there = vf.all_to_all(t, axes, split, concat, tiled=True)
        return vf.all_to_all(there, axes, concat, split, tiled=True)

    x = count(36, 6)
    same_bits(both(mapped(body, "a/(x y) b", "a/(x y) b"), x), x)


@pytest.mark.parametrize("tiled", [True, False])
def test_19709_shapes_of_an_all_to_all_that_do_not_fit(tiled: bool) -> None:
    f = mapped(lambda t: vf.all_to_all(t, "x", 1, 0, tiled=tiled), "a/x b", "a/x ...", LINE)
    with pytest.raises(ValueError, match=r"^vf.all_to_all: .*split_dim=1.* size (is )?6"):
        f(count(4, 6))


def test_1332_groups_are_an_axis_of_their_own() -> None:
    """Sums over pairs of four ranks: the mesh says which."""
    mesh = vf.make_mesh(group=2, member=2)
    f = mapped(lambda t: vf.psum(t, "member"), "d/(group member)", "d/group", mesh)
    assert both(f, count(4), mesh=mesh).tolist() == [1, 5]
