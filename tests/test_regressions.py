"""One example for each fault that a random program has found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_samples
import op_samples
import pytest
import torch
import torch.nn.functional as F
from op_samples import Sample
from rule_machine import equation
from torch.func import grad

import vescale_fn as vf
from vescale_fn.localize import HANDLERS
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.rules.rule import Rule

ALL = [*op_samples.SAMPLES, *op_samples.FROM_SCHEMA, *kernel_samples.SAMPLES]


def assert_equal(f: Callable[..., Any], args: list[torch.Tensor], specs: list[str], **mesh: int) -> None:
    """pjit(f) equals f for arguments with these specs."""
    devices = vf.make_mesh(**mesh)
    got = vf.pjit(f)(*(vf.device_put(x, s, devices) for x, s in zip(args, specs)))
    torch.testing.assert_close(got.full(), f(*args), rtol=1e-10, atol=1e-12)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("spec", ["s/x", "s~/y", "s~/(x y)"])
def test_positions_in_a_sharded_sequence_are_added_up(spec: str) -> None:
    """The sequence and the values share no dim, and so were planned as two equations, of which neither was pending."""
    sequence = normal(6).sort().values
    assert_equal(torch.searchsorted, [sequence, normal(4, 5)], [spec, "a b"], x=2, y=4)
    assert_equal(lambda s, v: torch.bucketize(v, s), [sequence, normal(4, 5)], [spec, "a b"], x=2, y=4)


def test_a_convolution_without_bias_over_a_sharded_window_is_lowered() -> None:
    """It was split into itself for ever."""
    assert_equal(F.conv2d, [normal(2, 3, 4, 4), normal(4, 3, 3, 2)], ["n c h w", "o c k l/y"], y=2)


@pytest.mark.parametrize("order", [1, 2])
def test_gradient_through_a_constraint_to_partial_sums(order: int) -> None:
    """The gradient's own constraint was refused."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (vf.reshard(x * x, "a {sum: x}") ** 2).sum()

    for _ in range(order):
        f = grad(lambda x, f=f: f(x).sum())
    assert_equal(f, [normal(4)], ["a/x"], x=2)


def test_gradient_of_the_gradient_of_a_write_through_a_view_of_a_view() -> None:
    """torch writes as_strided there, for the strides that the values had in the trace."""

    def f(x: torch.Tensor) -> torch.Tensor:
        v = x.diagonal(0, 1, 0).clone()
        v[..., 1:] = v[..., :-1] * 0.5
        return v.sin().sum()

    assert_equal(grad(lambda x: grad(f)(x).sin().sum()), [normal(6, 2, 6)], ["a/x b c"], x=2)


def test_empty_tensors_are_joined() -> None:
    """The size of a piece was not known."""
    assert_equal(lambda x: torch.cat([x, x], 0), [normal(0, 4)], ["a b/x"], x=2)


@pytest.mark.parametrize("channels", ["c", "c/x"])
def test_a_convolution_without_channels(channels: str) -> None:
    """torch checks no sizes there; the rule did, and failed."""

    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return vf.reshard(F.conv1d(x, w, b), f"n {channels} l")

    args = [normal(4, 0, 4), normal(2, 0, 3), normal(2)]
    assert_equal(f, args, ["n/x c l", "o c k", "o"], x=2)


def test_a_kernel_that_refuses_empty_tensors_is_not_run_where_a_rank_holds_nothing() -> None:
    """Of 4 channels on 3 ranks, the last holds none."""
    pool = grad(lambda x: F.adaptive_avg_pool2d(x, 2).sin().sum())
    assert_equal(pool, [normal(2, 4, 4, 3)], ["n c~/x h w"], x=3)


def _with_empty_parts(sample: Sample, letter: str, rule: Rule) -> bool:
    """Whether the operation runs when the dims of a letter, which leads them, are empty."""
    slots = iter(rule.operands)

    def cut(x: torch.Tensor) -> torch.Tensor:
        for d, letters in enumerate(next(slots)):
            x = x.narrow(d, 0, 0) if letter in letters else x
        return x.contiguous()

    def tree(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(map(tree, x))
        return cut(x) if isinstance(x, torch.Tensor) else x

    args, kwargs = sample.tensors()
    try:
        sample.op(*tree(args), **{k: tree(v) for k, v in kwargs.items()})
    except RuntimeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_operations_that_refuse_empty_tensors_have_a_handler() -> None:
    refused = []
    for sample in ALL:
        rule = rule_for(equation(sample))
        if rule is None or sample.op in HANDLERS:
            continue
        dims = [d for t in (*rule.operands, *rule.results) for d in t]
        free = [x for x in rule.sizes if x not in rule.whole and all(d[0] == x for d in dims if x in d)]
        refused += [str(sample.op) for x in free if not _with_empty_parts(sample, x, rule)]
    assert refused == []


def test_a_parameter_of_one_element_is_updated_beside_a_sharded_one() -> None:
    """Its update has no letter to share with the other's, and was taken for a sum over the axis that cuts the other."""
    opt, mesh = vf.optim.sgd(lr=0.5, momentum=0.9), vf.make_mesh(dp=2)
    params = {"w": torch.arange(1024.0).reshape(512, 2), "scale": torch.ones(1), "shift": torch.tensor(2.0)}
    specs = {"w": "d/dp f", "scale": "...", "shift": ""}
    placed = vf.device_put(params, specs, mesh)
    got, _ = vf.pjit(opt.step)(placed, opt.init(placed), placed)
    want, _ = opt.step(params, opt.init(params), params)
    for name, x in want.items():
        torch.testing.assert_close(got[name].full(), x)
