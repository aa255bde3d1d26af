"""Optimizer updates wait only for their own gradients.

All parameters of one dtype are updated by one equation, which would wait for the last bucket of gradients. In parts,
one for each transfer, the parameters whose gradients are here are updated while the gradients of others travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from vescale_fn.fused import IN_PLACE
from vescale_fn.passes.finish import arrivals
from vescale_fn.program import Program
from vescale_fn.sharding.graph import Eqn, Var, vars_in


def update_apart(program: Program) -> Program:
    """Every optimizer update in as many parts as there are transfers, still going on when all heavy work is done, that
    bring its operands."""
    eqns = program.graph.eqns
    arrives = arrivals(eqns)
    parts = (p for e in eqns for p in (_parts(e, arrives) if e.op in IN_PLACE else (e,)))
    return replace(program, graph=replace(program.graph, eqns=tuple(parts)))


def _parts(e: Eqn, arrives: Mapping[Var, int]) -> Iterator[Eqn]:
    """An update of lists of n tensors, as updates of parts of these lists. Its results are the lists that it writes,
    one after the other."""
    lists = [a for a in e.args if isinstance(a, (list, tuple)) and a]
    n = len(lists[0]) if lists else 0
    scalars = [a for a in e.args if isinstance(a, Var)]  # every part reads them
    rows: dict[int, list[int]] = defaultdict(list)
    for i in range(n):
        rows[max(arrives.get(v, -1) for v in vars_in([*scalars, *(a[i] for a in lists)]))].append(i)
    yield from rows_of(e, list(rows.values()))


def rows_of(e: Eqn, rows: Sequence[Sequence[int]]) -> Iterator[Eqn]:
    """An update of lists of n tensors as updates of the i-th tensors of all lists, for i in each of `rows`."""
    if len(rows) < 2:
        yield e
        return
    n = sum(map(len, rows))
    for part in rows:
        args = tuple(type(a)(a[i] for i in part) if isinstance(a, (list, tuple)) and a else a for a in e.args)
        yield replace(e, args=args, outs=tuple(e.outs[k + i] for k in range(0, len(e.outs), n) for i in part))
