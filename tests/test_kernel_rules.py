"""Rules of norms, attention, convolution, indexing and order, run as programs: most change arguments on a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_samples import INDEX, MIXED, ORDER, SAMPLES
from op_samples import Sample, T, t
from rule_machine import Wrong, check, equation
from rule_mutants import mutants
from test_localize import by_product
from torch._subclasses.fake_tensor import FakeTensorMode

from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.rules import attention, conv, index, mixed, norm, order, rule_for

aten = torch.ops.aten


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_sharding_a_rule_admits_gives_the_whole_result(sample: Sample) -> None:
    rule = rule_for(equation(sample))
    assert rule is not None
    check(sample, rule, by_product)


def test_every_operation_with_a_rule_has_a_sample() -> None:
    families = (norm, order, index, attention, conv, mixed)
    without = {op for family in families for op in family.ENTRIES} - {sample.op for sample in SAMPLES}
    on_cuda = {op for op in attention.ENTRIES if "_for_cpu" not in str(op)}
    assert without == on_cuda | {aten._fused_rms_norm_backward.default}


# --- kernels for CUDA, whose types are known without a GPU ------------------------------------------------------------


def cuda_eqn(op: Any, *args: Any, **kwargs: Any) -> Eqn:
    """A call on fake CUDA tensors; T among the arguments stand for them."""

    def var(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Var("x", tuple(x.shape), x.dtype)
        return Var("x", (), type(x))

    with FakeTensorMode():
        given = [torch.empty(x.shape, dtype=torch.bfloat16, device="cuda") if isinstance(x, T) else x for x in args]
        outs = op(*given, **kwargs)
    return Eqn(op, tuple(var(x) if isinstance(x, torch.Tensor) else x for x in given), kwargs, tuple(map(var, outs)))


Q, KV, KEYS, BIAS, ROWS, SEED = t(2, 4, 6, 8), t(2, 2, 5, 8), t(2, 4, 5, 8), t(2, 1, 6, 5), t(2, 4, 6), t()
INS = "b (k g) s !e, b k !t !e, b k !t !v"
KNOWN = "b (k g) s !e, b k t !e, b k t !v"  # in the backward


@pytest.mark.parametrize(
    ("op", "args", "rule"),
    [
        (
            aten._scaled_dot_product_flash_attention.default,
            (Q, KV, KV),
            f"{INS} -> b (k g) s !v, b (k g) s, , , , , !r60, , !r80",
        ),
        (
            aten._scaled_dot_product_flash_attention_backward.default,
            (Q, Q, KV, KV, Q, ROWS, None, None, 6, 5, 0.0, False, t(2), SEED),
            f"b (k g) s !v, {KNOWN}, b (k g) s !v, b (k g) s, !philox_seed0,  -> {KNOWN}",
        ),
        (
            aten._scaled_dot_product_efficient_attention.default,
            (Q, KV, KV, BIAS, True),
            f"{INS}, b 1 s !t -> b (k g) s !v, b (k g) !padded, , ",
        ),
        (
            aten._scaled_dot_product_efficient_attention_backward.default,
            (Q, Q, KEYS, KEYS, BIAS, Q, t(2, 4, 32), SEED, SEED, 0.0, [True] * 4),
            "b k s !v, b k s !e, b k t !e, b k t !v, b 1 s t, b k s !v, b k !padded, ,  "
            "-> b k s !e, b k t !e, b k t !v, b 1 s t",
        ),
        (
            aten._scaled_dot_product_cudnn_attention.default,
            (Q, KV, KV, None, True),
            f"{INS} -> b (k g) s !v, b (k g) s 1, , , , , , , ",
        ),
        (
            aten._scaled_dot_product_cudnn_attention_backward.default,
            (Q, Q, KV, KV, Q, t(2, 4, 6, 1), SEED, SEED, t(0), None, None, 6, 5, 0.0, False),
            f"b (k g) s !v, {KNOWN}, b (k g) s !v, b (k g) s 1, , , !attn_bias0 -> {KNOWN}",
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, torch._ops.OpOverload) else "",
)
def test_attention_on_cuda(op: Any, args: tuple[Any, ...], rule: str) -> None:
    found = rule_for(cuda_eqn(op, *args))
    assert found is not None
    assert str(found) == rule


def test_attention_with_dropout_has_no_rule() -> None:
    assert rule_for(cuda_eqn(aten._scaled_dot_product_flash_attention.default, Q, KV, KV, 0.1)) is None


def test_causal_queries_stay_together() -> None:
    found = rule_for(cuda_eqn(aten._scaled_dot_product_flash_attention.default, Q, KV, KV, 0.0, True))
    assert found is not None
    assert "s" in found.whole


# --- wrong rules ------------------------------------------------------------------------------------------------------

# Mutants that survive, and why. (Wrong rules of other families make their kernels read outside of tensors.)
SURVIVORS = [
    (
        "True: a scalar is read as it is, and so is one element.",
        ["gather([],", "gather([4],", "index_select([],", "cumsum([],"],
        "",
    ),
    ("True: zeros written into parts change neither maxima nor minima.", [", 0)"], "0 passes through"),
    (
        "True: all ranks add the same to maxima and minima.",
        ["scatter.value_reduce([4, 6], 1, i64[4, 5], 2.0"],
        "0 passes",
    ),
    ("True, if each rank multiplied by the same numbers.", [", prod)"], "linear in [0]"),
]


def test_the_machine_kills_mutants_of_look_ups_and_orders() -> None:
    made, survivors = 0, []
    for sample in [*ORDER, *INDEX, *MIXED]:
        if "embedding" in str(sample.op) and "backward" in str(sample.op):  # write outside when positions are wrong
            continue
        eqn = equation(sample)
        rule = rule_for(eqn)
        assert rule is not None
        for mutant in mutants(eqn, rule):
            made += 1
            try:
                check(sample, mutant.rule, by_product)
            except Wrong:
                continue
            survivors.append((str(sample).replace(".default", ""), mutant.what))
    unexplained = [
        (name, what)
        for name, what in survivors
        if not any(any(n in name for n in names) and mutation in what for _, names, mutation in SURVIVORS)
    ]
    assert unexplained == []
    assert made >= 1000
    assert len(survivors) / made <= 0.01
