"""Random numbers: the generator against published answers, distributions against their own, and the messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.specs import mesh_for, spec_for

import vescale_fn as vf
from vescale_fn.placement import cut
from vescale_fn.random.philox import MASK, STREAMS, philox4x32, random_bits
from vescale_fn.sharding.bind import bind
from vescale_fn.sharding.mesh import MeshShape

KEY = vf.random.key(2026)
N = 1 << 17

# From the file kat_vectors of Random123, the authors' library: counter, key, result.
PUBLISHED = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


# ---- the generator


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32([torch.tensor([counter[0], 5]), *counter[1:]], key)
    assert [int(w[0]) & MASK for w in words] == expected
    words = philox4x32([torch.tensor([w]) for w in counter], [torch.tensor(k) for k in key])
    assert [int(w[0]) & MASK for w in words] == expected


def reference(key: tuple[int, int], index: int, draw: int, stream: str) -> int:
    """One number, from the paper's definition, in Python integers."""
    block = index // 4
    c, k = [block & MASK, block >> 32, draw, STREAMS[stream]], list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & MASK, a >> 32 ^ c[3] ^ k[1], a & MASK]
        k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
    word = c[index % 4]
    return word - (1 << 32) if word >> 31 else word


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 3), (5, 66_000)])
def test_numbers_are_addressed_by_their_index(shape: tuple[int, ...]) -> None:
    """The last shape is computed in several pieces."""
    drawn = random_bits(torch.tensor([5, MASK - 7]), 3, shape, "ambient").reshape(-1)
    assert drawn.dtype is torch.int32
    for i in {*range(min(20, drawn.numel())), *range(max(drawn.numel() - 20, 0), drawn.numel())}:
        assert int(drawn[i]) == reference((5, MASK - 7), i, 3, "ambient")


def test_the_counter_has_64_bits_for_the_index() -> None:
    rows, columns = 1 << 18, 1 << 18
    last = random_bits(KEY, 0, (rows, columns), "draw", owned=[((rows - 1, rows),), ((5, 9),)])
    first = (rows - 1) * columns + 5
    assert first // 4 > MASK
    key = (int(KEY[0]), int(KEY[1]))
    assert last.flatten().tolist() == [reference(key, first + i, 0, "draw") for i in range(4)]


@st.composite
def parts(draw: st.DrawFn) -> tuple[dict[str, int], tuple[int, ...], str]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 37]), min_size=1, max_size=3)))
    mesh = mesh_for(draw)
    return mesh, shape, spec_for(draw, shape, mesh, pending=())


@given(parts())
@settings(max_examples=80)
def test_a_rank_draws_its_part_of_the_whole(case: tuple[dict[str, int], tuple[int, ...], str]) -> None:
    """Factors, tuple axes, uneven and empty shards."""
    axes, shape, spec = case
    mesh = MeshShape(tuple(axes), tuple(axes.values()))
    layout, whole = bind(spec, shape, mesh), random_bits(KEY, 1, shape, "draw")
    for coords in mesh.all_coords():
        owned = [layout.intervals(d, coords) for d in range(layout.ndim)]
        assert torch.equal(random_bits(KEY, 1, shape, "draw", owned=owned), cut(whole, layout, coords))


@pytest.mark.parametrize("runs", [((0, 3), (5, 6)), ((1, 2),), ((0, 2), (4, 4), (6, 9)), ()])
def test_runs_of_any_lengths(runs: Any) -> None:
    whole = random_bits(KEY, 0, (9, 5), "draw")
    index = [i for a, b in runs for i in range(a, b)]
    assert torch.equal(random_bits(KEY, 0, (9, 5), "draw", owned=[runs, ((0, 5),)]), whole[index])
    whole = random_bits(KEY, 0, (5, 9), "draw")
    assert torch.equal(random_bits(KEY, 0, (5, 9), "draw", owned=[((1, 4),), runs]), whole[1:4, index])


@pytest.mark.parametrize("n", [3, 70_001])
def test_a_batch_of_keys_draws_for_each(n: int) -> None:
    keys = vf.random.split(KEY, 6).reshape(2, 3, 2)
    drawn = random_bits(keys, 0, (n,), "draw")
    assert all(torch.equal(drawn[i, j], random_bits(keys[i, j], 0, (n,), "draw")) for i in (0, 1) for j in range(3))
    part = random_bits(keys, 0, (n,), "draw", owned=[((1, n),)])
    assert torch.equal(part, drawn[..., 1:])


