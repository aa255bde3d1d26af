"""Transforms of torch.func with respect to tensors that a step, or the body of a loop, captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, jvp, vmap

import vescale_fn as vf

W = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((w * x) ** 2).sum()


TRANSFORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grad": lambda x: grad(loss)(W, x),
    "grad of grad": lambda x: grad(lambda w: grad(loss)(w, x).sum())(W),
    "grad with W inside too": lambda x: grad(lambda w: loss(w * W, x))(W),
    "vmap": lambda x: vmap(lambda w: w * x.sum())(W),
    "grad of vmap": lambda x: grad(lambda w: vmap(lambda v: v * x.sum())(w).sin().sum())(W),
    "vmap of grad": lambda x: vmap(grad(lambda w: (w * x.sum()) ** 2))(W),
    "grad of a call": lambda x: grad(lambda w: vf.call(loss, w, x))(W),
    "grad of a loop": lambda x: grad(lambda w: vf.scan(lambda c, s: (c + loss(w, s), None), w.sum(), x[None])[0])(W),
    "jvp": lambda x: jvp(lambda w: loss(w, x), (W,), (W,))[1],
    "jacrev": lambda x: jacrev(lambda w: w * x)(W).sum(0),
}
PLACES: dict[str, Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "step": lambda f: f,
    "scan": lambda f: (
        lambda x: vf.scan(lambda c, s: (c + f(s).sum(), None), torch.zeros_like(x[0, 0]), x.expand(2, 3))[0]
    ),
    "call": lambda f: lambda x: vf.call(f, x),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_of_a_captured_tensor(place: str, transform: str) -> None:
    f = PLACES[place](TRANSFORMS[transform])
    x = torch.randn(1, 3, dtype=torch.float64) if place == "scan" else torch.randn(3, dtype=torch.float64)
    got = vf.pjit(f)(vf.device_put(x, None, vf.make_mesh(dp=2)))
    torch.testing.assert_close(got.full(), f(x))


def captured(w: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    """Gradients with respect to w, summed over slices: what accumulation does."""
    return vf.scan(lambda c, x: (c + grad(loss)(w, x), None), torch.zeros_like(w), xs)[0]


def carried(w: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
    """The same with w in the carry."""
    return vf.scan(lambda c, x: ((c[0] + grad(loss)(c[1], x), c[1]), None), (torch.zeros_like(w), w), xs)[0][0]


Sum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OUTER: dict[str, Callable[[Sum], Sum]] = {
    "grad": lambda f: grad(lambda w, xs: f(w, xs).sin().sum()),
    "grad of grad": lambda f: grad(lambda w, xs: grad(lambda v: f(v, xs).sin().sum())(w).sum()),
    "jvp": lambda f: lambda w, xs: jvp(lambda v: f(v, xs), (w,), (w,))[1],
    "vmap": lambda f: lambda w, xs: vmap(lambda s: f(w * s, xs))(torch.arange(1.0, 3.0, dtype=torch.float64)),
}


def run(f: Sum) -> torch.Tensor:
    xs = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    got = vf.pjit(f)(*vf.device_put((W, xs), ("d", "n d"), vf.make_mesh(dp=2)))
    torch.testing.assert_close(got.full(), f(W, xs))
    return got.full()


def test_gradient_inside_a_loop() -> None:
    torch.testing.assert_close(run(captured), run(carried))


@pytest.mark.parametrize("name", OUTER)
def test_gradient_inside_a_loop_under_another_transform(name: str) -> None:
    run(OUTER[name](carried))
    with pytest.raises(RuntimeError, match=r"the body of a loop or call takes a gradient .*") as caught:
        run(OUTER[name](captured))
    assert str(caught.value).splitlines()[1] == (
        "Pass the tensor to the body instead: in the carry of vf.scan, or as an argument of vf.call."
    )
