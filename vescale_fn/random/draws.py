"""Random numbers as pure functions of a key, the same on every mesh, layout, engine and device.

A key is an int64 tensor of shape [2], so it goes wherever tensors go: through pjit, scan, vmap and checkpoints. The
same key gives the same numbers; split it to get others. Integers, bits and `uniform` are equal bit for bit on all
devices; what goes through a logarithm or an error function is equal up to the device's rounding of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fn.array import Array
from vescale_fn.random import errors
from vescale_fn.random.bits import fold_key, random_bits
from vescale_fn.random.philox import MASK
from vescale_fn.random.source import Source, bernoulli_of, exponential_of, gumbel_of, integers_of, normal_of, uniform_of

Shape = int | Sequence[int]


# ---- keys


def key(seed: int) -> Tensor:
    """The key of a seed, an integer of 64 bits: int64 [2], whose elements are its halves.

    >>> import vescale_fn as vf
    >>> vf.random.key(7)
    tensor([0, 7])
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(errors.bad_seed(seed))
    return torch.tensor([seed >> 32 & MASK, seed & MASK])


def split(key: Any, n: int = 2) -> Any:
    """n keys, int64 [n, 2], whose numbers have nothing to do with each other or with those of `key`. The first ones do
    not depend on n.

    >>> import vescale_fn as vf
    >>> k1, k2 = vf.random.split(vf.random.key(0))
    >>> torch.equal(vf.random.split(vf.random.key(0), 5)[:2], torch.stack([k1, k2]))
    True
    """
    return split_keys(checked("vf.random.split", key), n, 0, "split")


def split_keys(key: Any, n: int, draw: int, stream: str) -> Any:
    """n keys from the bits of a draw."""
    return random_bits(key, draw, (n, 2), stream).to(torch.int64).bitwise_and(MASK)


def fold_in(key: Any, data: int | Tensor) -> Any:
    """The key that belongs to `key` and a number, such as the step of a training loop or the number of a layer.

    data: an integer of 64 bits, or an integer tensor without dims.

    >>> import vescale_fn as vf
    >>> vf.random.fold_in(vf.random.key(0), 3).shape
    torch.Size([2])
    """
    key = checked("vf.random.fold_in", key)
    if not isinstance(data, (Tensor, Array)):
        data = torch.tensor(data, dtype=torch.int64, device=key.device)
    return fold_key(key, data)


def checked(what: str, key: Any) -> Any:
    """The key. Raises TypeError if it is none."""
    if not isinstance(key, (Tensor, Array)) or key.dtype != torch.int64 or tuple(key.shape) != (2,):
        raise TypeError(errors.not_a_key(what, key))
    return key


def _source(what: str, key: Any) -> Source:
    return Source(checked(f"vf.random.{what}", key), 0, "draw")


# ---- numbers


def bits(key: Any, shape: Shape = ()) -> Any:
    """32 random bits for each element of `shape`, int32: every value from -2**31 to 2**31 - 1 is as likely.

    Philox4x32-10 with the key's elements as key: element i, in row-major order, is word i % 4 of the block with counter
    (i // 4, i // 4 >> 32, 0, 0).

    >>> import vescale_fn as vf
    >>> vf.random.bits(vf.random.key(0), (2, 2))
    tensor([[ 1713891541,  -513161843],
            [-1135104948, -1694442536]], dtype=torch.int32)
    """
    return _source("bits", key).bits(shape_of(shape))


def uniform(
    key: Any,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    low: float | Tensor = 0.0,
    high: float | Tensor = 1.0,
) -> Any:
    """Numbers from low, included, to high, not included. Between 0 and 1 they are multiples of the dtype's epsilon / 2
    (2**-24 for float32).

    >>> import vescale_fn as vf
    >>> vf.random.uniform(vf.random.key(0), (3,))
    tensor([0.8990, 0.3805, 0.2357])
    """
    return uniform_of(_source("uniform", key), shape_of(shape), floating("uniform", dtype), low, high)


def normal(
    key: Any,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    mean: float | Tensor = 0.0,
    std: float | Tensor = 1.0,
) -> Any:
    """Normally distributed numbers: the inverse of the distribution function at uniform numbers, one for each element
    (at most 5.4 standard deviations away in float32, 8.2 in float64).

    >>> import vescale_fn as vf
    >>> vf.random.normal(vf.random.key(0), (2,)).dtype
    torch.float32
    """
    z = normal_of(_source("normal", key), shape_of(shape), floating("normal", dtype))
    return scaled(z, mean, std)


