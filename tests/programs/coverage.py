"""What random programs covered: operation x how its tensors lay."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from vescale_fn.lowered import Lowered
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, op_name
from vescale_fn.sharding.layout import Layout, Shard
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.rules.rule import Rule

COLUMNS = ("sharded", "partial", "uneven", "empty", "tuple axes")


@dataclass
class Coverage:
    """Counts by (operation, column), which operations were seen, and what their rules admit at all."""

    seen: Counter[str] = field(default_factory=Counter)
    cells: Counter[tuple[str, str]] = field(default_factory=Counter)
    possible: set[tuple[str, str]] = field(default_factory=set)
    programs: int = 0
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)  # why a cell is not possible

    def add(self, lowered: Lowered) -> None:
        self.programs += 1
        for e in _eqns(lowered.plan.graph):
            name = op_name(e.op)
            layouts = [*lowered.plan.operands[e], *(lowered.plan.values[v] for v in e.outs if v.is_tensor)]
            self.seen[name] += 1
            self.cells.update((name, c) for c in {c for x in layouts for c in columns_of(x)})
            if not isinstance(e.op, (Scan, Call)):
                rule = rule_for(e)
                why = missing(rule) if rule else {}
                self.possible |= {(name, c) for c in COLUMNS if c not in why} if rule else set()
                self.reasons |= {(name, c): r for c, r in why.items()}

    def merge(self, other: Coverage) -> None:
        self.programs += other.programs
        self.seen += other.seen
        self.cells += other.cells
        self.possible |= other.possible
        self.reasons |= other.reasons

    def to_json(self) -> str:
        pairs = {
            f"{a}|{c}": [self.cells[a, c], (a, c) in self.possible, self.reasons.get((a, c), "")]
            for a in self.seen
            for c in COLUMNS
        }
        return json.dumps({"programs": self.programs, "seen": self.seen, "cells": pairs})

    @staticmethod
    def of_json(text: str) -> Coverage:
        data = json.loads(text)
        cells = {tuple(k.split("|")): v for k, v in data["cells"].items()}
        return Coverage(
            Counter(data["seen"]),
            Counter({k: n for k, (n, _, _) in cells.items() if n}),
            {k for k, (_, possible, _) in cells.items() if possible},
            data["programs"],
            {k: why for k, (_, _, why) in cells.items() if why},
        )

    @property
    def zeros(self) -> list[tuple[str, str]]:
        """Cells that could be covered and were not."""
        return sorted(cell for cell in self.possible if not self.cells[cell])

    def __str__(self) -> str:
        width = max([len(n) for n in self.seen], default=0)
        rows = [f"{'operation':{width}}  {'seen':>6}" + "".join(f"{c:>12}" for c in COLUMNS)]
        for name in sorted(self.seen):
            cells = [self._cell(name, c) for c in COLUMNS]
            rows.append(f"{name:{width}}  {self.seen[name]:>6}" + "".join(f"{c:>12}" for c in cells))
        zeros = ", ".join(f"{name} {column}" for name, column in self.zeros) or "none"
        why = "".join(f"\n{code}: none, because {reason}" for code, reason in REASONS.items())
        head = f"{self.programs} programs ran as planned below; '-': it has no rule"
        count = [(sum(c == x and bool(self.cells[a, x]) for a, x in self.possible), c) for c in COLUMNS]
        of = [sum(c == x for _, x in self.possible) for c in COLUMNS]
        covered = ", ".join(f"{c} {n}/{m}" for (n, c), m in zip(count, of))
        return "\n".join([head + why, *rows, f"covered: {covered}", f"possible and not covered: {zeros}"])

    def _cell(self, name: str, column: str) -> str:
        possible = (name, column) in self.possible
        return str(self.cells[name, column] or ("0" if possible else self.reasons.get((name, column), "-")))


def columns_of(layout: Layout) -> Iterator[str]:
    """The columns of the table that a layout belongs to."""
    shards = [s for s in layout.states if isinstance(s, Shard)]
    if shards:
        yield "sharded"
    if layout.partial:
        yield "partial"
    if any(s.uneven for s in shards):
        yield "uneven"
        coords = (dict(zip(layout.mesh.names, c)) for c in product(*map(range, layout.mesh.sizes)))
        if 0 not in layout.shape and any(0 in layout.local_shape(c) for c in coords):
            yield "empty"
    if len({s.dim for s in shards}) < len(shards):
        yield "tuple axes"


def _eqns(graph: Graph) -> Iterator[Eqn]:
    for e in graph.eqns:
        yield e
        if isinstance(e.op, (Scan, Call)):
            yield from _eqns(e.op.body)


# Why an operation has no example in a column: its rule admits none, because
REASONS = {
    "s": "its tensors have no dims of more than one element",
    "w": "it needs all its dims whole: what it computes mixes them",
    "i": "the factors that may be cut lie inside of dims, which are cut evenly or not at all",
    "n": "it is not linear, and it sums over no dim that may be cut",
}


def missing(rule: Rule) -> dict[str, str]:
    """The columns that a rule does not admit, and the reason."""
    free = {x for x in rule.sizes if x not in rule.whole}
    dims = [d for t in (*rule.operands, *rule.results) for d in t]
    found = {}
    if not free:
        found |= dict.fromkeys(("sharded", "tuple axes", "uneven", "empty"), "w" if rule.sizes else "s")
    elif not any(all(d[0] == x for d in dims if x in d) for x in free):  # one that leads its dims may be uneven
        found |= dict.fromkeys(("uneven", "empty"), "i")
    read = {x for t in rule.operands for d in t for x in d}
    results = [t for t in rule.results if any(x in read for d in t for x in d) or not any(t)]  # others stand apart
    made = {x for t in rule.results for d in t for x in d}
    contracted = any(x for x in free for t in results if not any(x in d for d in t)) or not free <= made
    if not (rule.through or rule.linear or contracted):
        found["partial"] = "n"
    return found
