"""Distributions made of random bits. A `Source` is one draw of one key; each function uses it once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_fn.random.bits import random_bits
from vescale_fn.random.philox import MASK

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Source:
    """The numbers of one draw of a key in a stream."""

    key: Any
    draw: int
    stream: str

    def bits(self, shape: Sequence[int]) -> Any:
        """32 bits for each element, int32."""
        return random_bits(self.key, self.draw, tuple(shape), self.stream)

    def pairs(self, shape: Sequence[int]) -> tuple[Any, Any]:
        """Twice 32 bits for each element."""
        high, low = self.bits((*shape, 2)).unbind(-1)
        return high, low

    def order(self, n: int) -> Any:
        """A random order of n things, int64: that of 64 random bits for each. (That any two are equal, and their order
        not random, happens once in 2**65 / n**2 draws.)"""
        high, low = self.pairs((n,))
        return torch.argsort((high.to(torch.int64) << 32) | (low.to(torch.int64) & MASK), stable=True)


def centered(source: Source, shape: Sequence[int], dtype: torch.dtype) -> tuple[Any, int]:
    """Integers from -2**(d-1) to 2**(d-1) - 1 in a floating dtype with d digits, and d."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    if digits <= 32:
        return (source.bits(shape) >> (32 - digits)).to(dtype), digits
    high, low = source.pairs(shape)
    rest = digits - 27
    fine = (low >> (32 - rest)) & ((1 << rest) - 1)
    return (high >> 5).to(dtype) * 2.0**rest + fine.to(dtype), digits


def unit_of(source: Source, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Multiples of 2**-d from 0 to 1, exact in every dtype."""
    x, digits = centered(source, shape, dtype)
    return x * 2.0**-digits + 0.5


def uniform_of(source: Source, shape: Sequence[int], dtype: torch.dtype, low: Any = 0.0, high: Any = 1.0) -> Any:
    u = unit_of(source, shape, dtype)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and (low, high) == (0, 1):
        return u
    x = u * (high - low) + low
    return torch.where(x < high, x, low).to(dtype)  # what was rounded up to the end starts again


def normal_of(source: Source, shape: Sequence[int], dtype: torch.dtype) -> Any:
    x, digits = centered(source, shape, _wide(dtype))
    z = torch.erfinv((x + 0.5) * 2.0 ** (1 - digits)) * math.sqrt(2)
    return z.to(dtype)


def exponential_of(source: Source, shape: Sequence[int], dtype: torch.dtype) -> Any:
    return (-torch.log1p(-unit_of(source, shape, _wide(dtype)))).to(dtype)


def gumbel_of(source: Source, shape: Sequence[int], dtype: torch.dtype) -> Any:
    x, digits = centered(source, shape, _wide(dtype))
    u = (x * 2.0**-digits + 0.5).clamp_min(2.0 ** (-digits - 1))  # 0 would give -inf
    return (-torch.log(-torch.log(u))).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What to compute in."""
    return torch.float32 if dtype in _HALVES else dtype


def bernoulli_of(source: Source, shape: Sequence[int], p: Any) -> Any:
    """Whether bits, as a number from 0, are below p * 2**32: exact, whatever p is."""
    bits = source.bits(shape)
    if not isinstance(p, (int, float)):
        p = p.to(torch.float64) if isinstance(p, Tensor) else p
        return bits.to(torch.float64) < p * 2.0**32 - 2.0**31
    bound = math.ceil(p * 2.0**32) - 2**31
    return bits < bound if bound < 2**31 else bits <= 2**31 - 1


def integers_of(source: Source, shape: Sequence[int], low: int, high: int, dtype: torch.dtype) -> Any:
    """From low to high - 1."""
    top, bottom = source.pairs(shape)
    word = ((top.to(torch.int64) & MASK >> 1) << 32) | (bottom.to(torch.int64) & MASK)
    return (word % (high - low) + low).to(dtype)
