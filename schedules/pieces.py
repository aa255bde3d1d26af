"""A traced function as n pieces in a row, of even cost, cut where little passes from one to the next."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vescale_fn.dead_code import drop_dead
from vescale_fn.remat import work_of
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Source, Var, has_effect, is_view, vars_in


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a function. Its graph takes the constants of the whole, then what the piece before passes on, and
    returns what it passes on itself, or the results of the whole."""

    graph: Graph
    cost: int
    num_constants: int
    source: Source  # of its first work

    @property
    def passed(self) -> tuple[Var, ...]:
        """What the piece before passes on."""
        return self.graph.inputs[self.num_constants :]


class TooFewError(ValueError):
    """A function with fewer places to cut than pieces asked for."""


def pieces_of(graph: Graph, num_constants: int, n: int, slack: float) -> tuple[Piece, ...]:
    """`graph` as n pieces, of which the longest costs at most 1 + slack times what it must; among such cuts, the one
    that passes fewest bytes.

    num_constants: the first inputs, parameters for example, are there for every piece. What depends on nothing else is
        computed again by each piece that needs it. A loop that only carries values can be cut between iterations.
    Raises TooFewError, with the number of units of work, where these are fewer than the pieces.
    """
    graph = drop_dead(graph)
    constants = set(graph.inputs[:num_constants])
    again, work = _divided(graph.eqns, constants)
    units = [u for e in work for u in _units(e)]
    if (working := sum(u.cost > 0 for u in units)) < n:
        raise TooFewError(str(working))
    widths = _widths(graph, units, constants)
    cuts = [0, *_choose([u.cost for u in units], widths, n, slack), len(units)]
    parts = [units[a:b] for a, b in itertools.pairwise(cuts)]
    return tuple(_built(graph, num_constants, again, parts, constants))


# ---- what can be cut


@dataclass(frozen=True, eq=False)
class Unit:
    """An equation, or an iteration of a loop, whose carries before and after it are variables of their own."""

    eqn: Eqn
    cost: int
    reads: tuple[Var, ...]
    outs: tuple[Var, ...]
    row: int = 0
    carry: tuple[Any, ...] = ()  # before the iteration


def _divided(eqns: Sequence[Eqn], constants: set[Var]) -> tuple[list[Eqn], list[Eqn]]:
    """Equations that depend on constants only, whose results are added to these, and the others."""
    again, work = [], []
    for e in eqns:
        if constants.issuperset(e.reads) and not has_effect(e):
            constants.update(e.outs)
            again.append(e)
        else:
            work.append(e)
    return again, work


def _units(e: Eqn) -> Iterator[Unit]:
    op = e.op
    if not isinstance(op, Scan) or op.reverse or len(e.outs) > op.num_carry:
        yield Unit(e, cost_of(e), tuple(e.reads), e.outs)
        return
    consts, carry, xs = operands(e)
    each = cost_of(e) // op.length
    for i in range(op.length):
        after = e.outs if i == op.length - 1 else tuple(replace(v, name=f"{v}_after_{i}") for v in e.outs)
        yield Unit(e, each, tuple(vars_in((*consts, *carry, *xs))), after, i, carry)
        carry = after


