"""Operations that work on each element alone: every operation with torch.Tag.pointwise, and some without the tag.

Operands broadcast from the right, so one rule serves all: `..., ... -> ...`. What differs is only in which operands
an operation is linear. Numbers are no operands: `x + 10` is not linear in x, and does not match `{self, other}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.rules.registry import Entry, Slots, bound_args, parse_rule
from vescale_fn.sharding.rules.rule import Rule

aten = torch.ops.aten


def elementwise(eqn: Eqn, linear: Iterable[Slots] = (), through: Slots = ()) -> Rule:
    """Dims of operands and results align from the right."""
    left = ", ".join(["..."] * len(eqn.operands)) or "-"
    right = ", ".join(["..."] * len(eqn.outs))
    return replace(parse_rule(f"{left} -> {right}", eqn, linear=linear, through=through), merges="alike")


def is_pointwise(op: Any) -> bool:
    """Whether torch declares that `op` works on each element alone. (It says so of aten.equal, too, whose result is a
    bool and no tensor.)"""
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.pointwise not in op.tags:
        return False
    return all("Tensor" in str(r.type) for r in op._schema.returns)


def _linear_in(*groups: set[str]) -> Entry:
    return lambda eqn: elementwise(eqn, linear=groups)


def _unrounded_division(eqn: Eqn) -> Rule:
    return elementwise(eqn, linear=[{"self"}] if bound_args(eqn)["rounding_mode"] is None else [])


def _masked_fill(eqn: Eqn) -> Rule:
    return elementwise(eqn, linear=[{"self"}] if _is_zero(bound_args(eqn)["value"]) else [])


def _is_zero(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex)) and value == 0


def _copy_of(argument: str) -> Entry:
    """The result is that argument, perhaps broadcast or cast. A cast to a floating type keeps order too."""

    def entry(eqn: Eqn) -> Rule:
        source, new = bound_args(eqn)[argument], eqn.outs[0].dtype
        if not isinstance(source, Var):  # torch lets a number stand for a tensor
            return elementwise(eqn)
        old = source.dtype
        ordered = old is new or (new.is_floating_point and not old.is_complex)
        return elementwise(eqn, linear=[{argument}], through=[argument] if ordered else [])

    return entry


def _log_sigmoid(eqn: Eqn) -> Rule:
    """The buffer that forward leaves for backward is empty on some devices."""
    shape = eqn.outs[0].shape
    left, right = (
        ", ".join("..." if v.shape == shape else "!buffer" for v in tensors) for tensors in (eqn.operands, eqn.outs)
    )
    return parse_rule(f"{left} -> {right}", eqn, linear=[{"grad_output"}])


_GRAD = _linear_in({"grad_output"})

_SUMS = [aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.where.self]
_PRODUCTS = [aten.mul.Tensor, aten.mul.Scalar]
_QUOTIENTS = [aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor]
_LINEAR = [
    aten.neg.default,
    aten.deg2rad.default,
    aten.rad2deg.default,
    aten.conj_physical.default,
    aten._conj_physical.default,
    aten._conj.default,
    aten._neg_view.default,
    aten.ldexp.Tensor,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
]
_COPIES = [
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
    aten.alias_copy.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
]
_BACKWARD = [
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.logit_backward.default,
    aten.threshold_backward.default,
    aten.hardtanh_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
    aten.native_dropout_backward.default,
    aten._prelu_kernel_backward.default,
]
_UNTAGGED = [
    aten.hardswish.default,
    aten._prelu_kernel.default,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
]

ENTRIES: Mapping[Any, Entry] = {
    **dict.fromkeys(_SUMS, _linear_in({"self", "other"})),
    **dict.fromkeys(_PRODUCTS, _linear_in({"self"}, {"other"})),
    **dict.fromkeys(_QUOTIENTS, _linear_in({"self"})),
    **dict.fromkeys(_LINEAR, _linear_in({"self"})),
    **dict.fromkeys(_BACKWARD, _GRAD),
    **dict.fromkeys(_UNTAGGED, elementwise),
    aten.div.Tensor_mode: _unrounded_division,
    aten.div.Scalar_mode: _unrounded_division,
    aten.addcmul.default: _linear_in({"self", "tensor1"}, {"self", "tensor2"}),
    aten.addcdiv.default: _linear_in({"self", "tensor1"}),
    aten.lerp.Scalar: _linear_in({"self", "end"}),
    aten.lerp.Tensor: _linear_in({"self", "end"}),
    aten.complex.default: _linear_in({"real", "imag"}),
    aten.polar.default: _linear_in({"abs"}),
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _linear_in({"self", "value"}),
    aten.fill.Scalar: elementwise,
    **dict.fromkeys(_COPIES, _copy_of("self")),
    aten.hardshrink_backward.default: _linear_in({"grad_out"}),
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.log_sigmoid_backward.default: _log_sigmoid,
    aten.copy.default: _copy_of("src"),
    aten.fill.Tensor: _copy_of("value"),
}
