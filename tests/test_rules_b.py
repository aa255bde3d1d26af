"""Rules of norms, attention, convolution, indexing and order, run as programs: most change arguments on a rank."""

from __future__ import annotations

import pytest
import torch
from op_samples import Sample
from op_samples_b import SAMPLES
from rule_machine import check, equation
from test_localize import by_product

from vescale_fn.sharding.rules import attention, conv, index, norm, order, rule_for

aten = torch.ops.aten


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_sharding_a_rule_admits_gives_the_whole_result(sample: Sample) -> None:
    rule = rule_for(equation(sample))
    assert rule is not None
    check(sample, rule, by_product)


def test_every_operation_with_a_rule_has_a_sample() -> None:
    families = (norm, order, index, attention, conv)
    without = {op for family in families for op in family.ENTRIES} - {sample.op for sample in SAMPLES}
    on_cuda = {op for op in attention.ENTRIES if "_for_cpu" not in str(op)}
    assert without == on_cuda | {aten._fused_rms_norm_backward.default}
