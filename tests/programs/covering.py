"""Which directed programs to run: every operation in every way that its tensors can lie, and the options of a step so
that each pair of them occurs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import torch
from kernel_samples import SAMPLES as KERNELS
from op_samples import FROM_SCHEMA, SAMPLES, Sample, f64, s

from programs.coverage import columns_of
from programs.directed import Statement, directed, statements
from programs.program import Program, gradients
from vescale_fn.sharding.rules import FAMILIES

aten = torch.ops.aten

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3)]
LARGE_MESHES = [(2,), (2, 16)]

# What is made from nothing is made whole and cut unless a rank saves some 150 bytes: here it does, on 32 ranks.
LARGE = [
    s(aten.full.default, [5, 300], 2.0),
    s(aten.full.default, [5, 300], 0.0),
    s(aten.arange.default, 42),
    s(aten.arange.start, 2, 44),
    s(aten.arange.start_step, 2, 86, 2),
    s(aten.linspace.default, 0, 1, 42, dtype=f64),
    s(aten.eye.default, 33),
    s(aten.eye.m, 5, 300),
    s(aten.tril_indices.default, 8, 40),
    s(aten.triu_indices.default, 8, 40),
]
CORPUS = [*SAMPLES, *(sample for sample in FROM_SCHEMA if sample is not None), *KERNELS]


def every_statement() -> Iterator[Statement]:
    """Each sample in each case that its rule admits."""
    for sample in CORPUS:
        yield from statements(sample, MESHES)
    for sample in LARGE:
        yield from statements(sample, LARGE_MESHES)


def plain_statements() -> Iterator[Statement]:
    """Those in which all axes do the same, on few meshes, without what is too small to be worth cutting."""
    large = {sample.op for sample in LARGE}
    given = [(LARGE, LARGE_MESHES), ([sample for sample in CORPUS if sample.op not in large], [(4,), (3,), (2, 3)])]
    for samples, meshes in given:
        for sample in samples:
            yield from (x for x in statements(sample, meshes) if len(set(x.case.choices)) == 1)


def every_cell(choices: Iterable[Statement]) -> list[Statement]:
    """Few of these statements that put each operation in each column of the coverage table in which any does."""
    by_op: dict[Any, list[tuple[Statement, set[str]]]] = {}
    for x in choices:
        by_op.setdefault(x.sample.op, []).append((x, {c for layout in x.layouts for c in columns_of(layout)}))
    out = []
    for ways in by_op.values():
        left = set().union(*(columns for _, columns in ways))
        while left:
            best, columns = max(ways, key=lambda way: len(way[1] & left))
            out.append(best)
            left -= columns
    return out


def is_differentiable(sample: Sample) -> bool:
    """Whether torch has the gradient of a sample, and it says without reading values that it has."""
    args, kwargs = sample.tensors()
    floats = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not floats or "prod" in sample.args:  # whose gradient asks where the zeros are
        return False

    def f(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(args)
        for i, x in zip(floats, xs):
            given[i] = x
        out = sample.op(*given, **kwargs)
        return tuple(o for o in (out if isinstance(out, (tuple, list)) else [out]) if o is not None)

    try:
        gradients(f, tuple(range(len(floats))), 1)(*(args[i] for i in floats))
    except RuntimeError:
        return False
    return True


# --- options --------------------------------------------------------------------------------------------------------

OPTIONS: Mapping[str, Sequence[Any]] = {
    "place": ["step", "call", "remat"],
    "options": [{}, {"deterministic": True}, {"keep": "none"}, {"donate": "safe"}, {"audit": 1}],
    "in_shardings": [False, True],
    "donates": [False, True],
}


@dataclass(frozen=True, eq=False)
class Pack:
    """Statements of one family on one mesh, and how their program runs."""

    parts: tuple[Statement, ...]
    order: int
    how: Mapping[str, Any]

    def program(self, parts: Sequence[Statement] | None = None) -> Program:
        """The program of these, or some, of the statements."""
        how = dict(self.how)
        donates = how.pop("donates")
        made = directed(parts or self.parts, self.order, wild=True, **how)
        return made.donating(range(len(made.inputs))) if donates and not made.in_shardings else made


def packs(chosen: Iterable[Statement], order: int, size: int = 8, seed: int = 0) -> list[Pack]:
    """The statements packed into programs of up to `size`. Options are given out so that each value meets each value
    of another option, each family and each size of a mesh, as far as there are programs for it."""
    groups: dict[tuple[str, tuple[int, ...]], list[Statement]] = {}
    for x in chosen:
        groups.setdefault((family_of(x.sample), x.case.sizes), []).append(x)
    rng, seen = random.Random(seed), set[frozenset[tuple[str, str]]]()
    out = []
    for (family, sizes), members in groups.items():
        for parts in _batches(members, size):
            fixed = [("family", family), ("mesh", str(sizes)), ("order", str(order))]
            how = _least_seen(fixed, seen, rng)
            out.append(Pack(tuple(parts), order, how))
    return out


def _least_seen(
    fixed: Sequence[tuple[str, str]], seen: set[frozenset[tuple[str, str]]], rng: random.Random
) -> dict[str, Any]:
    """Of some random rows of options the one with most pairs that were not seen yet, which now are."""

    def pairs(row: Mapping[str, Any]) -> set[frozenset[tuple[str, str]]]:
        return set(map(frozenset, combinations([*fixed, *((k, str(v)) for k, v in row.items())], 2)))

    rows = [{name: rng.choice(values) for name, values in OPTIONS.items()} for _ in range(30)]
    best = max(rows, key=lambda row: len(pairs(row) - seen))
    seen |= pairs(best)
    return best


def _batches(members: Sequence[Statement], size: int) -> Iterator[list[Statement]]:
    rest = iter(members)
    while batch := list(islice(rest, size)):
        yield batch


def family_of(sample: Sample) -> str:
    """The family of rules that an operation belongs to."""
    names = (f.__name__.rpartition(".")[2] for f in FAMILIES if sample.op in f.ENTRIES)
    return next(names, "pointwise")


def smallest_failing(pack: Pack, fails: Callable[[Program], bool]) -> Program:
    """The program of one of the statements if that fails alone, else that of all."""
    alone = (pack.program([x]) for x in pack.parts)
    return next((p for p in alone if fails(p)), pack.program())