def operands(e: Eqn) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Constants, carries and slices of a loop."""
    first, last = e.op.num_consts, e.op.num_consts + e.op.num_carry
    return e.args[:first], e.args[first:last], e.args[last:]


def cost_of(e: Eqn) -> int:
    """Estimated work: floating-point operations, and 16 for each byte that is read or written."""
    if isinstance(e.op, Call):
        return sum(map(cost_of, e.op.body.eqns))
    if isinstance(e.op, Scan):
        return e.op.length * sum(map(cost_of, e.op.body.eqns))
    if is_view(e):
        return 0
    tensors = [*e.operands, *(v for v in e.outs if v.is_tensor)]
    return int(work_of(e)) + 16 * sum(v.nbytes for v in tensors)


def _widths(graph: Graph, units: Sequence[Unit], constants: set[Var]) -> list[int]:
    """Bytes that pass each place before, between and after the units."""
    last = {v: i for i, u in enumerate(units) for v in u.reads}
    last.update(dict.fromkeys(vars_in(graph.outputs), len(units)))
    change = [0] * (len(units) + 2)
    made = itertools.chain(((v, 0) for v in graph.inputs), ((v, i + 1) for i, u in enumerate(units) for v in u.outs))
    for v, at in made:
        if v not in constants and v in last:
            change[at] += v.nbytes
            change[last[v] + 1] -= v.nbytes
    return list(itertools.accumulate(change))[: len(units) + 1]


# ---- where to cut


def _choose(costs: Sequence[int], widths: Sequence[int], n: int, slack: float) -> list[int]:
    """Places of the n - 1 cuts. Dynamic programming over the places that leave every piece within the limit: fewest
    bytes first, then the lower sum of squared costs, which is the more even cut."""
    sums = [0, *itertools.accumulate(costs)]
    limit = (1 + slack) * _least(sums, n)
    best: dict[int, tuple[tuple[float, float], list[int]]] = {0: ((0.0, 0.0), [])}
    for k in range(1, n + 1):
        reached: dict[int, tuple[tuple[float, float], list[int]]] = {}
        lo = len(costs) if k == n else bisect_left(sums, sums[-1] - (n - k) * limit)
        for at in range(max(lo, k), min(bisect_right(sums, k * limit), len(sums) - (n - k))):
            for start, ((moved, uneven), cuts) in best.items():
                piece = sums[at] - sums[start]
                if start < at and piece <= limit:
                    score = (moved + (widths[at] if k < n else 0), uneven + piece**2)
                    if at not in reached or score < reached[at][0]:
                        reached[at] = score, [*cuts, at]
        best = reached
    return best[len(costs)][1][:-1]


def _least(sums: Sequence[int], n: int) -> int:
    """The least cost of the longest of n pieces."""

    def fits(limit: int) -> bool:
        at = 0
        for _ in range(n):
            at = bisect_right(sums, sums[at] + limit) - 1
        return at == len(sums) - 1

    lo, hi = -(-sums[-1] // n), sums[-1]
    while lo < hi:
        middle = (lo + hi) // 2
        lo, hi = (lo, middle) if fits(middle) else (middle + 1, hi)
    return lo


# ---- the pieces


def _built(
    graph: Graph, num_constants: int, again: Sequence[Eqn], parts: Sequence[Sequence[Unit]], constants: set[Var]
) -> Iterator[Piece]:
    """Each part with the equations that it computes again, from what passes on the way to it."""
    first = graph.inputs[:num_constants]
    passed = [tuple(graph.inputs[num_constants:])]
    for k in range(1, len(parts)):
        made = dict.fromkeys((*passed[-1], *(v for u in parts[k - 1] for v in u.outs)))
        wanted = {v for part in parts[k:] for u in part for v in u.reads} | set(vars_in(graph.outputs))
        passed.append(tuple(v for v in made if v in wanted and v not in constants))
    for k, part in enumerate(parts):
        outs = graph.outputs if k == len(parts) - 1 else passed[k + 1]
        whole = Graph((*first, *passed[k]), (*again, *_equations(part)), outs)
        first_line = next((u.eqn.source for u in part if u.cost and u.eqn.source.file), part[0].eqn.source)
        yield Piece(drop_dead(whole), sum(u.cost for u in part), num_constants, first_line)


def _equations(part: Sequence[Unit]) -> Iterator[Eqn]:
    """The equations of a part; iterations of one loop that follow each other are one loop."""
    for _, run in itertools.groupby(part, key=lambda u: id(u.eqn)):
        units = list(run)
        e, lo, hi = units[0].eqn, units[0].row, units[-1].row + 1
        if not isinstance(e.op, Scan) or hi - lo in (0, e.op.length) or len(e.outs) > e.op.num_carry:
            yield e
            continue
        consts, _, xs = operands(e)
        slices = [replace(x, name=f"{x}_{lo}_to_{hi}", shape=(hi - lo, *x.shape[1:])) for x in xs]
        for x, rows in zip(xs, slices):
            yield Eqn(torch.ops.aten.slice.Tensor, (x, 0, lo, hi), {}, (rows,), e.source, e.phase)
        yield replace(
            e, op=replace(e.op, length=hi - lo), args=(*consts, *units[0].carry, *slices), outs=units[-1].outs
        )
