"""`shard_map` by behaviour: what states values are in, what a state admits, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from region_calls import MESH, both, count, counts, draw, equal, mapped, same_bits
from torch import Tensor
from torch.func import grad

import vescale_fn as vf

NAMES = {"V": "varying", "I": "invarying", "U": "unreduced", "R": "reduced"}


def states_in(body: Callable[[Tensor], Any], in_spec: str = "a/x b") -> str:
    """The states of what a body makes, the same at once and in a program."""
    seen: list[str] = []

    def look(t: Tensor) -> Tensor:
        seen.append(vf.typeof(body(t)).partition("] ")[2])
        return t

    both(mapped(look, in_spec, in_spec), count(6, 6))
    (found,) = set(seen)
    return found


@pytest.mark.parametrize(
    ("body", "states"),
    [
        (lambda t: t * 2, "{V: x}"),
        (lambda t: torch.ones(3), ""),
        (lambda t: torch.zeros_like(t), "{V: x}"),
        (lambda t: t.new_ones(2), "{V: x}"),
        (lambda t: t * 0 + torch.ones(3, 6), "{V: x}"),
        (lambda t: vf.axis_index("y"), "{V: y}"),
        (lambda t: vf.axis_index(("x", "y")), "{V: (x y)}"),
        (lambda t: vf.psum(t, "x"), ""),
        (lambda t: vf.pmean(t, "x"), ""),
        (lambda t: vf.pmax(t, "x"), ""),
        (lambda t: vf.all_gather(t, "x"), "{V: x}"),
        (lambda t: vf.all_gather(t, "x", to="invarying"), ""),
        (lambda t: vf.all_gather(t, "x", to="reduced"), "{R: x}"),
        (lambda t: vf.ppermute(t, "y", shift=1), "{V: (x y)}"),
        (lambda t: vf.pbroadcast(t, "x", 0), "{V: x}"),
        (lambda t: vf.psum_scatter(t, "y", 1, tiled=True), "{V: (x y)}"),
        (lambda t: vf.all_to_all(t, "x", 1, 0, tiled=True), "{V: x}"),
        (lambda t: vf.pcast(t, "x", to="unreduced"), "{U: x}"),
        (lambda t: vf.pcast(t, "y", to="unreduced"), "{V: x, U: y}"),
        (lambda t: vf.pcast(t, "y", to="reduced"), "{V: x, R: y}"),
        (lambda t: vf.pcast(t, "y", to="reduced") * t, "{V: x, R: y}"),
        (lambda t: vf.pcast(t, "y", to="reduced") * vf.pcast(t, "y", to="varying"), "{V: (x y)}"),
        (lambda t: torch.where(vf.axis_index("y") > 0, t, 0.0), "{V: (x y)}"),
    ],
)
def test_states(body: Callable[[Tensor], Any], states: str) -> None:
    """Constants are invarying, but those that are made like a varying value."""
    assert states_in(body) == states


# ---- what may leave


@pytest.mark.parametrize(
    ("make", "out_spec"),
    [
        (lambda t: vf.psum(t, "x"), "a b"),
        (lambda t: vf.psum(t, ("x", "y")), "a b"),
        (lambda t: vf.all_gather(t, "x", to="invarying"), "n a b"),
        (lambda t: vf.all_gather(t, "x", to="reduced"), "n a b"),
        (lambda t: vf.psum(t, "x"), "a/y b/x"),
        (lambda t: torch.ones(2), "n"),
    ],
)
@pytest.mark.filterwarnings("ignore:vf.psum. the operand is the same")
def test_what_is_the_same_on_all_ranks_keeps_the_promise(make: Callable[[Tensor], Any], out_spec: str) -> None:
    x = count(6, 6)
    whole = mapped(make, "a/x b", out_spec)
    unchecked = mapped(make, "a/x b", out_spec, check_vma=False)
    same_bits(both(whole, x), both(unchecked, x))


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: t.sum(),
        lambda t: torch.ones(2) * vf.axis_index("x"),
        lambda t: vf.all_gather(t, "x"),
        lambda t: vf.psum(t, "y"),
        lambda t: vf.pcast(t, "x", to="unreduced"),
        lambda t: vf.scan(lambda c, row: (c, row), t[0], t)[1],
        lambda t: vf.call(torch.sin, t),
    ],
)
@pytest.mark.filterwarnings("ignore:vf.psum. the operand is the same")
def test_what_is_not_breaks_it(make: Callable[[Tensor], Any], lowered: bool) -> None:
    f = mapped(make, "a/x b", "...")
    with pytest.raises(ValueError, match="over 'x', but its out_spec does not name 'x', which promises the same value"):
        (vf.pjit(f, mesh=MESH) if lowered else f)(count(6, 6))


def test_unchecked_a_broken_promise_gives_the_value_of_one_rank() -> None:
    x = count(4, 2)
    assert torch.equal(both(mapped(lambda t: t, "a/x b", "a b", check_vma=False), x), x[:2])


# ---- casts


@pytest.mark.parametrize("before", "VIUR")
@pytest.mark.parametrize("after", "VIUR")
def test_every_pair_of_states_is_cast_or_refused(before: str, after: str) -> None:
    legal = {"IV", "IR", "IU", "RV", "RI", "VU"}
    enter = {"V": "a/x", "I": "a", "U": "a {sum: x}", "R": "a {ct: x}"}

    def body(t: Tensor) -> Tensor:
        t = vf.pcast(t, "x", to=NAMES[after])
        if after == "U":
            t = vf.psum(t, "x")
        return vf.pcast(t, "x", to="varying") if after == "R" else t

    f = mapped(body, enter[before], "a/x" if after in "VR" else "a")
    if before != after and before + after not in legal:
        with pytest.raises(ValueError, match=r"^vf.pcast: "):
            f(count(4))
        return
    found = both(f, count(4))
    expected = {"V": count(4), "U": count(4)}.get(before, count(4))
    if (before, after) == ("V", "U"):
        expected = count(4)[:2] + count(4)[2:]
    elif before in "IR" and after in "VR":
        expected = count(4).repeat(2)
    assert torch.equal(found, expected)


# ---- parts of a sum

W = draw(6, 6, seed=3)


def reduced_weight() -> Tensor:
    return vf.pcast(W, "x", to="reduced")


def _with_first_row(t: Tensor, row: Tensor) -> Tensor:
    t = t.clone()
    t[0] = row
    return t


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda t: -t,
    "times a number": lambda t: 2.5 * t,
    "over a number": lambda t: t / 4,
    "plus itself": lambda t: t + t,
    "minus": lambda t: t - 3 * t,
    "sum": lambda t: t.sum(0),
    "mean": lambda t: t.mean(1),
    "reshape": lambda t: t.reshape(-1),
    "transpose": lambda t: t.T,
    "slice": lambda t: t[1:, ::2],
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, -t]),
    "flip": lambda t: t.flip(0),
    "pad": lambda t: torch.nn.functional.pad(t, (1, 0)),
    "roll": lambda t: t.roll(1, 0),
    "cumsum": lambda t: t.cumsum(0),
    "expand": lambda t: t.unsqueeze(0).expand(3, -1, -1),
    "matmul": lambda t: t @ reduced_weight(),
    "product": lambda t: t * reduced_weight()[:3],
    "einsum": lambda t: torch.einsum("ab,cb->ca", t, reduced_weight()),
    "to double": lambda t: t.to(torch.float64),
    "row times matrix": lambda t: t[0] @ reduced_weight(),
    "matrix times column": lambda t: reduced_weight()[:, :3] @ t[:, 0],
    "in place": lambda t: t.clone().mul_(2).div_(4).neg_().add_(t, alpha=3),
    "zeros in place": lambda t: t + t.clone().zero_(),
    "shapes in place": lambda t: t.clone().unsqueeze_(0).transpose_(1, 2).squeeze_(0),
    "written into": lambda t: _with_first_row(t, 2 * t[1]),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_take_parts_of_a_sum(name: str) -> None:
    """They are computed on the parts, and one psum comes later."""
    linear, x = LINEAR[name], draw(6, 6)
    f = mapped(lambda t: vf.psum(linear(vf.pcast(t, "x", to="unreduced")), "x"), "a/x b", "...")
    plain = mapped(lambda t: linear(t), "a b", "...", check_vma=False)
    equal(both(f, x), plain(x[:3] + x[3:]))
    assert counts(f, x) == [("all_reduce", "forward")]


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda t: t.relu(), "relu of the parts is not"),
        (lambda t: t.sin(), "sin of the parts is not"),
        (lambda t: t * t, "mul of the parts is not"),
        (lambda t: t**2, "pow of the parts is not"),
        (lambda t: t + 1, "add of the parts is not"),
        (lambda t: t.softmax(0), "softmax of the parts is not"),
        (lambda t: t.max(), "max of the parts is not"),
        (lambda t: t.abs(), "abs of the parts is not"),
        (lambda t: t / t.sum(), "div of the parts is not"),
        (lambda t: t > 0, "of the parts is not"),
        (lambda t: t.clone().fill_(1), "fill_ of the parts is not"),
        (lambda t: t.clone().exp_(), "exp_ of the parts is not"),
        (lambda t: t @ W, "is invarying over it"),
        (lambda t: t + W[:3], "is invarying over it"),
        (lambda t: vf.scan(lambda c, row: (c + row.exp(), None), torch.zeros(6), t)[0], "exp of the parts is not"),
        (lambda t: vf.call(torch.exp, t), "exp of the parts is not"),
    ],
)
def test_other_functions_refuse_them(function: Callable[[Tensor], Any], message: str, lowered: bool) -> None:
    f = mapped(lambda t: function(vf.pcast(t, "x", to="unreduced")), "a/x b", "... {sum: x}")
    with pytest.raises(ValueError, match=message):
        (vf.pjit(f, mesh=MESH) if lowered else f)(draw(6, 6))


# ---- states in specs


def test_parts_and_reduced_values_cross_the_edge() -> None:
    """A sum leaves one region in parts and enters another, which may look at it only after a psum."""
    x = count(6, 6)
    parts = mapped(lambda t: vf.pcast(t, "x", to="unreduced"), "a/x b", "a b {sum: x}")
    double = mapped(lambda t: 2 * t, "a b {sum: x}", "a b {sum: x}")
    total = mapped(lambda t: vf.psum(t, "x"), "a b {sum: x}", "a b")
    f = lambda t: total(double(parts(t)))  # noqa: E731
    assert torch.equal(both(f, x), 2 * (x[:3] + x[3:]))
    assert counts(f, x) == [("all_reduce", "forward")]


def test_the_gradient_of_a_reduced_value_is_summed_once_outside() -> None:
    x, w = count(6, 6), count(6)
    loss = mapped(lambda t, w: vf.psum((t * w).sum(), "x"), ("a/x b", "b {ct: x}"), "")
    g = grad(lambda w: loss(x, w) + loss(2 * x, w))
    assert torch.equal(both(g, w), 3 * x.sum(0))
    assert [k for k, phase in counts(g, w) if phase == "backward"] == ["all_reduce"]


def test_types_cost_nothing() -> None:
    """With every cast written, the program is the same whether it is checked or not."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        w = vf.pcast(w, "x", to="varying")
        return vf.psum((x @ w).sin(), "x")

    x, w = draw(6, 6), draw(6, 2)
    texts = [
        vf.pjit(mapped(body, ("a/x b", "b c"), "a c", check_vma=c), mesh=MESH).lower(x, w).as_text()
        for c in (True, False)
    ]
    assert texts[0] == texts[1]


