"""Softmax and normalisations as sums and maxima over the dims they normalise: a part of `decompositions`.

`NORMS` belongs to ON_INTENT there, `RECORDED` to ALWAYS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

aten = torch.ops.aten

Tensor = torch.Tensor
Grads = tuple[Tensor | None, ...]


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type that kernels accumulate in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def wide(x: Tensor) -> Tensor:
    """x in the type that kernels accumulate in."""
    return x.to(wide_type(x.dtype))


# --- softmax ------------------------------------------------------------------------------------------------------


def _shifted(x: Tensor, dim: int) -> Tensor:
    return x - x.amax(dim, keepdim=True)


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    e = _shifted(wide(x), dim).exp()
    return e / e.sum(dim, keepdim=True)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted = _shifted(wide(x), dim)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows that are masked everywhere are zero."""
    x = wide(x if dtype is None else x.to(dtype))
    top = x.amax(dim, keepdim=True)
    e = (x - top.masked_fill(top == -float("inf"), 0)).exp()
    total = e.sum(dim, keepdim=True)
    return e / total.masked_fill(total == 0, 1)


def softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad, out = wide(grad), wide(out)
    weighted = grad * out
    return weighted - out * weighted.sum(dim, keepdim=True)


def log_softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad, out = wide(grad), wide(out)
    return grad - out.exp() * grad.sum(dim, keepdim=True)


# --- what normalisations share --------------------------------------------------------------------------------------