# ---- how random it is


def bits_of(*draws: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.stack([x.numpy().view(np.uint32) for x in draws])


def sources() -> dict[str, torch.Tensor]:
    """Sets of numbers that should have nothing to do with each other, however near their addresses are."""
    k1, k2 = vf.random.split(KEY)
    whole = vf.random.bits(KEY, (2, N))
    named = {"rank 0": whole[0], "rank 1": whole[1], "child 0": vf.random.bits(k1, N), "child 1": vf.random.bits(k2, N)}
    named |= {f"seed {i}": vf.random.bits(vf.random.key(i), N) for i in range(3)}
    named |= {f"folded {i}": vf.random.bits(vf.random.fold_in(KEY, i), N) for i in range(2)}
    named |= {f"draw {i}": random_bits(KEY, i, (N,), "ambient") for i in range(2)}
    return named


def test_no_two_of_ranks_keys_and_draws_are_correlated() -> None:
    """Of N pairs of bits half agree, give or take the square root of N / 4: for each of the 32 bits, and all together.
    The numbers are always the same ones, so a bound that they keep is kept for good."""
    for (a, x), (b, y) in itertools.combinations(sources().items(), 2):
        differ = (x ^ y).numpy().view(np.uint32)
        counts = np.array([(differ >> i & 1).sum() for i in range(32)])
        deviation = (counts - N / 2) / math.sqrt(N / 4)
        assert np.abs(deviation).max() < 4.5, f"{a} and {b}"
        assert abs(deviation.sum() / math.sqrt(32)) < 4.5, f"{a} and {b}"


def test_bits_are_uniform() -> None:
    for name, x in sources().items():
        word = x.numpy().view(np.uint32)
        for shift in (0, 8, 16, 24):
            p = scipy.stats.chisquare(np.bincount(word >> shift & 255, minlength=256)).pvalue
            assert p > 1e-4, f"{name}, bits from {shift}"
        pairs = (word[:-1] >> 28) * 16 + (word[1:] >> 28)
        assert scipy.stats.chisquare(np.bincount(pairs, minlength=256)).pvalue > 1e-4, f"{name}, neighbours"
        lag = np.corrcoef(word[:-1], word[1:])[0, 1] * math.sqrt(N)
        assert abs(lag) < 4.5, name


FLOATS = [torch.float32, torch.float64]
DISTRIBUTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "uniform": (vf.random.uniform, scipy.stats.uniform()),
    "uniform from -2 to 3": (lambda k, n, dtype: vf.random.uniform(k, n, dtype, -2, 3), scipy.stats.uniform(-2, 5)),
    "normal": (vf.random.normal, scipy.stats.norm()),
    "normal, 2 and 0.5": (lambda k, n, dtype: vf.random.normal(k, n, dtype, 2, 0.5), scipy.stats.norm(2, 0.5)),
    "truncated": (lambda k, n, dtype: vf.random.truncated_normal(k, -1, 3, n, dtype), scipy.stats.truncnorm(-1, 3)),
    "tail": (lambda k, n, dtype: vf.random.truncated_normal(k, 2, math.inf, n, dtype), scipy.stats.truncnorm(2, 99)),
    "gumbel": (vf.random.gumbel, scipy.stats.gumbel_r()),
    "exponential": (vf.random.exponential, scipy.stats.expon()),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str, dtype: torch.dtype) -> None:
    draw, expected = DISTRIBUTIONS[name]
    x = draw(KEY, N, dtype)
    assert x.dtype is dtype
    x = x.double().numpy()
    assert scipy.stats.kstest(x, expected.cdf).pvalue > 1e-3
    mean, variance, skew, kurtosis = map(float, expected.stats("mvsk"))
    assert abs(x.mean() - mean) < 4 * math.sqrt(variance / N)
    assert abs(x.var() / variance - 1) < 4 * math.sqrt((kurtosis + 2) / N)
    assert abs(scipy.stats.skew(x) - skew) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOATS])
