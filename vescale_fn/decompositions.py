"""Operations written as elementary ones, so that sums and maxima over a sharded dim can be pending.

Each function takes the arguments of its operation and uses plain torch operations only. Two tables:
`ALWAYS` holds operations that mean something else on a part than on the whole (a mean divides by the local count, a
loss picks from the classes at hand); it is a decomposition table for `make_fx`, and a function that returns
NotImplemented leaves the call as it is. `ON_INTENT` holds operations whose fused kernel is kept unless the user shards
a dim that it needs whole. Counts are those of the whole tensor, since they are taken while the graph is global.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vescale_fn.decompositions_norm import NORMS, RECORDED, wide, wide_type

aten = torch.ops.aten

Tensor = torch.Tensor
Decomposition = Callable[..., Any]

_NONE, _MEAN = 0, 1  # of the argument `reduction`; 2 is a sum


def dims_of(dim: int | Sequence[int] | None, rank: int) -> list[int]:
    """The dims that a reduction takes away; none named means all."""
    if isinstance(dim, int):
        return [dim % rank] if rank else []
    return [d % rank for d in dim or ()] or list(range(rank))


def count(x: Tensor, dims: Sequence[int]) -> int:
    """How many elements a reduction over `dims` puts together."""
    n = 1
    for d in dims:
        n *= x.shape[d]
    return n


# --- means and spreads --------------------------------------------------------------------------------------------


def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    out = dtype or x.dtype
    dims = dims_of(dim, x.dim())
    summed = wide_type(out)
    total = x.sum(dims, keepdim) if summed == x.dtype else x.sum(dims, keepdim, dtype=summed)
    return (total / count(x, dims)).to(out)


def _spread(x: Tensor, dim: Any, correction: Any) -> tuple[Tensor, Tensor, list[int]]:
    """Variance and mean over `dim`, reduced dims kept."""
    dims = dims_of(dim, x.dim())
    n = count(x, dims)
    center = x.sum(dims, keepdim=True) / n
    off = x - center
    squares = off.real.square() + off.imag.square() if x.is_complex() else off.square()
    free = max(n - (1 if correction is None else correction), 0)
    return squares.sum(dims, keepdim=True) / free, center, dims


def _dropped(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return x if keepdim else x.squeeze(tuple(dims))


def var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    value, _, dims = _spread(wide(x), dim, correction)
    return _dropped(value, dims, keepdim)


def std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    value, center, dims = _spread(wide(x), dim, correction)
    return _dropped(value, dims, keepdim), _dropped(center, dims, keepdim)


def std_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    value, center = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return value.sqrt(), center


def dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x - y, p)
    return norm


def vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = dims_of(dim, x.dim())
    size = wide(x if dtype is None else x.to(dtype)).abs()
    if ord == float("inf"):
        return size.amax(dims, keepdim)
    if ord == -float("inf"):
        return size.amin(dims, keepdim)
    if ord == 0:
        return (size != 0).to(size.dtype).sum(dims, keepdim)
    if ord == 1:
        return size.sum(dims, keepdim)
    if ord == 2:
        return (size * size).sum(dims, keepdim).sqrt()
    return size.pow(ord).sum(dims, keepdim).pow(1 / ord)


def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = dims_of(dim, x.dim())
    x = wide(x)
    top = x.amax(dims, keepdim=True)
    top = top.masked_fill(top.abs() == float("inf"), 0)
    return _dropped((x - top).exp().sum(dims, keepdim=True).log() + top, dims, keepdim)


# --- positions of extrema -----------------------------------------------------------------------------------------


def _extremum(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Value and first position along `dim`, which is kept. NaN is larger and smaller than everything."""
    best = x.amax(dim, keepdim=True) if largest else x.amin(dim, keepdim=True)
    found = x == best
    if x.dtype.is_floating_point:
        found = found | x.isnan()
    n = x.shape[dim]
    place = torch.arange(n, device=x.device).view([n if d == dim % x.dim() else 1 for d in range(x.dim())])
    return best, torch.where(found, place, n).amin(dim, keepdim=True)


