"""What torch's random operations draw, by operation: a table from each to a function that takes a source of bits and
the arguments of the operation. Writes in place stay writes in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fn.random import errors
from vescale_fn.random.source import (
    Source,
    bernoulli_of,
    exponential_of,
    gumbel_of,
    integers_of,
    normal_of,
    uniform_of,
)
from vescale_fn.sharding.graph import op_name

aten = torch.ops.aten

Draw = Callable[..., Any]


def draw_like(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], source: Callable[[], Source]) -> Any:
    """The results of a random operation. Raises NotImplementedError for one that is not in the table."""
    if not _draws(op, args, kwargs):
        return op(*args, **kwargs)
    if op not in DRAWS:
        fused = "attention" in op_name(op)
        raise NotImplementedError((errors.fused_attention if fused else errors.unknown_draw)(op_name(op)))
    given = named(op, args, kwargs)
    if given.pop("generator", None) is not None:
        raise ValueError(errors.has_generator(op_name(op)))
    return DRAWS[op](source(), **{("x" if k == "self" else k): v for k, v in given.items()})


def named(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by name, with defaults filled in."""
    declared = op._schema.arguments
    given = {**{a.name: v for a, v in zip(declared, args)}, **kwargs}
    return {a.name: given.get(a.name, _default(a)) for a in declared}


def _default(argument: Any) -> Any:
    """A default, as Python has it: that of a dtype is a number of C++'s."""
    return None if argument.name == "dtype" else argument.default_value


def _draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws: attention does only with dropout, and choosing a kernel for it never does."""
    if op is aten._fused_sdp_choice.default:
        return False
    names = [a.name for a in op._schema.arguments]
    return "dropout_p" not in names or bool(named(op, args, kwargs)["dropout_p"])


# --- factories ------------------------------------------------------------------------------------------------------


def _filled(values: Callable[..., Any]) -> Draw:
    """A factory of tensors of floats: `values(source, shape, dtype)`."""

    def draw(source: Source, size: Sequence[int], dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return values(source, size, dtype or torch.get_default_dtype()).to(device or "cpu")

    return draw


def _filled_like(values: Callable[..., Any]) -> Draw:
    def draw(source: Source, x: Tensor, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return values(source, x.shape, dtype or x.dtype).to(device or x.device)

    return draw


def _randint(
    source: Source, high: int, size: Sequence[int], low: int = 0, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    return integers_of(source, size, low, high, dtype or torch.int64).to(device or "cpu")


def _randint_like(
    source: Source, x: Tensor, high: Any, low: int = 0, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    return integers_of(source, x.shape, low, high, dtype or x.dtype).to(device or x.device)


def _randperm(source: Source, n: int, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return source.order(n).to(device=device or "cpu", dtype=dtype or torch.int64)


# --- functions of tensors -------------------------------------------------------------------------------------------


def _bernoulli(source: Source, x: Tensor, p: float | None = None) -> Tensor:
    """Ones with probability p, or with the probabilities that x holds."""
    drawn: Tensor = bernoulli_of(source, x.shape, x if p is None else p).to(x.dtype)
    return drawn


def _native_dropout(source: Source, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    keep = bernoulli_of(source, input.shape, 1 - p)
    return torch.where(keep, input * (1 / (1 - p) if p < 1 else 0.0), 0.0), keep


def _normal(source: Source, mean: Any, std: Any) -> Any:
    """Of the shape and dtype of mean and std, where tensors."""
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return normal_of(source, shape, tensors[0].dtype) * std + mean


def _normal_numbers(source: Source, mean: float, std: float, size: Any, dtype: Any = None, **more: Any) -> Any:
    return _filled(normal_of)(source, size, dtype, **more) * std + mean


def _multinomial(source: Source, x: Tensor, num_samples: int, replacement: bool = False) -> Any:
    """The Gumbel-max trick: the largest of log-probability and noise; without replacement the num_samples largest."""
    scores = torch.log(x)
    if replacement:
        noise = gumbel_of(source, (*x.shape[:-1], num_samples, x.shape[-1]), x.dtype)
        return (scores.unsqueeze(-2) + noise).argmax(-1)
    return torch.topk(scores + gumbel_of(source, x.shape, x.dtype), num_samples, -1).indices


# --- values that are written ----------------------------------------------------------------------------------------


def _uniform(source: Source, x: Tensor, **bounds: Any) -> Any:
    low, high = bounds["from"], bounds["to"]
    return uniform_of(source, x.shape, x.dtype, low, high)


def _normal_like(source: Source, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    return normal_of(source, x.shape, x.dtype) * std + mean


def _log_normal(source: Source, x: Tensor, mean: float, std: float) -> Any:
    return (normal_of(source, x.shape, x.dtype) * std + mean).exp()


def _exponential(source: Source, x: Tensor, lambd: float) -> Any:
    return exponential_of(source, x.shape, x.dtype) / lambd


def _geometric(source: Source, x: Tensor, p: float) -> Any:
    """How many trials until the first success, from 1."""
    rate = exponential_of(source, x.shape, x.dtype if x.dtype.is_floating_point else torch.float32)
    return (rate / -math.log1p(-p)).floor() + 1 if p < 1 else torch.ones_like(rate)


def _cauchy(source: Source, x: Tensor, median: float, sigma: float) -> Any:
    return torch.tan((uniform_of(source, x.shape, x.dtype) - 0.5) * math.pi) * sigma + median


def _integers(source: Source, x: Tensor, **bounds: Any) -> Any:
    """From `from` (0) to `to`, not included, or else all that the dtype holds without rounding."""
    low, high = bounds.get("from", 0), bounds.get("to")
    return integers_of(source, x.shape, low, _end(x.dtype) if high is None else high, x.dtype)


def _end(dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return 2 * round(1 / torch.finfo(dtype).eps) + 1
    return 2 if dtype is torch.bool else min(torch.iinfo(dtype).max + 1, 2**63 - 1)


def _rrelu(source: Source, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool) -> Tensor:
    """Where x is not positive it is multiplied by a number between lower and upper, which goes into noise."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = uniform_of(source, x.shape, x.dtype, lower, upper)
    return x * noise.copy_(torch.where(x <= 0, slope, 1.0))