def test_uniform_numbers_are_multiples_from_0_to_1(dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps / 2
    x = vf.random.uniform(KEY, N, dtype).double()
    assert bool((x >= 0).all())
    assert bool((x < 1).all())
    assert torch.equal((x / unit).floor(), x / unit)
    assert len(x.unique()) == min(round(1 / unit), len(x.unique()))
    assert float(x.mean()) == pytest.approx(0.5 - unit / 2, abs=4 / math.sqrt(12 * N))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_round_what_float32_holds(dtype: torch.dtype) -> None:
    for draw in (vf.random.normal, vf.random.exponential, vf.random.gumbel):
        assert torch.equal(draw(KEY, 100, dtype), draw(KEY, 100, torch.float32).to(dtype))


def test_uniform_numbers_stay_below_the_end() -> None:
    x = vf.random.uniform(KEY, N, torch.float32, 1, 1 + 2**-22)
    assert set(x.tolist()) == {1, 1 + 2**-23}


def test_symmetry_and_reach_of_normal_numbers() -> None:
    low, high = (torch.erfinv(torch.tensor(s * (1 - 2**-24))) * math.sqrt(2) for s in (-1, 1))
    assert float(high) == pytest.approx(5.42, abs=0.01)
    assert float(low) == -float(high)
    x = vf.random.normal(KEY, N)
    assert float(x.abs().max()) <= float(high)


@pytest.mark.parametrize("p", [0, 0.0, 1e-9, 0.3, 0.5, 1 - 1e-9, 1.0, 1])
def test_bernoulli(p: float) -> None:
    drawn = vf.random.bernoulli(KEY, p, (N,))
    assert drawn.dtype is torch.bool
    assert abs(float(drawn.double().mean()) - p) <= 4 * math.sqrt(p * (1 - p) / N)
    assert torch.equal(drawn, vf.random.bernoulli(KEY, torch.full((N,), float(p), dtype=torch.float64)))


def test_bernoulli_of_many_probabilities() -> None:
    p = torch.tensor([0.0, 0.25, 1.0])
    drawn = vf.random.bernoulli(KEY, p, (N, 3)).double().mean(0)
    assert drawn.tolist() == pytest.approx([0, 0.25, 1], abs=4 * math.sqrt(0.1875 / N))
    assert vf.random.bernoulli(KEY, p).shape == (3,)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (-3, 5), (0, 1 << 20), (-(1 << 40), 1 << 40)])
def test_randint(low: int, high: int) -> None:
    x = vf.random.randint(KEY, (N,), low, high)
    assert x.dtype is torch.int64
    assert low <= int(x.min()) <= int(x.max()) < high
    groups = ((x - low).double() / (high - low) * min(high - low, 64)).floor().long()
    if high - low > 1:
        assert scipy.stats.chisquare(torch.bincount(groups).numpy()).pvalue > 1e-3
    assert vf.random.randint(KEY, 3, 0, 100, torch.int8).dtype is torch.int8


def test_permutation() -> None:
    order = vf.random.permutation(KEY, 1000)
    assert order.sort().values.tolist() == list(range(1000))
    x = torch.rand(3, 1000)
    assert torch.equal(vf.random.permutation(KEY, x, dim=1), x[:, order])
    orders = torch.vmap(lambda k: vf.random.permutation(k, 3))(vf.random.split(KEY, 6000))
    counts = (orders * torch.tensor([9, 3, 1])).sum(1).bincount()
    assert scipy.stats.chisquare(counts[counts > 0].numpy()).pvalue > 1e-3
    assert int((counts > 0).sum()) == 6