def _moments(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """x off its mean, the mean, and the variance over `dims`, which are kept."""
    n = prod(x.shape[d] for d in dims)
    mean = x.sum(dims, keepdim=True) / n
    off = x - mean
    return off, mean, (off * off).sum(dims, keepdim=True) / n


def _through_moments(grad: Tensor, unit: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    """Gradient of x from that of `unit` = (x - mean) * rstd."""
    n = prod(unit.shape[d] for d in dims)
    level: Tensor = grad.sum(dims, keepdim=True) / n
    slope: Tensor = (grad * unit).sum(dims, keepdim=True) / n
    return (grad - level - unit * slope) * rstd


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims) if dims else x


# --- over the last dims ---------------------------------------------------------------------------------------------


def _last(x: Tensor, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """The dims in front, and the dims that `shape` spans."""
    first = x.dim() - len(shape)
    return list(range(first)), list(range(first, x.dim()))


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    off, mean, spread = _moments(wide(x), _last(x, shape)[1])
    rstd = (spread + eps).rsqrt()
    return _affine(off * rstd, weight, bias), mean, rstd


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> Grads:
    front, last = _last(x, shape)
    grad, unit = wide(grad), (wide(x) - mean) * rstd
    return (
        _through_moments(_affine(grad, weight, None), unit, rstd, last) if mask[0] else None,
        _summed(grad * unit, front) if mask[1] else None,
        _summed(grad, front) if mask[2] else None,
    )


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    last, x = _last(x, shape)[1], wide(x)
    n = prod(shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = ((x * x).sum(last, keepdim=True) / n + eps).rsqrt()
    return _affine(x * rstd, weight, None), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> Grads:
    front, last = _last(x, shape)
    grad, unit = wide(grad), wide(x) * rstd
    onto = _affine(grad, weight, None)
    slope = (onto * unit).sum(last, keepdim=True) / prod(shape)
    return (
        (onto - unit * slope) * rstd if mask[0] else None,
        _summed(grad * unit, front) if mask[1] else None,
    )


# --- over groups of channels, over the batch -------------------------------------------------------------------------


def _per_channel(scale: Tensor | None, rank: int) -> Tensor | None:
    return None if scale is None else scale.view(1, -1, *[1] * (rank - 2))


def _in_groups(x: Tensor, group: int) -> tuple[Tensor, list[int]]:
    """x as batch, group, channel, space, and the dims that a group spans."""
    grouped = x.reshape(x.shape[0], group, x.shape[1] // group, *x.shape[2:])
    return grouped, list(range(2, grouped.dim()))


def _statistic(x: Tensor, like: Tensor) -> Tensor:
    """[batch, group] with dims of size one, to broadcast against a grouped tensor."""
    return x.view(*x.shape, *[1] * (like.dim() - 2))


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grouped, dims = _in_groups(wide(x), group)
    off, mean, spread = _moments(grouped, dims)
    rstd = (spread + eps).rsqrt()
    unit = (off * rstd).reshape(x.shape)
    out = _affine(unit, _per_channel(weight, x.dim()), _per_channel(bias, x.dim()))
    return out, mean.reshape(n, group), rstd.reshape(n, group)


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    mask: Sequence[bool],
) -> Grads:
    grad, (grouped, dims) = wide(grad), _in_groups(wide(x), group)
    rows = _statistic(rstd, grouped)
    unit = (grouped - _statistic(mean, grouped)) * rows
    onto = _in_groups(_affine(grad, _per_channel(weight, x.dim()), None), group)[0]
    others = [0, *range(2, x.dim())]
    return (
        _through_moments(onto, unit, rows, dims).reshape(x.shape) if mask[0] else None,
        (grad * unit.reshape(x.shape)).sum(others) if mask[1] else None,
        grad.sum(others) if mask[2] else None,
    )


def _channels_normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Over everything but the channels: the result; the mean, 1 / standard deviation and variance of each channel."""
    off, mean, spread = _moments(wide(x), [0, *range(2, x.dim())])
    rstd = (spread + eps).rsqrt()
    out = _affine(off * rstd, _per_channel(weight, x.dim()), _per_channel(bias, x.dim()))
    return out, mean.reshape(-1), rstd.reshape(-1), spread.reshape(-1)


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Any:
    """With statistics of this batch. The arguments end in training, momentum, eps; running statistics may precede."""
    *_, training, _, eps = rest
    return _channels_normalized(x, weight, bias, eps)[:3] if training else NotImplemented


def batch_norm_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The running variance takes the unbiased variance of the batch."""
    if not training:
        return NotImplemented
    out, mean, rstd, spread = _channels_normalized(x, weight, bias, eps)
    n = x.numel() // max(x.shape[1], 1)
    new_mean = running_mean * (1 - momentum) + mean * momentum
    new_var = running_var * (1 - momentum) + spread * (n / max(n - 1, 1)) * momentum
    return out, mean, rstd, new_mean, new_var


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    if not train:
        return NotImplemented
    dims, grad = [0, *range(2, x.dim())], wide(grad)
    rows = rstd.view(1, -1, *[1] * (x.dim() - 2))
    unit = (wide(x) - mean.view(1, -1, *[1] * (x.dim() - 2))) * rows
    onto = _affine(grad, _per_channel(weight, x.dim()), None)
    return (
        _through_moments(onto, unit, rows, dims) if mask[0] else None,
        (grad * unit).sum(dims) if mask[1] else None,
        grad.sum(dims) if mask[2] else None,
    )


def recorded_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """native_batch_norm writes the running statistics without saying so; here the writes are in the open."""
    if not training or running_mean is None or running_var is None:
        return NotImplemented
    out, mean, rstd, new_mean, new_var = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    running_mean.copy_(new_mean)
    running_var.copy_(new_var)
    return out, mean, rstd


def cudnn_batch_norm(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """As the operation above; what cuDNN would keep for its backward is empty."""
    *_, mean, var, training, momentum, eps = args
    recorded = recorded_batch_norm(x, *args)
    if recorded is NotImplemented:
        weight, bias = args[:2]
        recorded = aten.native_batch_norm.default(x, weight, bias, mean, var, training, momentum, eps)
    return *recorded, x.new_empty((0,), dtype=torch.uint8)


def cudnn_batch_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    kept: Tensor,
) -> Any:
    mask = [True, True, True]
    return aten.native_batch_norm_backward.default(
        grad, x, weight, running_mean, running_var, mean, rstd, True, eps, mask
    )


RECORDED: Mapping[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: recorded_batch_norm,
    aten.cudnn_batch_norm.default: cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: cudnn_batch_norm_backward,
}

NORMS: Mapping[Any, Callable[..., Any]] = {
    aten._softmax.default: softmax,
    aten._log_softmax.default: log_softmax,
    aten._safe_softmax.default: safe_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.native_batch_norm.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm,
    aten._native_batch_norm_legit_functional.default: batch_norm_functional,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