def truncated_normal(
    key: Any, lower: float, upper: float, shape: Shape = (), dtype: torch.dtype = torch.float32
) -> Any:
    """Normally distributed numbers that fall between lower and upper, in standard deviations.

    >>> import vescale_fn as vf
    >>> x = vf.random.truncated_normal(vf.random.key(0), -2, 2, (1000,))
    >>> bool(x.abs().max() <= 2)
    True
    """
    dtype = floating("truncated_normal", dtype)
    if not lower < upper:
        raise ValueError(errors.bad_bounds(lower, upper))
    below, above = (math.erf(bound / math.sqrt(2)) for bound in (lower, upper))
    u = _source("truncated_normal", key).numbers(shape_of(shape), "unit", torch.float64)
    most = 1 - torch.finfo(torch.float64).eps
    x = (u * (above - below) + below).clamp(max(below, -most), min(above, most))
    return (torch.erfinv(x) * math.sqrt(2)).to(dtype).clamp(lower, upper)


def bernoulli(key: Any, p: float | Tensor = 0.5, shape: Shape | None = None) -> Any:
    """True with probability p (to 2**-32), bool.

    p: a number, or a tensor of probabilities. shape: by default that of p.

    >>> import vescale_fn as vf
    >>> vf.random.bernoulli(vf.random.key(0), 0.9, (4,))
    tensor([True, True, True, True])
    """
    _probability("bernoulli", p)
    if shape is None:
        shape = p.shape if isinstance(p, (Tensor, Array)) else ()
    return bernoulli_of(_source("bernoulli", key), shape_of(shape), p)


def randint(key: Any, shape: Shape, low: int, high: int, dtype: torch.dtype = torch.int64) -> Any:
    """Integers from low, included, to high, not included: 63 bits modulo high - low, so a value is more likely than
    another by (high - low) / 2**63 at most.

    >>> import vescale_fn as vf
    >>> vf.random.randint(vf.random.key(0), (5,), 0, 10)
    tensor([9, 0, 5, 3, 4])
    """
    if not low < high:
        raise ValueError(errors.empty_range(low, high))
    return integers_of(_source("randint", key), shape_of(shape), low, high, dtype)


def permutation(key: Any, x: int | Tensor, dim: int = 0) -> Any:
    """0 to x - 1 in random order, int64; or a tensor with its slices along a dim in random order.

    >>> import vescale_fn as vf
    >>> vf.random.permutation(vf.random.key(0), 5)
    tensor([3, 1, 2, 4, 0])
    """
    source = _source("permutation", key)
    if isinstance(x, int):
        return source.order(x)
    return x.index_select(dim, source.order(x.shape[dim]))


def categorical(key: Any, logits: Any, dim: int = -1, shape: Shape | None = None) -> Any:
    """Classes drawn with probabilities softmax(logits) along `dim`, int64 (the Gumbel-max trick).

    shape: of the result; it ends in the shape of logits without `dim`, which is the default.

    >>> import vescale_fn as vf
    >>> vf.random.categorical(vf.random.key(0), torch.tensor([0.0, 0.0, 20.0]), shape=(4,))
    tensor([2, 2, 2, 2])
    """
    dim = dim % logits.ndim
    batch = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    wanted = batch if shape is None else shape_of(shape)
    if wanted[len(wanted) - len(batch) :] != batch:
        raise ValueError(errors.bad_shape("vf.random.categorical", wanted, batch))
    noise = gumbel_of(_source("categorical", key), (*wanted, logits.shape[dim]), logits.dtype)
    return (noise + logits.movedim(dim, -1)).argmax(-1)


def gumbel(key: Any, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Any:
    """Numbers with the standard Gumbel distribution, -log(-log(u)).

    >>> import vescale_fn as vf
    >>> vf.random.gumbel(vf.random.key(0), (3,)).shape
    torch.Size([3])
    """
    return gumbel_of(_source("gumbel", key), shape_of(shape), floating("gumbel", dtype))


def exponential(key: Any, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Any:
    """Numbers with the exponential distribution of rate 1, -log(1 - u).

    >>> import vescale_fn as vf
    >>> bool((vf.random.exponential(vf.random.key(0), (3,)) >= 0).all())
    True
    """
    return exponential_of(_source("exponential", key), shape_of(shape), floating("exponential", dtype))


def dropout(key: Any, x: Any, p: float = 0.5) -> Any:
    """x with each element zero with probability p, and divided by 1 - p otherwise.

    >>> import vescale_fn as vf
    >>> vf.random.dropout(vf.random.key(0), torch.ones(6), 0.5)
    tensor([0., 2., 2., 2., 2., 0.])
    """
    _probability("dropout", p)
    keep = bernoulli_of(_source("dropout", key), tuple(x.shape), 1 - p)
    return torch.where(keep, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


# ---- arguments


def shape_of(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def floating(what: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype. Raises TypeError unless it is floating."""
    if not dtype.is_floating_point:
        raise TypeError(errors.not_floating(f"vf.random.{what}", dtype))
    return dtype


def _probability(what: str, p: Any) -> None:
    if isinstance(p, (int, float)) and not 0 <= p <= 1:
        raise ValueError(errors.bad_probability(f"vf.random.{what}", p))


def scaled(z: Any, mean: Any, std: Any) -> Any:
    """z * std + mean, without operations that change nothing."""
    z = z if isinstance(std, (int, float)) and std == 1 else z * std
    return z if isinstance(mean, (int, float)) and mean == 0 else z + mean