def test_categorical() -> None:
    p = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]])
    drawn = vf.random.categorical(KEY, p.log(), shape=(N // 4, 2))
    for row, expected in zip(drawn.T, p):
        counts = row.bincount(minlength=3).numpy()
        kept = expected.numpy() > 0
        assert counts[~kept].sum() == 0
        assert scipy.stats.chisquare(counts[kept], counts.sum() * expected.double().numpy()[kept]).pvalue > 1e-3
    assert vf.random.categorical(KEY, p.log().T, dim=0).shape == (2,)


def test_dropout() -> None:
    x = torch.rand(N) + 1
    y = vf.random.dropout(KEY, x, 0.25)
    assert abs(float((y == 0).double().mean()) - 0.25) < 4 * math.sqrt(0.1875 / N)
    assert torch.equal(y[y != 0], (x * (1 / 0.75))[y != 0])
    assert torch.equal(vf.random.dropout(KEY, x, 0.0), x)
    assert not vf.random.dropout(KEY, x, 1.0).any()


# ---- keys


def test_keys() -> None:
    assert vf.random.key(1 << 33 | 5).tolist() == [2, 5]
    assert vf.random.key(-1).tolist() == [MASK, MASK]
    children = vf.random.split(KEY, 1000)
    assert children.dtype is torch.int64
    assert bool(((children >= 0) & (children <= MASK)).all())
    folded = torch.stack([vf.random.fold_in(KEY, i) for i in (0, 1, -1, 1 << 40)])
    everything = torch.cat([KEY[None], children, vf.random.split(children[0], 1000), folded])
    assert len(everything.unique(dim=0)) == 2005
    assert torch.equal(vf.random.fold_in(KEY, torch.tensor(7)), vf.random.fold_in(KEY, 7))
    assert torch.equal(vf.random.fold_in(KEY, torch.tensor(7, dtype=torch.int32)), vf.random.fold_in(KEY, 7))


def test_transforms_of_torch_func() -> None:
    keys, x = vf.random.split(KEY, 4), torch.rand(4, 5)

    def f(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        a, b = vf.random.split(vf.random.fold_in(key, 3))
        return vf.random.dropout(a, x * x) + vf.random.normal(b, (5,))

    each = [f(k, v) for k, v in zip(keys, x)]
    assert torch.equal(torch.vmap(f)(keys, x), torch.stack(each))
    same = torch.vmap(f, (None, 0))(KEY, x)  # what a key draws does not depend on what is mapped over
    assert torch.equal(same, torch.stack([f(KEY, v) for v in x]))

    def mask(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return vf.random.dropout(vf.random.split(vf.random.fold_in(key, 3))[0], x)

    slopes = torch.vmap(torch.func.grad(lambda x, k: f(k, x).sum()))(x, keys)
    assert torch.equal(slopes, torch.stack([mask(k, 2 * v) for k, v in zip(keys, x)]))
    _, tangent = torch.func.jvp(lambda x: f(KEY, x), (x[0],), (torch.ones(5),))
    assert torch.equal(tangent, mask(KEY, 2 * x[0]))
    numbers = torch.vmap(lambda i: vf.random.fold_in(KEY, i))(torch.arange(3))
    assert torch.equal(numbers, torch.stack([vf.random.fold_in(KEY, i) for i in range(3)]))


# ---- messages


def said(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_messages() -> None:
    draw = vf.random.normal
    assert said(lambda: draw(0), TypeError) == "vf.random.normal: the key is 0. Make one with vf.random.key(0)."
    assert said(lambda: draw(None), TypeError) == "vf.random.normal: the key is None. Make one with vf.random.key(0)."
    assert said(lambda: vf.random.split(torch.zeros(3)), TypeError) == (
        "vf.random.split: the key is a tensor f32[3], and a key is i64[2]. Make one with vf.random.key(0), or from "
        "another with vf.random.split."
    )
    assert said(lambda: draw(vf.random.split(KEY, 4)), TypeError) == (
        "vf.random.normal: the key is a tensor i64[4, 2], and a key is i64[2]. These are [4] keys: take one (keys[0]), "
        "or use torch.vmap over them."
    )
    assert said(lambda: vf.random.key(1.5), ValueError) == (  # type: ignore[arg-type]
        "vf.random.key: the seed is 1.5. It must be an integer of 64 bits, such as 0."
    )
    assert said(lambda: vf.random.dropout(KEY, torch.ones(2), 1.5), ValueError) == (
        "vf.random.dropout: p is 1.5. It must be a probability, from 0 to 1."
    )
    assert said(lambda: vf.random.randint(KEY, 3, 5, 5), ValueError) == (
        "vf.random.randint: low is 5 and high is 5. high must be greater than low, and is not drawn itself."
    )
    assert said(lambda: vf.random.truncated_normal(KEY, 1, 1), ValueError) == (
        "vf.random.truncated_normal: lower is 1 and upper is 1. upper must be greater than lower."
    )
    assert said(lambda: vf.random.categorical(KEY, torch.zeros(2, 3), shape=4), ValueError) == (
        "vf.random.categorical: shape is [4], which does not end in [2], the shape of what is drawn from."
    )
    assert said(lambda: draw(KEY, 3, torch.int64), TypeError) == (
        "vf.random.normal: dtype is torch.int64. It must be a floating-point dtype; vf.random.randint and bits draw "
        "integers."
    )
