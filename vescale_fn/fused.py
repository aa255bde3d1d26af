"""Optimizer updates as list operations: all parameters of one dtype in one node.

`torch.ops.vescale_fn.fused_adam` and its like are functional: they return updated copies, params first, then each
list of moments. `IN_PLACE` maps them to functions with the same signature that write into their operands instead,
for steps whose state is donated. Both forms end in the aten kernel that `torch.optim` uses with `fused=True`, or in
that of `vescale_fn.quantized`.
`RULES` says how they may be sharded.

Operands are lists with one tensor per parameter: params, grads, then the moments (a list that an algorithm does not
use is empty). `step` counts updates, this one included: a 0-d float32 tensor on the device of the parameters. `lr`
is a float, or a 0-d tensor in the overload `tensor_lr`. Where `skip` is given and true, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vescale_fn.quantized import adamw8_
from vescale_fn.sharding.rules.optimizer import blocks_update, list_update
from vescale_fn.sharding.rules.registry import Entry

Tensors = list[Tensor]


def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    step: Tensor,
    lr: float | Tensor,
    skip: Tensor | None,
    *,
    decoupled: bool,
    **settings: Any,
) -> Tensors:
    """Adam, or with `decoupled` weight decay AdamW, in place; returns the operands that it wrote."""
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    moments = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    kernel(params, grads, *moments, [step] * len(params), lr=_rate(lr), found_inf=_found_inf(skip), **settings)
    return [*params, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs]


def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    step: Tensor,
    lr: float | Tensor,
    skip: Tensor | None,
    **settings: Any,
) -> Tensors:
    """SGD in place; returns the operands that it wrote."""
    # The first gradient enters the momentum undampened. Without dampening that is what zero buffers give anyway, and
    # reading the step, which waits for a GPU, is not needed.
    first = settings["dampening"] != 0 and bool(step == 1)
    kernel: Any = torch._fused_sgd_
    found_inf = _found_inf(skip)
    kernel(params, grads, momentum_buffers, lr=_rate(lr), is_first_step=first, found_inf=found_inf, **settings)
    return [*params, *momentum_buffers]


def _rate(lr: float | Tensor) -> float | Tensor:
    """The learning rate as the aten kernels want it: on a GPU they read a float32, on a CPU a number."""
    return lr.float() if isinstance(lr, Tensor) and lr.is_cuda else lr


def _found_inf(skip: Tensor | None) -> Tensor | None:
    """What makes the aten kernels leave everything as it is."""
    return None if skip is None else skip.float()


def written(args: Sequence[Any]) -> list[Any]:
    """Of the arguments of a fused operation, the operands that its in-place form writes, in the order of its results:
    all lists but the gradients.

    >>> written((["p"], ["g"], ["m"], ["v"], [], "step", 0.1))
    ['p', 'm', 'v']
    """
    lists = [a for a in args if isinstance(a, (list, tuple))]
    return list(chain(lists[0], *lists[2:]))


def functional(in_place: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """The function that leaves its operands alone and returns what `in_place` would have written."""

    def update(params: Tensors, grads: Tensors, *rest: Any, **settings: Any) -> Tensors:
        copies = [[t.clone() for t in a] if isinstance(a, (list, tuple)) else a for a in rest]
        return in_place([p.clone() for p in params], grads, *copies, **settings)

    return update


def _fake(*args: Any, **_: Any) -> Tensors:
    return [torch.empty_like(t) for t in written(args)]


_ADAM = (
    "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, Tensor step, "
    "{lr} lr, Tensor? skip, *, bool decoupled, float beta1, float beta2, float eps, float weight_decay, bool amsgrad, "
    "bool maximize) -> Tensor[]"
)
_SGD = (
    "(Tensor[] params, Tensor[] grads, Tensor[] momentum_buffers, Tensor step, {lr} lr, Tensor? skip, *, "
    "float momentum, float dampening, float weight_decay, bool nesterov, bool maximize) -> Tensor[]"
)
_ADAMW8 = (
    "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_scales, Tensor[] exp_avg_sqs, Tensor[] "
    "exp_avg_sq_scales, Tensor step, {lr} lr, Tensor? skip, *, float beta1, float beta2, float eps, float "
    "weight_decay) -> Tensor[]"
)
_ALGORITHMS: dict[str, tuple[str, Callable[..., Tensors], Entry]] = {
    "adam": (_ADAM, adam_, list_update),
    "sgd": (_SGD, sgd_, list_update),
    "adamw8": (_ADAMW8, adamw8_, blocks_update),
}

_LIBRARY: Any = torch.library.Library("vescale_fn", "FRAGMENT")  # type: ignore[no-untyped-call]
UPDATES: dict[str, Any] = {}  # by the name of the algorithm
IN_PLACE: dict[Any, Callable[..., Tensors]] = {}
RULES: dict[Any, Entry] = {}

for _name, (_schema, _in_place, _rule) in _ALGORITHMS.items():
    for _overload, _lr in (("", "float"), (".tensor_lr", "Tensor")):
        _full = f"fused_{_name}{_overload}"
        _LIBRARY.define(_full + _schema.format(lr=_lr))
        _LIBRARY.impl(_full, functional(_in_place), "CompositeExplicitAutograd")
        torch.library.register_fake(f"vescale_fn::{_full}", _fake, lib=_LIBRARY)
    UPDATES[_name] = getattr(torch.ops.vescale_fn, f"fused_{_name}")
    IN_PLACE |= {UPDATES[_name].default: _in_place, UPDATES[_name].tensor_lr: _in_place}
    RULES |= {UPDATES[_name].default: _rule, UPDATES[_name].tensor_lr: _rule}
