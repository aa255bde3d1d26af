"""AdamW whose moments are bytes: one scale for each block of a parameter, and 8 bits for each element.

A moment of a block is `scale` times numbers in [-1, 1], of which the fourth root is kept in equal steps: 127 on either
side of zero for the first moment, 256 above zero for the second, so that what was small beside its block stays apart
from zero (Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization", with a table for the steps). Roots and
powers are made of square roots and products, which round alike wherever a block lies: a shard that holds whole blocks
gives the bits of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Tensors = list[Tensor]

CHUNK = 1 << 16  # elements worked on at a time, so that what is between operations stays in the cache


def adamw8_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_scales: Tensors,
    exp_avg_sqs: Tensors,
    exp_avg_sq_scales: Tensors,
    step: Tensor,
    lr: float | Tensor,
    skip: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Tensors:
    """AdamW in place; returns the operands that it wrote. exp_avgs are int8 and exp_avg_sqs uint8, of the shapes of the
    parameters; their scales are float32, of these shapes divided by those of a block."""
    count = step.double()
    rate, root = lr / (1 - beta1**count), (1 - beta2**count).sqrt()
    kept = 1 - lr * weight_decay
    for tensors in zip(params, grads, exp_avgs, exp_avg_scales, exp_avg_sqs, exp_avg_sq_scales):
        for p, g, m, m_scale, v, v_scale in chunks_of_blocks(tensors):
            wide = torch.promote_types(p.dtype, torch.float32)
            g = g.to(wide)
            first = signed_value(m, m_scale, wide) * beta1 + g * (1 - beta1)
            second = unsigned_value(v, v_scale, wide) * beta2 + g * g * (1 - beta2)
            new = p.to(wide) * kept - first / (second.sqrt() / root + eps) * rate
            within = tuple(range(1, p.ndim, 2))
            scales = first.abs().amax(within, keepdim=True).float(), second.amax(within, keepdim=True).float()
            codes = signed_code(first, scales[0]), unsigned_code(second, scales[1])
            for old, now in zip((p, m, m_scale, v, v_scale), (new, codes[0], scales[0], codes[1], scales[1])):
                old.copy_(now if skip is None else torch.where(skip, old, now.to(old.dtype)))
    return [*params, *exp_avgs, *exp_avg_scales, *exp_avg_sqs, *exp_avg_sq_scales]


def chunks_of_blocks(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """A parameter, its gradient, codes and scales, with two dims for each one of theirs, those of blocks and those
    inside; some rows of blocks at a time."""
    param, scale = tensors[0], tensors[3]
    if not param.numel():
        return
    shape = tuple(x for n, of in zip(scale.shape, param.shape) for x in (n, of // n)) or (1, 1)
    of_scales = tuple(x for n in scale.shape for x in (n, 1)) or (1, 1)
    views = [t.view(of_scales if i in (3, 5) else shape) for i, t in enumerate(tensors)]
    rows = max(1, CHUNK * shape[0] // param.numel())
    for at in range(0, shape[0], rows):
        yield [t[at : at + rows] for t in views]


def signed_code(x: Tensor, scale: Tensor) -> Tensor:
    """x in [-scale, scale] as int8 numbers from -127 to 127."""
    y = (x.abs() / scale.clamp(min=torch.finfo(scale.dtype).tiny)).sqrt().sqrt()
    return ((y * 127).round() * x.sign()).to(torch.int8)


def signed_value(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    y = code.to(dtype) / 127
    square = y * y
    return square * square * y.sign() * scale


def unsigned_code(x: Tensor, scale: Tensor) -> Tensor:
    """x in [0, scale] as uint8 numbers, the least of which stands for more than zero: x is divided by."""
    y = (x / scale.clamp(min=torch.finfo(scale.dtype).tiny)).sqrt().sqrt()
    return (y * 256 - 1).round().clamp(0, 255).to(torch.uint8)


def unsigned_value(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    y = (code.to(dtype) + 1) / 256
    square = y * y
    return square * square * scale
