"""Programs around each operation: every way in which its tensors can lie, through the whole flow of a step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from op_samples import Sample
from programs import Coverage, Program, check
from programs.coverage import COLUMNS, columns_of, missing
from programs.covering import (
    CORPUS,
    Pack,
    Statement,
    every_cell,
    every_statement,
    is_differentiable,
    packs,
    plain_statements,
    smallest_failing,
)
from programs.directed import statements
from rule_machine import equation

from vescale_fn.sharding.rules import rule_for

PIECES = 20  # of a deep run, for each order
OPERATIONS, GRADIENTS = 160, 80  # statements of a normal run

pytestmark = pytest.mark.filterwarnings("ignore")


def run(pack: Pack, coverage: Coverage | None = None) -> None:
    """The promise for a pack of statements; what fails is printed as a program, of one statement if it can be."""
    try:
        check(pack.program(), coverage and coverage.add)
    except Exception as error:
        program = smallest_failing(pack, _fails)
        raise AssertionError(f"{error}\n{program!r}") from error


def _fails(program: Program) -> bool:
    try:
        check(program)
    except Exception:
        return True
    return False


def differentiable(chosen: Sequence[Statement]) -> list[Statement]:
    known: dict[Sample, bool] = {s: is_differentiable(s) for s in dict.fromkeys(x.sample for x in chosen)}
    return [x for x in chosen if known[x.sample]]


@pytest.fixture(scope="module")
def cells() -> list[Statement]:
    """For each operation and each column of the coverage table, a statement that is in it if any is."""
    return every_cell(plain_statements())


def test_operations_in_the_ways_their_tensors_can_lie(cells: list[Statement]) -> None:
    """A sample; the deep run has them all."""
    for pack in packs(random.Random(0).sample(cells, OPERATIONS), order=0, size=16):
        run(pack)


def test_their_gradients(cells: list[Statement]) -> None:
    chosen = differentiable(random.Random(1).sample(cells, 2 * GRADIENTS))[:GRADIENTS]
    for pack in packs(chosen, order=1, size=16):
        run(pack)


@pytest.mark.deep
def test_no_cell_of_the_coverage_table_is_zero(cells: list[Statement], record_property: Any) -> None:
    coverage = Coverage()
    for pack in packs(cells, order=0):
        run(pack, coverage)
    record_property("coverage", coverage.to_json())
    assert coverage.zeros == []


@pytest.mark.deep
@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("order", [0, 1])
def test_each_operation_in_every_case_of_its_rule(order: int, piece: int, record_property: Any) -> None:
    chosen, coverage = [*every_statement()][piece::PIECES], Coverage()
    for pack in packs(differentiable(chosen) if order else chosen, order, seed=piece):
        run(pack, coverage)
    record_property("coverage", coverage.to_json())


def test_what_the_table_calls_impossible_no_strategy_makes() -> None:
    """Of all cases of all samples: a column is impossible for a rule if and only if none of its cases is in it, but
    for factors that are too small to be cut twice or unevenly."""
    for sample in CORPUS:
        rule = rule_for(equation(sample))
        assert rule is not None
        found = {c for x in statements(sample, [(4,), (2, 3)]) for layout in x.layouts for c in columns_of(layout)}
        read = {x for t in rule.operands for d in t for x in d}
        if any(any(t) and read.isdisjoint(x for d in t for x in d) for t in rule.results):
            found.discard("partial")  # results that tell of the operation itself are planned apart, and whole
        assert not found & missing(rule).keys(), f"{sample}: {rule}"
        if min(rule.sizes.values(), default=1) >= 4 and "i" not in missing(rule).values():
            assert found | missing(rule).keys() >= {*COLUMNS} - {"partial"}, f"{sample}: {rule}"
