"""Gradients of fused kernels on a mesh equal those on one device, where decompositions, masks and local sizes meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_samples import Bags, at
from op_samples import T, t
from torch.func import grad_and_value

import vescale_fn as vf
from vescale_fn.tree import flatten

Step = Callable[..., Any]


def batch_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, var = mean.detach().clone(), var.detach().clone()
    return F.batch_norm(x, mean, var, training=True), mean, var


def attention(causal: bool, gqa: bool = False) -> Step:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)


def losses(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    fns = (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.l1_loss, F.binary_cross_entropy_with_logits)
    return tuple(f(a, b.sigmoid()) for f in fns)


def spreads(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.var(-1), x.std(-1), x.mean(-1), x.norm(dim=-1), x.logsumexp(-1), x.var(), x.norm(), x.abs().max(-1)[0]


IMAGE = t(4, 8, 4, 4)
# what it is, the function, its arguments, their specs on x=2,y=2
CASES: list[tuple[str, Step, list[T], list[str]]] = [
    (
        "layer norm, width",
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        [t(4, 6, 8), t(8), t(8)],
        ["b/y s d/x", "d", "d"],
    ),
    ("rms norm, width", lambda x, w: F.rms_norm(x, (8,), w), [t(4, 6, 8), t(8)], ["b/y s d/x", "d/x"]),
    ("softmax, uneven", lambda x: x.softmax(-1), [t(4, 6, 5)], ["b/y s d~/x"]),
    ("batch norm", batch_norm, [IMAGE, t(8), T((8,), unit=True)], ["b/y c/x h w", "c/x", "c/x"]),
    ("group norm, groups", lambda x, w: F.group_norm(x, 4, w), [IMAGE, t(8)], ["b/y c/x h w", "c/x"]),
    ("group norm, inside a group", lambda x, w: F.group_norm(x, 1, w), [IMAGE, t(8)], ["b/y c/x h w", "c/x"]),
    (
        "convolution, contracted",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        [IMAGE, t(4, 8, 3, 3), t(4)],
        ["b/y c/x h w", "o c/x h w", "o"],
    ),
    (
        "convolution, groups",
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=4),
        [IMAGE, t(8, 2, 3, 3), t(8)],
        ["b/y c/x h w", "o/x c h w", "o/x"],
    ),
    ("pooling", lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2)), [IMAGE], ["b/y c/x h w"]),
    ("cross entropy", F.cross_entropy, [t(8, 12), at(8, size=12)], ["b/y v/x", "b/y"]),
    (
        "cross entropy, all at once",
        lambda s, y: F.cross_entropy(s, y, ignore_index=2, label_smoothing=0.1),
        [t(8, 12), at(8, size=12)],
        ["b v/(x y)", "b"],
    ),
    ("embedding", lambda w, i: F.embedding(i, w, 1), [t(7, 6), at(3, 5, size=7)], ["v~/x d", "b~/y s"]),
    *(
        (
            f"bags of embeddings, {mode}",
            lambda w, i, o, mode=mode: F.embedding_bag(i, w, o, mode=mode),
            [t(5, 8), at(6, size=5), Bags((4,), torch.int64)],
            ["v d/x", "i", "b"],
        )
        for mode in ("sum", "mean", "max")
    ),
    (
        "a scatter that multiplies",
        lambda x, i, y: x.scatter(1, i, y, reduce="multiply").detach() * x + x.renorm(2, 0, 0.5),
        [t(4, 8), at(4, 3, size=8), t(4, 3)],
        ["b/y v/x", "b/y k", "b/y k"],
    ),
    (
        "unpooling",
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        [IMAGE],
        ["b/y c/x h w"],
    ),
    (
        "by place among all",
        lambda x, m, i: (x.masked_scatter(m > 0, x * 2), torch.block_diag(x, x), x.put(i, x[0], accumulate=True)),
        [t(4, 8), t(4, 8, dtype=torch.int64), at(8, size=32)],
        ["b/y d/x", "b/y d", "k/x"],
    ),
    ("index", lambda w, i, j: w[i, :, j], [t(8, 3, 6), at(4, size=8), at(4, size=6)], ["v/x d u/y", "b", "b"]),
    ("gather", lambda w, i: w.gather(1, i), [t(4, 8), at(4, 3, size=8)], ["b/y v/x", "b/y k"]),
    (
        "accumulation",
        lambda w, i, s: w.index_add(0, i, s),
        [t(8, 4), at(6, size=8), t(6, 4)],
        ["v/x d", "k/y", "k/y d"],
    ),
    ("one_hot", lambda w, i: F.one_hot(i, 8).to(w.dtype) @ w, [t(8, 4), at(4, 3, size=8)], ["v/x d", "b/y s"]),
    ("extrema", lambda x: (x.max(-1)[0], x.argmax(-1)), [t(4, 6, 8)], ["b/y s d/x"]),
    ("spreads", spreads, [t(4, 6, 8)], ["b/y s d/x"]),
    ("losses", losses, [t(4, 8), t(4, 8)], ["b/y d/x"] * 2),
    ("bias", lambda b, x, w: F.linear(x, w, b), [t(6), t(4, 8), t(6, 8)], ["o", "b/y i/x", "o i/x"]),
    ("attention", attention(True), [t(4, 4, 6, 4)] * 3, ["b/y h/x s k"] * 3),
    ("attention, queries", attention(False), [t(4, 4, 6, 4)] * 3, ["b/y h s/x k"] * 3),
    (
        "attention, grouped",
        attention(True, gqa=True),
        [t(4, 4, 6, 4), t(4, 2, 6, 4), t(4, 2, 6, 4)],
        ["b/y h/x s k"] * 3,
    ),
    ("attention, uneven", attention(False), [t(3, 3, 6, 4)] * 3, ["b~/y h~/x s k"] * 3),
]


@pytest.mark.parametrize(("fn", "args", "specs"), [pytest.param(*c[1:], id=c[0]) for c in CASES])
def test_a_gradient_on_a_mesh_equals_the_one_on_a_device(fn: Step, args: list[T], specs: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [a.make(generator) for a in args]
    floats = [i for i, v in enumerate(values) if v.is_floating_point()]

    def step(*given: Any) -> Any:
        def total(*xs: Any) -> Any:
            filled = list(given)
            for i, x in zip(floats, xs):
                filled[i] = x
            outs = flatten(fn(*filled))[0]
            return sum((y * y.detach().cos()).sum() for y in outs if y.is_floating_point()), outs

        return grad_and_value(total, tuple(range(len(floats))), has_aux=True)(*[given[i] for i in floats])

    mesh = vf.make_mesh(x=2, y=2)
    arrays = [vf.device_put(v, spec, mesh) for v, spec in zip(values, specs)]
    for got, want in zip(flatten(vf.pjit(step)(*arrays))[0], flatten(step(*values))[0], strict=True):
        torch.testing.assert_close(got.full(), want, rtol=1e-9, atol=1e-9)
