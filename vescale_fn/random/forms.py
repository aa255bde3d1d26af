"""What random words become, piece by piece while they are in the cache: each number of a draw is made of one word, or
of two where its dtype has more than 32 bits to fill. (The same arithmetic over a whole draw takes twice as long as the
generator does.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor


def words_per_number(form: str, dtype: torch.dtype) -> int:
    """How many words a number takes."""
    return 2 if form.startswith("int") or (dtype.is_floating_point and _digits_of(dtype) > 32) else 1


def make_numbers(form: str, words: Tensor, out: Tensor) -> None:
    """Write to `out` [n, m] the numbers of words [n, m * words_per_number], int32, which may be overwritten."""
    FORMS[form](words, out)


def _digits_of(dtype: torch.dtype) -> int:
    """Binary digits of a floating dtype."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _centered_words(words: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Integers from -2**(d-1) to 2**(d-1) - 1 in a floating dtype with d digits, and d."""
    digits = _digits_of(dtype)
    if digits <= 32:
        return words.bitwise_right_shift_(32 - digits).to(dtype), digits
    high, low = words[..., ::2], words[..., 1::2]
    rest = digits - 27
    fine = (low >> (32 - rest)).bitwise_and_((1 << rest) - 1)
    return (high >> 5).to(dtype).mul_(2.0**rest).add_(fine), digits


def _scaled_shifted(x: Tensor, scale: float, shift: float, out: Tensor | None = None) -> Tensor:
    """x * scale + shift, in one pass."""
    return torch.add(torch.full((), shift, dtype=x.dtype, device=x.device), x, alpha=scale, out=out)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """What to compute in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def as_bits(words: Tensor, out: Tensor) -> None:
    out.copy_(words)


def as_int64(words: Tensor, out: Tensor) -> None:
    """64 bits of two words, the first of which is the upper half."""
    high, low = words[..., ::2], words[..., 1::2]
    upper = high.to(torch.int64).bitwise_left_shift_(32)
    torch.bitwise_or(upper, low.to(torch.int64).bitwise_and_(0xFFFFFFFF), out=out)


def as_int63(words: Tensor, out: Tensor) -> None:
    """Those of them that are not negative."""
    as_int64(words, out)
    out.bitwise_and_((1 << 63) - 1)


def as_unit(words: Tensor, out: Tensor) -> None:
    """Multiples of 2**-d from 0 to 1, exact in every dtype."""
    x, digits = _centered_words(words, out.dtype)
    _scaled_shifted(x, 2.0**-digits, 0.5, out)


def as_normal(words: Tensor, out: Tensor) -> None:
    """The inverse of the distribution function, in the middle between two multiples of 2**-d."""
    x, digits = _centered_words(words, _computed_in(out.dtype))
    torch.mul(_scaled_shifted(x, 2.0 ** (1 - digits), 2.0**-digits).erfinv_(), math.sqrt(2), out=out)


def as_exponential(words: Tensor, out: Tensor) -> None:
    """-log(1 - u)."""
    x, digits = _centered_words(words, _computed_in(out.dtype))
    out.copy_(_scaled_shifted(x, -(2.0**-digits), -0.5).log1p_().abs_())


def as_gumbel(words: Tensor, out: Tensor) -> None:
    """-log(-log(u))."""
    x, digits = _centered_words(words, _computed_in(out.dtype))
    u = _scaled_shifted(x, 2.0**-digits, 0.5).clamp_min_(2.0 ** (-digits - 1))  # 0 would give -inf
    torch.mul(u.log_().neg_().log_(), -1, out=out)


FORMS: Mapping[str, Callable[[Tensor, Tensor], None]] = {
    "bits": as_bits,
    "int63": as_int63,
    "int64": as_int64,
    "unit": as_unit,
    "normal": as_normal,
    "exponential": as_exponential,
    "gumbel": as_gumbel,
}
