"""Distributions made of random numbers. A `Source` is one draw of one key; each function uses it once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_fn.random.bits import random_bits


@dataclass(frozen=True, eq=False)
class Source:
    """The numbers of one draw of a key in a stream."""

    key: Any
    draw: int
    stream: str

    def bits(self, shape: Sequence[int]) -> Any:
        """32 bits for each element, int32."""
        return random_bits(self.key, self.draw, tuple(shape), self.stream)

    def numbers(self, shape: Sequence[int], form: str, dtype: torch.dtype) -> Any:
        """A number for each element, in a form of `random.forms`."""
        return random_bits(self.key, self.draw, tuple(shape), self.stream, form, dtype)

    def order(self, n: int) -> Any:
        """A random order of n things, int64: that of 64 random bits for each. (That any two are equal, and their order
        not random, happens once in 2**65 / n**2 draws.)"""
        return torch.argsort(self.numbers((n,), "int64", torch.int64), stable=True)


def uniform_of(source: Source, shape: Sequence[int], dtype: torch.dtype, low: Any = 0.0, high: Any = 1.0) -> Any:
    u = source.numbers(shape, "unit", dtype)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and (low, high) == (0, 1):
        return u
    x = u * (high - low) + low
    return torch.where(x < high, x, low).to(dtype)  # what was rounded up to the end starts again


def normal_of(source: Source, shape: Sequence[int], dtype: torch.dtype) -> Any:
    return source.numbers(shape, "normal", dtype)


def exponential_of(source: Source, shape: Sequence[int], dtype: torch.dtype) -> Any:
    return source.numbers(shape, "exponential", dtype)


def gumbel_of(source: Source, shape: Sequence[int], dtype: torch.dtype) -> Any:
    return source.numbers(shape, "gumbel", dtype)


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
    word = source.numbers(shape, "int63", torch.int64)
    return (word.fmod(high - low) + low).to(dtype)