# ---- what runs in a region


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * ct


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autograd function": lambda t, w: Square.apply(t @ w),
    "call": lambda t, w: vf.call(lambda t: (t @ w).sin(), t),
    "remat": lambda t, w: vf.call(lambda t, w: (t @ w).sin().cos(), t, w, remat=True),
    "remat with a collective": lambda t, w: vf.call(lambda t, w: vf.psum(t @ w, "x").cos() * t, t, w, remat=True),
    "scan": lambda t, w: vf.scan(lambda c, row: (c, (row @ w + c).sin()), w[0], t)[1],
    "scan with a collective": lambda t, w: vf.scan(lambda c, row: (vf.pmean(row, "x") + c, row * c), w[0], t)[1],
    "where": lambda t, w: torch.where(t > 0, t @ w, vf.axis_index("x") * t),
    "softmax": lambda t, w: (t @ w).softmax(-1),
    "layer norm": lambda t, w: torch.nn.functional.layer_norm(t @ w, (6,)),
    "attention": lambda t, w: torch.nn.functional.scaled_dot_product_attention(t[None], (t @ w)[None], t[None])[0],
    "erf": lambda t, w: torch.erf(t @ w) + torch.special.erfinv(0.1 * t.sin()),
    "integer powers": lambda t, w: (t @ w) ** 3 - (t * 2) ** 2,
    "index": lambda t, w: w[torch.arange(3).flip(0)] * t.index_select(0, torch.tensor([2, 0, 1])),
    "topk": lambda t, w: t.topk(2, 1).values.sum(1, keepdim=True) * w[:3],
    "in place": lambda t, w: t.clone().mul_(2).add_(t),
    "inner grad": lambda t, w: grad(lambda t: (t @ w).sin().sum())(t),
    "print": lambda t, w: [vf.debug_print("{}", t.sum()), t @ w][1],
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("checked", [True, False])
def test_bodies(name: str, checked: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut along x it is the plain function of each half; the gradient too. At once as in a program, checked or not."""
    body, x, w = BODIES[name], draw(6, 6), draw(6, 6, seed=1)
    f = mapped(body, ("a/x b", "b c"), "a/x c", check_vma=checked)
    value, gradients = both(
        lambda x, w: (f(x, w), grad(lambda x, w: f(x, w).sin().sum(), (0, 1))(x, w)),
        x,
        w,
    )

    def plain(x: Tensor, w: Tensor) -> Tensor:
        a, b = x[:3], x[3:]
        if name == "remat with a collective":
            total = (a @ w + b @ w).cos()
            return torch.cat([total * a, total * b])
        if name == "scan with a collective":
            carries = torch.cat([w[:1], w[0] + ((a + b) / 2).cumsum(0)[:-1]])
            return torch.cat([a * carries, b * carries])
        if name == "where":
            return torch.cat([torch.where(t > 0, t @ w, i * t) for i, t in enumerate((a, b))])
        return torch.cat([body(a, w), body(b, w)])

    equal(value, plain(x, w))
    expected = grad(lambda x, w: plain(x, w).sin().sum(), (0, 1))(x, w)
    for one, other in zip(gradients, expected, strict=True):
        equal(one, other)


def test_a_loop_whose_carry_is_cast_first() -> None:
    def body(t: Tensor) -> Tensor:
        start = vf.pcast(torch.zeros(2, dtype=torch.float64), "x", to="varying")
        return vf.scan(lambda c, row: (c + row, None), start, t)[0]

    x = count(3, 4)
    assert torch.equal(both(mapped(body, "t a/x", "a/x"), x), x.sum(0))


def test_ranks_draw_alike_unless_their_keys_differ() -> None:
    """What is drawn is invarying: the same on every rank. The same numbers at once and in a program."""

    def body(t: Tensor, key: Tensor) -> Any:
        with vf.random.scope(key):
            alike = torch.rand(4)
        assert vf.typeof(alike) == "f32[4]"
        with vf.random.scope(vf.random.fold_in(key, vf.axis_index("x"))):
            own = torch.rand(4)
        assert vf.typeof(own) == "f32[4] {V: x}"
        return alike, own

    f = mapped(body, ("n/x", "two"), ("n", "n/x"))
    alike, own = both(f, count(2), vf.random.key(3))
    assert len(set(own.tolist())) == 8
    with vf.random.scope(vf.random.key(3)):
        assert torch.equal(alike, torch.rand(4))
