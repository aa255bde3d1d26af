"""AdamW with moments of 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vescale_fn.optim import checks
from vescale_fn.optim.algorithm import Slot
from vescale_fn.optim.list_update import ListUpdate
from vescale_fn.optim.masks import Mask
from vescale_fn.optim.optimizer import Block, Optimizer
from vescale_fn.optim.schedules import Rate, rate_text

MOMENTS = {"exp_avg": torch.int8, "exp_avg_scale": None, "exp_avg_sq": torch.uint8, "exp_avg_sq_scale": None}


def adamw8bit(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    block: int | tuple[int, int] = 2048,
    decay: Mask = None,
) -> Optimizer:
    """AdamW whose state takes 2 bytes for each element of a parameter, and 8 for each block. Arguments as `adamw`.

    block: what has a scale of its own: so many elements that lie one after the other, or tiles of a matrix (of the last
        two dims), for parameters whose last dim is sharded. Blocks are whole rows or divide a row, and divide their
        parameter: where the number does not, the best that does is taken, and where a tile does not, as many elements
        of rows.
    The state has "exp_avg" (int8) and "exp_avg_sq" (uint8), of the shapes of the parameters, and their scales,
    "exp_avg_scale" and "exp_avg_sq_scale" (float32), of these shapes divided by those of the blocks. Parameters that
    are cut between blocks are updated where they are, with the bits of one device; `schedules.zero` cuts so.
    Raises ValueError for settings out of range. Dettmers et al., https://arxiv.org/abs/2110.02861.

    >>> opt = adamw8bit(lr=3e-4)
    >>> state = opt.init({"w": torch.zeros(4096, 512)})
    >>> state["exp_avg"]["w"].dtype, list(state["exp_avg_scale"]["w"].shape)
    (torch.int8, [1024, 1])
    """
    checks.settings("adamw8bit", lr=lr, eps=eps, weight_decay=weight_decay)
    if not all(0 <= b < 1 for b in betas):
        raise ValueError(f"adamw8bit: betas={betas} must both lie in [0, 1).")
    sides = (block,) if isinstance(block, int) else tuple(block)
    if len(sides) > 2 or not sides or min(sides) < 1:
        raise ValueError(
            f"adamw8bit: block={block} must be a number of elements, such as 2048, or the sides of a tile, such as "
            "(32, 32)."
        )
    settings = {"beta1": float(betas[0]), "beta2": float(betas[1]), "eps": float(eps), "weight_decay": weight_decay}
    name = f"adamw8bit(lr={rate_text(lr)}, betas={betas}, eps={eps}, weight_decay={weight_decay}, block={block})"
    blocks = Blocks(sides)
    return ListUpdate("adamw8", tuple(MOMENTS), settings, blocks.slot, blocks.of).optimizer(name, lr, decay)


@dataclass(frozen=True)
class Blocks:
    """How parameters are cut into blocks. sides: a number of elements, or the sides of a tile."""

    sides: tuple[int, ...]

    def of(self, shape: tuple[int, ...]) -> Block:
        """The block of a parameter of a shape.

        >>> [Blocks((2048,)).of(s).shape for s in ((4096, 512), (4096, 6144), (50257, 768), (64, 32), (4099,))]
        [(4, 512), (1, 2048), (1, 768), (64, 32), (4099,)]
        >>> [Blocks((32, 32)).of(s).shape for s in ((8, 64, 96), (50, 64), (4096,))]
        [(1, 32, 32), (10, 64), (1024,)]
        """
        tile = len(self.sides) == 2
        if tile and len(shape) > 1 and not any(n % b for n, b in zip(shape[-2:], self.sides)):
            return Block((*(1 for _ in shape[2:]), *self.sides))
        return Block(run(shape, math.prod(self.sides)))

    def slot(self, moment: str, shape: tuple[int, ...]) -> Slot:
        if (dtype := MOMENTS[moment]) is not None:
            return Slot(shape, dtype=dtype)
        return Slot(tuple(n // b for n, b in zip(shape, self.of(shape).shape)), dtype=torch.float32)


def run(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The block of elements that lie one after the other: dims from the last on, as long as there is room.

    At most `size` elements, unless that makes blocks of less than an eighth of it where larger ones come nearer.
    """
    block, room = [1] * len(shape), size
    for d in reversed(range(len(shape))):
        block[d] = _divisor(shape[d], room)
        if block[d] != shape[d]:
            break
        room = max(1, room // max(block[d], 1))
    return tuple(block)


def _divisor(n: int, room: int) -> int:
    """The divisor of n to take where there is room for so many."""
    below = max((d for d in _divisors(n) if d <= room), default=1)
    above = min((d for d in _divisors(n) if d > room), default=below)
    return above if 8 * below < room and above * below < room * room else below


def _divisors(n: int) -> Iterator[int]:
    for d in range(1, math.isqrt(n) + 1):
        if n % d == 0:
            yield from (d, n // d)