def _arg_extremum(largest: bool) -> Decomposition:
    def arg(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None:
            place = _extremum(x.reshape(-1), 0, largest)[1]
            return place.reshape([1] * x.dim() if keepdim else [])
        return _dropped(_extremum(x, dim, largest)[1], [dim], keepdim)

    return arg


def _extremum_along(largest: bool) -> Decomposition:
    def along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        best, place = _extremum(x, dim, largest)
        return _dropped(best, [dim], keepdim), _dropped(place, [dim], keepdim)

    return along


def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = dims_of(dim, x.dim())
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


# --- losses -------------------------------------------------------------------------------------------------------


def _class_dim(scores: Tensor) -> int:
    return 1 if scores.dim() > 1 else 0


def _targets(target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Which targets are ignored, targets that are safe to look up, and the weight of each target's class."""
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)
    return ignored, safe, None if weight is None else aten.index.Tensor(weight, [safe])


def nll_loss_forward(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    d, dtype = _class_dim(scores), scores.dtype
    ignored, safe, weights = _targets(target, weight, ignore_index)
    picked = wide(scores.gather(d, safe.unsqueeze(d)).squeeze(d))
    loss = (-picked if weights is None else -picked * weights).masked_fill(ignored, 0)
    if reduction == _NONE:
        return loss.to(dtype), scores.new_zeros(())
    counted = (~ignored).to(loss.dtype) if weights is None else wide(weights).masked_fill(ignored, 0)
    total = counted.sum()
    value = loss.sum()
    return (value / total if reduction == _MEAN else value).to(dtype), total.to(dtype)


def nll_loss_backward(
    grad: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    d = _class_dim(scores)
    ignored, safe, weights = _targets(target, weight, ignore_index)
    each = -(grad / total_weight if reduction == _MEAN else grad)
    each = each.expand(target.shape) if weights is None else each * weights
    each = each.masked_fill(ignored, 0)
    return torch.zeros_like(scores).scatter(d, safe.unsqueeze(d), each.unsqueeze(d))


def _named(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    declared = op._schema.arguments
    given = {**{a.name: v for a, v in zip(declared, args)}, **kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in declared}


def _elementwise_loss(op: Any) -> Decomposition:
    """A loss as its unreduced form and a reduction."""

    def loss(*args: Any, **kwargs: Any) -> Any:
        named = _named(op, args, kwargs)
        reduction = named["reduction"]
        if reduction == _NONE:
            return NotImplemented
        each = op(**{**named, "reduction": _NONE})
        return mean(each) if reduction == _MEAN else each.sum()

    return loss


def _elementwise_loss_backward(op: Any) -> Decomposition:
    def backward(*args: Any, **kwargs: Any) -> Any:
        named = _named(op, args, kwargs)
        reduction = named["reduction"]
        if reduction == _NONE:
            return NotImplemented
        x, grad = named["self"], named["grad_output"]
        grad = (grad / max(x.numel(), 1) if reduction == _MEAN else grad).expand(x.shape)
        return op(**{**named, "grad_output": grad, "reduction": _NONE})

    return backward


_LOSSES = [
    aten.mse_loss.default,
    aten.huber_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
]
_LOSSES_BACKWARD = [
    aten.mse_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
]


# --- products with a bias -------------------------------------------------------------------------------------------


def _scaled(x: Tensor, by: Any) -> Tensor:
    return x if by == 1 else x * by


def _biased(product: Callable[[Tensor, Tensor], Tensor]) -> Decomposition:
    def biased(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        return _scaled(bias, beta) + _scaled(product(a, b), alpha)

    return biased


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    if bias is None or not x.numel():  # of empty tensors torch checks no sizes
        return NotImplemented
    out: Tensor = aten.convolution.default(x, weight, None, *rest)
    return out + bias.view(-1, *[1] * (out.dim() - 2))


def convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any) -> Any:
    *options, mask = rest
    if not mask[2] or not x.numel():
        return NotImplemented
    gx, gw, _ = aten.convolution_backward.default(grad, x, weight, None, *options, [mask[0], mask[1], False])
    return gx, gw, grad.sum([0, *range(2, grad.dim())])


# --- accumulation at indices ----------------------------------------------------------------------------------------


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Any:
    """A sum of rows of its own, which may be pending, added to x."""
    if not x.dim() or not x.dtype.is_floating_point:
        return NotImplemented
    rows = source.movedim(dim, 0)
    flat = rows if rows.dim() == 2 else rows.reshape(rows.shape[0], -1)
    table = aten.embedding_dense_backward.default(flat, index.reshape(-1), x.shape[dim], -1, False)
    if rows.dim() != 2:
        table = table.reshape([x.shape[dim], *rows.shape[1:]])
    return x + _scaled(table.movedim(0, dim), alpha)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Accumulation at one index tensor; nothing else is split."""
    where = [d for d, v in enumerate(indices) if v is not None]
    if not accumulate or len(where) > 1:
        return NotImplemented
    (d,) = where
    index = indices[d]
    assert index is not None
    rows = values.expand([*x.shape[:d], *index.shape, *x.shape[d + 1 :]])
    rows = rows.reshape([*x.shape[:d], index.numel(), *x.shape[d + 1 :]])
    return index_add(x, d, torch.where(index < 0, index + x.shape[d], index), rows)


# --- masks and classes ----------------------------------------------------------------------------------------------


def masked_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """x[mask] = number, which is a choice for each element."""
    given = [(d, v) for d, v in enumerate(indices) if v is not None]
    if accumulate or len(given) != 1 or given[0][1].dtype is not torch.bool or values.numel() != 1:
        return NotImplemented
    ((d, mask),) = given
    mask = mask.reshape([*mask.shape, *[1] * (x.dim() - d - mask.dim())])
    return torch.where(mask, values.reshape(()), x)


def masked_put_(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    out = masked_put(x, indices, values, accumulate)
    return out if out is NotImplemented else x.copy_(out)


def one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """torch reads the values to check them, except in a trace that no torch.func transform surrounds."""
    if num_classes < 0:
        return torch.nn.functional.one_hot(x)
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).to(torch.int64)


# --- tables ---------------------------------------------------------------------------------------------------------

ALWAYS: Mapping[Any, Decomposition] = {
    **RECORDED,
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.dist.default: dist,
    aten.index_put.default: masked_put,
    aten.index_put_.default: masked_put_,
    aten.nll_loss_forward.default: nll_loss_forward,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_forward.default: nll_loss_forward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
    **{op: _elementwise_loss(op) for op in _LOSSES},
    **{op: _elementwise_loss_backward(op) for op in _LOSSES_BACKWARD},
}

ON_INTENT: Mapping[Any, Decomposition] = {
    **NORMS,
    aten.var.correction: var,
    aten.std.correction: std,
    aten.var_mean.correction: var_mean,
    aten.std_mean.correction: std_mean,
    aten.linalg_vector_norm.default: vector_norm,
    aten.logsumexp.default: logsumexp,
    aten.argmax.default: _arg_extremum(largest=True),
    aten.argmin.default: _arg_extremum(largest=False),
    aten.max.dim: _extremum_along(largest=True),
    aten.min.dim: _extremum_along(largest=False),
    aten.aminmax.default: aminmax,
    aten.addmm.default: _biased(torch.mm),
    aten.baddbmm.default: _biased(torch.bmm),
    aten.addmv.default: _biased(torch.mv),
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.index_add.default: index_add,
    aten.index_put.default: index_put,
}

# Functions that are replaced where the step calls them, before they become operations.
CALLS: Mapping[Any, Callable[..., Any]] = {torch.nn.functional.one_hot: one_hot}