def _written(values: Draw) -> Draw:
    """The operation that writes these values to its operand."""
    return lambda source, x, **given: x.copy_(values(source, x, **given))


# --- the table ------------------------------------------------------------------------------------------------------

_IN_PLACE: dict[Any, Draw] = {
    aten.bernoulli_.float: _bernoulli,
    aten.bernoulli_.Tensor: _bernoulli,
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal_like,
    aten.log_normal_.default: _log_normal,
    aten.exponential_.default: _exponential,
    aten.geometric_.default: _geometric,
    aten.cauchy_.default: _cauchy,
    aten.random_.default: _integers,
    aten.random_.to: _integers,
    getattr(aten.random_, "from"): _integers,
}

DRAWS: Mapping[Any, Draw] = {
    aten.rand.default: _filled(uniform_of),
    aten.rand.generator: _filled(uniform_of),
    aten.randn.default: _filled(normal_of),
    aten.randn.generator: _filled(normal_of),
    aten.rand_like.default: _filled_like(uniform_of),
    aten.rand_like.generator: _filled_like(uniform_of),
    aten.randn_like.default: _filled_like(normal_of),
    aten.randn_like.generator: _filled_like(normal_of),
    aten.randint.default: _randint,
    aten.randint.generator: _randint,
    aten.randint.low: _randint,
    aten.randint.low_generator: _randint,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like,
    aten.randperm.default: _randperm,
    aten.randperm.generator: _randperm,
    aten.normal.float_float: _normal_numbers,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.native_dropout.default: _native_dropout,
    aten.multinomial.default: _multinomial,
    aten.rrelu_with_noise.default: _rrelu,
    **{op: _written(values) for op, values in _IN_PLACE.items()},
}
