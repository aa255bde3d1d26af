"""Gradients taken inside a region, and types that cost nothing when the program runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import vescale_fn as vf

TABLE = {  # types checked, summed loss: dL/dw on the ranks with data 1 and 2
    (True, False): [3, 3],
    (True, True): [3, 3],
    (False, False): [1, 2],
    (False, True): [2, 4],
}
MESHES: dict[str, tuple[Any, Any]] = {
    "one axis": (vf.make_mesh(x=2), "x"),
    "two axes": (vf.make_mesh(x=2, y=1), ("x", "y")),
    "two axes, other order": (vf.make_mesh(x=1, y=2), ("y", "x")),
}


@pytest.mark.parametrize("closed_over", [False, True], ids=["argument", "closed over"])
@pytest.mark.parametrize("lowered", [False, True], ids=["at once", "lowered"])
@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize(("checked", "summed"), TABLE)
def test_the_gradient_of_a_replicated_weight(
    checked: bool, summed: bool, where: str, lowered: bool, closed_over: bool
) -> None:
    """Local loss w * d, or its sum over ranks: with types, the gradient is that of the sum on every rank."""
    (mesh, axes), w = MESHES[where], torch.tensor(5.0)
    spec = f"r/({' '.join(axes)})" if isinstance(axes, tuple) else f"r/{axes}"

    def body(d: Tensor, w: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            local = (w * d).sum()
            return vf.psum(local, axes) if summed else local  # type: ignore[no-any-return]

        return vf.pcast(grad(loss)(w)[None], axes, to="varying")  # type: ignore[no-any-return]

    def step(d: Tensor, w: Tensor) -> Any:
        if closed_over:
            return vf.shard_map(lambda d: body(d, w), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=checked)(d)
        return vf.shard_map(body, mesh=mesh, in_specs=(spec, ""), out_specs=spec, check_vma=checked)(d, w)

    run = vf.pjit(step, mesh=mesh) if lowered else step
    found = run(torch.tensor([1.0, 2.0]), w)
    assert (found.full() if lowered else found).tolist() == TABLE[checked, summed]


Loss = Callable[[Tensor], Tensor]
INSIDE: dict[str, Callable[[Loss, Tensor], Tensor]] = {
    "grad": lambda f, w: grad(f)(w),
    "vjp": lambda f, w: vjp(f, w)[1](torch.ones((), dtype=w.dtype))[0],
    "jacrev": lambda f, w: jacrev(f)(w),
    "jacfwd": lambda f, w: jacfwd(f)(w),
    "hessian": lambda f, w: hessian(f)(w),
    "grad of grad": lambda f, w: grad(grad(f))(w),
    "jvp of grad": lambda f, w: jvp(grad(f), (w,), (torch.ones_like(w),))[1],
    "grad of jvp": lambda f, w: grad(lambda w: jvp(f, (w,), (torch.ones_like(w),))[1])(w),
    "vmap of grad": lambda f, w: vmap(grad(f))(torch.stack([w, 2 * w])).sum(),
    "grad of vmap": lambda f, w: grad(lambda ws: vmap(f)(ws).sum())(torch.stack([w, w])).sum(),
    "grad, and the value itself": lambda f, w: grad(lambda v: f(v) + v * w)(w) - w,
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside_what_is_closed_over_is_as_good_as_an_argument(name: str) -> None:
    """Derivatives of w**2 * d, of all kinds: 2 * w * d = d, or d / 5, of all ranks or of each."""
    mesh, w = vf.make_mesh(x=2), torch.tensor(5.0, dtype=torch.float64)
    d = torch.tensor([1.0, 2.0], dtype=torch.float64)

    for checked, summed in TABLE:

        def body(d: Tensor, w: Tensor, summed: bool = summed) -> Tensor:
            def loss(w: Tensor) -> Tensor:
                local = (w * w * d).sum() / 10
                return vf.psum(local, "x") if summed else local  # type: ignore[no-any-return]

            return vf.pcast(INSIDE[name](loss, w)[None], "x", to="varying")  # type: ignore[no-any-return]

        options: Any = {"mesh": mesh, "out_specs": "r/x", "check_vma": checked}
        given = vf.shard_map(body, in_specs=("r/x", ""), **options)(d, w)
        closed = vf.shard_map(lambda d: body(d, w), in_specs="r/x", **options)
        assert torch.equal(closed(d), given)
        assert torch.equal(vf.pjit(closed, mesh=mesh)(d).full(), given)
        if name in ("grad", "grad of grad"):
            expected = torch.tensor(TABLE[checked, summed]) / (1 if name == "grad" else 5)
            torch.testing.assert_close(given, expected.double())


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("lowered", [False, True], ids=["at once", "lowered"])
def test_the_gradient_outside_of_a_weight_closed_over(lowered: bool, checked: bool) -> None:
    """It is that of the whole, types checked or not."""
    mesh = vf.make_mesh(x=2)

    def loss(w: Tensor, d: Tensor) -> Tensor:
        f = vf.shard_map(lambda d: (w * d).sum()[None], mesh=mesh, in_specs="r/x", out_specs="r/x", check_vma=checked)
        return f(d).sum()  # type: ignore[no-any-return]

    run = vf.pjit(grad(loss), mesh=mesh) if lowered else grad(loss)
    assert float(run(torch.tensor(5.0), torch.tensor([1.0, 2.0]))) == 3


def test_the_same_on_two_axes_of_several_ranks() -> None:
    """Data 1, 2, 3, 4: the sum is 10; unchecked and summed, 4 times one's own."""
    mesh, d = vf.make_mesh(x=2, y=2), torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = {(True, False): [10] * 4, (True, True): [10] * 4, (False, False): [1, 2, 3, 4]}
    expected[False, True] = [4, 8, 12, 16]
    for (checked, summed), values in expected.items():

        def body(d: Tensor, w: Tensor, summed: bool = summed) -> Tensor:
            def loss(w: Tensor) -> Tensor:
                return vf.psum((w * d).sum(), ("x", "y")) if summed else (w * d).sum()  # type: ignore[no-any-return]

            return vf.pcast(grad(loss)(w)[None], ("x", "y"), to="varying")  # type: ignore[no-any-return]

        f = vf.shard_map(body, mesh=mesh, in_specs=("r/(x y)", ""), out_specs="r/(x y)", check_vma=checked)
        assert f(d, torch.tensor(5.0)).tolist() == values


