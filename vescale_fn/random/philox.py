"""Philox4x32-10, the counter-based generator of every random number, in integer arithmetic on plain tensors.
(J. Salmon, M. Moraes, R. Dror, D. Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.)

A 128-bit counter under a 64-bit key gives four 32-bit words. The counter says what is drawn and where it stands:
(block, block >> 32, draw, stream), and the element with row-major index i of a draw is word i % 4 of block i // 4. So a
number depends on the key, on the draw, and on its global index; whoever holds a part of the tensor makes that part.
Words are computed as int64 and kept as int32, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor

from vescale_fn.random.forms import make_numbers, words_per_number

Tensor = torch.Tensor
Runs = tuple[tuple[int, int], ...]
Word = Tensor | int

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio, and the square root of 3 less 1
MASK = 0xFFFFFFFF

# What a key is used for. Streams share no counter: splitting a key, say, takes nothing from what is drawn with it.
STREAMS = {"draw": 0, "split": 1, "fold": 2, "ambient": 3, "loop": 4}

CACHED = 1 << 15  # blocks at a time on a CPU: most of what a chunk uses stays in its cache
LAUNCHED = 1 << 20  # and elsewhere, where each operation is a launch
TABLE = 1 << 16  # lines whose starts are kept in a table


def philox4x32(counter: Sequence[Word], key: Sequence[Word]) -> list[Tensor]:
    """The four words of each counter, in the low 32 bits of int64 (the bits above are undefined).

    counter, key: words as int64 tensors that broadcast, or as numbers; one at least is a tensor.

    >>> [hex(int(w) & MASK) for w in philox4x32([torch.tensor([0]), 0, 0, 0], [0, 0])]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    tensors = [w for w in (*counter, *key) if isinstance(w, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    x0, x1, *work = (torch.empty(shape, dtype=torch.int64, device=tensors[0].device) for _ in range(6))
    for x, word in ((x0, counter[0]), (x1, counter[2])):
        x.copy_(word & MASK) if isinstance(word, Tensor) else x.fill_(word & MASK)
    return _rounds(x0, counter[1], x1, counter[3], key, work)


def _rounds(x0: Tensor, y0: Any, x1: Tensor, y1: Any, key: Sequence[Word], work: Sequence[Tensor]) -> list[Tensor]:
    """The words of counter (x0, y0, x1, y1), where x0 and x1 hold 32-bit values. They are overwritten, as is `work`."""
    (k0, k1), (p0, p1, *spare) = key, work
    for i in range(ROUNDS):
        torch.mul(x0, MULTIPLIERS[0], out=p0)
        torch.mul(x1, MULTIPLIERS[1], out=p1)
        torch.bitwise_right_shift(p1, 32, out=x0).bitwise_xor_(y0).bitwise_xor_(k0).bitwise_and_(MASK)
        torch.bitwise_right_shift(p0, 32, out=x1).bitwise_xor_(y1).bitwise_xor_(k1).bitwise_and_(MASK)
        # The products are the next words 1 and 3; the next round masks away their high halves.
        (y0, y1), (p0, p1) = (p1, p0), spare if i == 0 else (y0, y1)
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return [x0, y0, x1, y1]


def fold_in(key: Tensor, data: Tensor) -> Tensor:
    """The key [..., 2] that belongs to an int64 number [...] of a key [..., 2]."""
    counter: list[Word] = [data.to(torch.int64), data.to(torch.int64) >> 32, 0, STREAMS["fold"]]
    words = philox4x32(counter, [key[..., 0], key[..., 1]])
    return torch.stack(words[:2], -1).bitwise_and_(MASK)


def random_bits(
    key: Tensor,
    draw: int,
    shape: Sequence[int],
    stream: str,
    form: str = "bits",
    dtype: torch.dtype = torch.int32,
    owned: Sequence[Runs] | None = None,
) -> Tensor:
    """A random number for each element, by default 32 bits.

    key: int64 [..., 2]; each key makes a tensor of its own, and their dims lead in the result.
    shape: of the whole draw. form: what the words become, see `FORMS`. dtype: of the result.
    owned: the runs of global positions to be made of each dim, by default all.

    >>> key = torch.tensor([0, 7])
    >>> whole = random_bits(key, 0, (4, 6), "draw")
    >>> part = random_bits(key, 0, (4, 6), "draw", owned=[((1, 3),), ((0, 2), (4, 6))])
    >>> torch.equal(part, whole[1:3, [0, 1, 4, 5]])
    True
    """
    runs = [((0, n),) for n in shape] if owned is None else list(owned)
    local = [sum(stop - start for start, stop in r) for r in runs]
    keys, per = key.reshape(-1, 2), words_per_number(form, dtype)
    out = torch.empty((len(keys), math.prod(local)), dtype=dtype, device=key.device)
    if out.numel() and not isinstance(out, FakeTensor):  # which counts memory, and has no bits
        base, digits, length = _lines((*shape, per), [*runs, ((0, per),)])
        where = _merged([_offsets(*digit, key.device) for digit in digits])
        lines = math.prod(map(len, where))
        straight = base % 4 == 0 and all(_starts_blocks(*digit) for digit in digits)
        _fill(out.view(len(keys) * lines, length // per), keys, (draw, STREAMS[stream]), base, where, straight, form)
    return out.view((*key.shape[:-1], *local))


def _lines(shape: Sequence[int], runs: Sequence[Runs]) -> tuple[int, list[tuple[Runs, int]], int]:
    """A part of a tensor as lines that are contiguous in the whole, all of one length. Each line starts at base plus,
    for each (positions, stride), one of the positions times the stride.

    >>> _lines((4, 6), [((1, 3),), ((0, 2), (4, 6))])
    (0, [(((1, 3),), 6), (((0, 1), (4, 5)), 1)], 2)
    >>> _lines((4, 6), [((1, 3),), ((0, 6),)])
    (6, [], 12)
    """
    base, digits, length, stride, solid = 0, list[tuple[Runs, int]](), 1, 1, True
    for n, dim in zip(reversed(shape), reversed(runs)):
        positions, sizes = dim, {stop - start for start, stop in dim}
        if solid and len(sizes) == 1:  # a line goes through each run
            length *= sizes.pop()
            positions = tuple((start, start + 1) for start, _ in dim)
        if len(positions) == 1 and positions[0][1] - positions[0][0] == 1:
            base += positions[0][0] * stride
        else:
            digits.insert(0, (positions, stride))
        solid = solid and dim == ((0, n),)
        stride *= n
    return base, digits, length


def _offsets(positions: Runs, stride: int, device: torch.device) -> Tensor:
    runs = [torch.arange(start, stop, device=device) for start, stop in positions]
    return (runs[0] if len(runs) == 1 else torch.cat(runs)) * stride


def _starts_blocks(positions: Runs, stride: int) -> bool:
    """Whether all offsets are multiples of four."""
    return stride % 4 == 0 or all(stop - start == 1 and start * stride % 4 == 0 for start, stop in positions)


def _merged(digits: Sequence[Tensor]) -> list[Tensor]:
    """The same lines with fewer digits: tables of sums, where they stay small, instead of divisions for each line."""
    out: list[Tensor] = []
    for offsets in digits:
        if out and len(out[-1]) * len(offsets) <= TABLE:
            out[-1] = (out[-1].unsqueeze(1) + offsets).flatten()
        else:
            out.append(offsets)
    return out


def _fill(
    out: Tensor, keys: Tensor, high: tuple[int, int], base: int, digits: Sequence[Tensor], straight: bool, form: str
) -> None:
    """Fill lines [keys x lines, numbers], as many at a time as fit in the cache, or pieces of one line.

    high: the upper words of the counter. straight: whether every line starts with a block.
    """
    per = words_per_number(form, out.dtype)
    length, lines = out.shape[1] * per, len(out) // len(keys)
    chunk = _chunk(out.device)
    piece = min(length, 4 * chunk)
    blocks = (piece + 3) // 4 if straight else (piece + 6) // 4
    group = max(chunk // blocks, 1) if piece == length else 1
    buffers = torch.empty((6, min(group, len(out)), blocks), dtype=torch.int64, device=out.device)
    words = torch.empty((min(group, len(out)), blocks, 4), dtype=torch.int32, device=out.device)
    step = torch.arange(blocks, device=out.device)
    for line in range(0, len(out), group):
        number = torch.arange(line, min(line + group, len(out)), device=out.device)
        which = number // lines if len(keys) > 1 else None
        starts = _starts(number if which is None else number - which * lines, base, digits)
        key = _key_words(keys, which)
        for at in range(0, length, piece):
            some, n = buffers[:, : len(number)], min(piece, length - at)
            part = out[line : line + group, at // per : (at + n) // per]
            first = starts + at if at else starts
            exact = form == "bits" and straight and n == 4 * blocks and part.is_contiguous()
            target = part.view(len(number), blocks, 4) if exact else words[: len(number)]
            _blocks(target, (first >> 2).unsqueeze(1) + step, key, high, some)
            if not exact:
                make_numbers(form, _shifted(target.flatten(1), None if straight else first & 3, n), part)


def _chunk(device: torch.device) -> int:
    """How many blocks to compute at a time: operations share the work among threads when it is large."""
    threads = torch.get_num_threads()
    return LAUNCHED if device.type != "cpu" else CACHED if threads == 1 else 2 * CACHED * threads


def _starts(line: Tensor, base: int, digits: Sequence[Tensor]) -> Tensor:
    """Global index of the first element of each line."""
    start = torch.full_like(line, base)
    for offsets in reversed(digits[1:]):
        major = line // len(offsets)
        start += offsets[line - major * len(offsets)]
        line = major
    return start.add_(digits[0][line]) if digits else start


def _key_words(keys: Tensor, which: Tensor | None) -> list[Word]:
    """The words of the key of each line; of the only key, as numbers where reading it waits for no device."""
    if which is not None:
        return [keys[which, 0].unsqueeze(1), keys[which, 1].unsqueeze(1)]
    return list(keys[0].tolist() if keys.device.type == "cpu" else keys[0].unbind())


def _blocks(target: Tensor, block: Tensor, key: Sequence[Word], high: tuple[int, int], work: Tensor) -> None:
    """Write the words of blocks [n, m] to `target` [n, m, 4]."""
    x0, x1, *rest = work
    torch.bitwise_and(block, MASK, out=x0)
    x1.fill_(high[0])
    for i, word in enumerate(_rounds(x0, block.bitwise_right_shift_(32), x1, high[1], key, rest)):
        target[..., i] = word


def _shifted(words: Tensor, skip: Tensor | None, length: int) -> Tensor:
    """`length` words of each line, without those to be skipped at its start."""
    if skip is None:
        return words[:, :length]
    return words.gather(1, skip.unsqueeze(1) + torch.arange(length, device=words.device))
