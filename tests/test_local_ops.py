"""Local operations: the sum over ranks of what they read is the read, and what ranks write, put together, is the
write, for any way to own the positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_fn import local_ops
from vescale_fn.inline import Inliner
from vescale_fn.local_ops import Runs
from vescale_fn.sharding.layout import Kind

SIZE = 7
SETTINGS = settings(max_examples=60)


@st.composite
def ownerships(draw: st.DrawFn) -> list[Runs]:
    """Who owns each of SIZE positions, as runs; a rank may own nothing, or several runs."""
    ranks = draw(st.integers(1, 3))
    owner = draw(st.lists(st.integers(0, ranks - 1), min_size=SIZE, max_size=SIZE))
    return [runs_of([p for p, o in enumerate(owner) if o == rank]) for rank in range(ranks)]


def runs_of(positions: list[int]) -> Runs:
    """Sorted positions as runs; at least one, which may be empty."""
    runs: list[tuple[int, int]] = []
    for p in positions:
        if runs and runs[-1][1] == p:
            runs[-1] = (runs[-1][0], p + 1)
        else:
            runs.append((p, p + 1))
    return tuple(runs) or ((SIZE, SIZE),)


def positions_of(runs: Runs) -> torch.Tensor:
    return torch.tensor([p for start, stop in runs for p in range(start, stop)], dtype=torch.int64)


indices = st.lists(st.integers(0, SIZE - 1), max_size=6).map(lambda x: torch.tensor(x, dtype=torch.int64))
wrapped = st.lists(st.integers(-SIZE, SIZE - 1), max_size=6).map(lambda x: torch.tensor(x, dtype=torch.int64))


def summed(owned: list[Runs], x: torch.Tensor, dim: int, read: Callable[..., torch.Tensor]) -> torch.Tensor:
    parts = [read(x.index_select(dim, positions_of(runs)), runs) for runs in owned]
    return torch.stack(parts).sum(0)


def put_together(owned: list[Runs], x: torch.Tensor, dim: int, write: Callable[..., torch.Tensor]) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    for runs in owned:
        positions = positions_of(runs)
        out = out.index_copy(dim, positions, write(x.index_select(dim, positions), runs))
    return out


# --- reads ----------------------------------------------------------------------------------------------------------


@SETTINGS
@given(ownerships(), indices)
def test_look_ups_of_rows(owned: list[Runs], index: torch.Tensor) -> None:
    table = torch.randn(SIZE, 3)
    want = table[index]
    assert summed(owned, table, 0, lambda x, runs: local_ops.embedding_shard(x, index, runs, SIZE)).equal(want)
    assert summed(owned, table, 0, lambda x, runs: local_ops.index_select_shard(x, 0, index, runs, SIZE)).equal(want)


@SETTINGS
@given(ownerships(), indices)
def test_gather(owned: list[Runs], index: torch.Tensor) -> None:
    x, index = torch.randn(2, SIZE), index.expand(2, -1)
    got = summed(owned, x, 1, lambda part, runs: local_ops.gather_shard(part, 1, index, runs, SIZE))
    assert got.equal(x.gather(1, index))


@SETTINGS
@given(ownerships(), ownerships(), wrapped)
def test_indexing_with_negative_positions(rows: list[Runs], columns: list[Runs], index: torch.Tensor) -> None:
    """Two indexed dims, both sharded."""
    x = torch.randn(SIZE, 2, SIZE)
    want = x[index, :, index.flip(0)]

    def read(part: torch.Tensor, runs: Runs) -> torch.Tensor:
        def inner(block: torch.Tensor, other: Runs) -> torch.Tensor:
            at = [index, None, index.flip(0)]
            return local_ops.index_shard(block, at, [runs, None, other], [SIZE, 2, SIZE])

        return summed(columns, part, 2, inner)

    assert summed(rows, x, 0, read).equal(want)


def test_what_another_rank_holds_reads_as_zero_even_next_to_nan() -> None:
    table = torch.tensor([[float("nan")], [float("inf")]])
    assert local_ops.embedding_shard(table, torch.tensor([0]), ((4, 6),), 6).equal(torch.zeros(1, 1))


# --- writes -----------------------------------------------------------------------------------------------------------


@SETTINGS
@given(ownerships(), indices)
def test_additions(owned: list[Runs], index: torch.Tensor) -> None:
    x, source = torch.randn(SIZE, 3, dtype=torch.float64), torch.randn(index.numel(), 3, dtype=torch.float64)
    added = put_together(owned, x, 0, lambda p, r: local_ops.index_add_shard(p, 0, index, source, r, SIZE, 2))
    torch.testing.assert_close(added, x.index_add(0, index, source, alpha=2))
    wide = index.unsqueeze(1).expand(-1, 3)
    scattered = put_together(owned, x, 0, lambda p, r: local_ops.scatter_shard(p, 0, wide, source, r, SIZE, "add"))
    torch.testing.assert_close(scattered, x.scatter_add(0, wide, source))
    put = put_together(
        owned, x, 0, lambda p, r: local_ops.index_put_shard(p, [index - SIZE], source, True, [r], [SIZE])
    )
    torch.testing.assert_close(put, x.index_put((index,), source, accumulate=True))


@SETTINGS
@given(ownerships(), st.permutations(range(SIZE)), st.integers(0, SIZE))
def test_overwriting(owned: list[Runs], order: list[int], n: int) -> None:
    x, source, index = torch.randn(SIZE, 3), torch.randn(n, 3), torch.tensor(order[:n], dtype=torch.int64)
    wide = index.unsqueeze(1).expand(-1, 3)
    want = x.index_copy(0, index, source)
    copied = put_together(owned, x, 0, lambda p, r: local_ops.index_copy_shard(p, 0, index, source, r, SIZE))
    scattered = put_together(owned, x, 0, lambda p, r: local_ops.scatter_shard(p, 0, wide, source, r, SIZE))
    put = put_together(owned, x, 0, lambda p, r: local_ops.index_put_shard(p, [index], source, False, [r], [SIZE]))
    filled = put_together(owned, x, 0, lambda p, r: local_ops.index_fill_shard(p, 0, index - SIZE, 5.0, r, SIZE))
    assert copied.equal(want)
    assert scattered.equal(want)
    assert put.equal(want)
    assert filled.equal(x.index_fill(0, index, 5.0))


@SETTINGS
@given(ownerships(), indices, st.sampled_from(["sum", "prod", "mean", "amax", "amin"]), st.booleans())
def test_scatter_reduce(owned: list[Runs], index: torch.Tensor, reduce: str, include_self: bool) -> None:
    x, src = torch.randn(SIZE), torch.randn(index.numel())
    options = {"include_self": include_self}
    got = put_together(owned, x, 0, lambda p, r: local_ops.scatter_shard(p, 0, index, src, r, SIZE, reduce, **options))
    torch.testing.assert_close(got, x.scatter_reduce(0, index, src, reduce, **options))


@SETTINGS
@given(ownerships(), indices, st.booleans(), st.sampled_from([-1, 2]))
def test_the_gradient_of_a_table(owned: list[Runs], index: torch.Tensor, by_count: bool, padding: int) -> None:
    grad = torch.randn(index.numel(), 3)
    want = torch.ops.aten.embedding_dense_backward(grad, index, SIZE, padding, by_count)
    got = put_together(
        owned,
        torch.zeros(SIZE, 3),
        0,
        lambda _, r: local_ops.embedding_backward_shard(grad, index, r, SIZE, padding, by_count),
    )
    torch.testing.assert_close(got, want)


# --- positions that are not there -------------------------------------------------------------------------------------


@pytest.mark.parametrize("owned", [((0, 4),), ((4, 4),), ((0, 1), (3, 4))], ids=["one run", "nothing", "two runs"])
@pytest.mark.parametrize("index", [-1, 4, 9])
def test_a_position_outside_raises_on_every_rank(owned: Runs, index: int) -> None:
    table = torch.randn(local_ops.extent(owned), 3)
    with pytest.raises((RuntimeError, IndexError), match=r"out of range|out of bounds"):
        local_ops.embedding_shard(table, torch.tensor([0, index]), owned, 4)


# --- kernels that refuse empty tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [
        ("sum", torch.float32, 0.0),
        ("max", torch.float32, -float("inf")),
        ("min", torch.int32, 2**31 - 1),
        ("max", torch.bool, False),
    ],
)
def test_a_rank_that_holds_nothing_has_what_changes_nothing(kind: Kind, dtype: torch.dtype, value: object) -> None:
    got = local_ops.unless_empty("amax.default", [(2,)], [dtype], kind, torch.empty(2, 0, dtype=dtype), [1])
    assert got.equal(torch.full((2,), value, dtype=dtype))


def test_results_that_are_not_made_stay_none() -> None:
    shapes, dtypes = [(0,), None], [torch.float32, None]
    assert local_ops.unless_empty("sort.default", shapes, dtypes, "sum", torch.empty(0))[1] is None


def test_their_text_stands_alone() -> None:
    """Exported programs contain it."""
    inliner = Inliner()
    public = [f for n, f in vars(local_ops).items() if n.endswith("_shard") or n == "unless_empty"]
    for fn in public:
        inliner.add(fn)
    alone: dict[str, object] = {}
    exec("\n".join([*inliner.imports.values(), *inliner.definitions.values()]), alone)
    table, index = torch.eye(2), torch.tensor([0, 3])
    got = alone["embedding_shard"](table, index, ((2, 4),), 4)  # type: ignore[operator]
    assert got.equal(local_ops.embedding_shard(table, index, ((2, 4),), 4))
    assert {f.__name__ for f in public} <= set(alone)