# ---- types cost nothing


def _forward(x: Tensor, w: Tensor) -> Tensor:
    w = vf.pcast(w, "x", to="varying")
    h = torch.relu(vf.all_gather(x, "x", 1, tiled=True) @ w)
    h = vf.ppermute(vf.psum_scatter(h, "x", 0, tiled=True), "x", shift=1)
    h = vf.all_to_all(h, "x", 1, 0, tiled=True)
    scale = vf.pcast(vf.pmax(h.abs().sum(), "x"), "x", to="varying")
    return vf.pbroadcast(h, "x", 0) * scale * (1 + vf.axis_index("x"))  # type: ignore[no-any-return]


def _gradient(x: Tensor, w: Tensor) -> Tensor:
    mine = vf.pcast(w, "x", to="varying")
    own = grad(lambda w: torch.sin(x @ w[: x.shape[1]]).sum())(mine)
    return vf.pcast(vf.pmean(own, "x"), "x", to="varying")  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", [_forward, _gradient])
def test_types_cost_nothing(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Where every cast is written, the program with types checked is the one without them."""
    mesh = vf.make_mesh(x=2)
    x, w = torch.randn(4, 6), torch.randn(6, 4)

    def text(checked: bool) -> str:
        f = vf.shard_map(body, mesh=mesh, in_specs=("b k/x", "..."), out_specs="b/x ...", check_vma=checked)
        return vf.pjit(f, mesh=mesh).lower(x, w).as_text()

    assert text(True) == text(False)
    assert len(re.findall(r"^>>", text(True), re.M)) >= 1
