"""Gather again in backward instead of keeping: what ZeRO-3 does between forward and backward.

A gathered parameter that forward made and backward reads would stay whole all the while. Here backward gathers its own,
just before it first reads it, so the whole parameter lives twice for a short time instead of once for a long one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vescale_fn.passes.sources import prepared
from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllGather
from vescale_fn.sharding.graph import Eqn, Var, is_view
from vescale_fn.sharding.layout import Layout


def regather(program: Program, budget: int = 0) -> Program:
    """Backward equations read their own copies of what forward gathered from inputs.

    budget: bytes of gathered values on a rank that are kept for backward all the same: those that forward gathers last,
    as backward reads them first.
    """
    copier = _Copier(program, dict(program.layouts), dict(program.origin), frozenset(prepared(program.graph)))
    copier.kept = _kept(program, copier, budget)
    for e in program.graph.eqns:
        if e.phase == "backward":
            e = e.with_args(copier.own)
        elif copier.is_gathered(e):
            copier.makers.update(dict.fromkeys(e.outs, e))
        copier.eqns.append(e)
    graph = replace(program.graph, eqns=tuple(copier.eqns))
    return replace(program, graph=graph, layouts=copier.layouts, origin=copier.origin)


@dataclass(eq=False)
class _Copier:
    program: Program
    layouts: dict[Var, Layout]
    origin: dict[Var, Var]
    sources: frozenset[Var]  # what may be gathered: inputs, and casts of them
    kept: frozenset[Var] = frozenset()  # gathered values that backward reads as they are
    eqns: list[Eqn] = field(default_factory=list)
    makers: dict[Var, Eqn] = field(default_factory=dict)  # gathered values and their views, by forward equation
    copies: dict[Var, Var] = field(default_factory=dict)

    def is_gathered(self, e: Eqn) -> bool:
        """Whether e gathers an input, or views what such a gather made."""
        known = (v in self.makers or v in self.sources for v in e.operands)
        shows = isinstance(e.op, AllGather) or is_view(e)
        return shows and len(e.operands) == 1 and all(known) and self.kept.isdisjoint(e.outs)

    def own(self, v: Var) -> Var:
        """Backward's own copy of a value that comes from a gather in forward; other values as they are."""
        if not self.from_gather(v):
            return v
        if v not in self.copies:
            made = self.makers[v]
            outs = tuple(replace(o, name=f"{o.name}_again") for o in made.outs)
            for old, new in zip(made.outs, outs):
                self.copies[old] = new
                self.layouts[new] = self.layouts[old]
                if old in self.origin:
                    self.origin[new] = self.origin[old]
            self.eqns.append(replace(made.with_args(self.own, outs), phase="backward"))
        return self.copies[v]

    def from_gather(self, v: Var) -> bool:
        e = self.makers.get(v)
        return e is not None and (isinstance(e.op, AllGather) or self.from_gather(e.operands[0]))


def _kept(program: Program, copier: _Copier, budget: int) -> frozenset[Var]:
    """The gathered values that backward reads and that fit in the budget, the last first."""
    read = {v for e in program.graph.eqns if e.phase == "backward" for v in e.reads}
    views: dict[Var, Var] = {}  # what shows a gathered value -> that value
    gathered: list[Var] = []
    for e in program.graph.eqns:
        if e.phase == "backward" or len(e.operands) != 1:
            continue
        (v,) = e.operands
        if isinstance(e.op, AllGather) and v in copier.sources:
            gathered.append(e.outs[0])
            views[e.outs[0]] = e.outs[0]
        elif is_view(e) and v in views:
            views.update(dict.fromkeys(e.outs, views[v]))
    again = {views[v] for v in read if v in views}
    kept = set()
    for v in reversed(gathered):
        if v in again and program.local_bytes(v) <= budget:
            budget -= program.local_bytes(v)
            kept.add(v)
    return frozenset(kept)
