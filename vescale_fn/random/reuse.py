"""Keys that a step uses twice: two lines that draw with the same key get the same numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from vescale_fn.random import errors
from vescale_fn.random.bits import RANDOM_BITS
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Source, Var, map_vars
from vescale_fn.trace_errors import TraceError


class KeyReuseError(TraceError):
    """Two lines of a step draw with the same key."""


def check_keys(name: str, graph: Graph) -> None:
    """Raise KeyReuseError where two lines of a step draw with the same key, made however, in loops and calls too.

    One line may do so: what evaluates a function twice wants the same numbers, and what is computed again in backward
    gets them. Splitting and folding take nothing from a key, and the draws of a scope are none with the key itself.
    """
    _Checker(name).walk(graph, range(len(graph.inputs)))


@dataclass(eq=False)
class _Checker:
    """Numbers for values: equal ones hold the same, as far as the operations that made them tell."""

    name: str
    interned: dict[Hashable, int] = field(default_factory=dict)
    drawn: dict[Hashable, Source] = field(default_factory=dict)

    def walk(self, graph: Graph, inputs: Sequence[int]) -> None:
        known = dict(zip(graph.inputs, inputs, strict=True))
        for e in graph.eqns:
            if isinstance(e.op, (Scan, Call)):
                self.walk(e.op.body, [self.operand(e, i, known) for i in range(len(e.args))])
            elif e.op is RANDOM_BITS and e.args[3] == "draw":
                self.draw(e, self.number(e.args[0], known))
            elif all(map(_is_integer, e.reads)):  # what keys are made of
                known |= dict(zip(e.outs, self.results(e, known)))

    def results(self, e: Eqn, known: Mapping[Var, int]) -> list[int]:
        arguments = repr(map_vars((e.args, e.kwargs), lambda v: ("value", self.number(v, known))))
        return [self.intern((e.op, arguments, i)) for i in range(len(e.outs))]

    def operand(self, e: Eqn, i: int, known: Mapping[Var, int]) -> int:
        """The number of an input of a body. What a loop carries, or iterates over, is new each time."""
        is_same = i < e.op.num_consts if isinstance(e.op, Scan) else True
        return self.number(e.args[i], known) if is_same else self.intern((id(e), i))

    def number(self, v: Var, known: Mapping[Var, int]) -> int:
        return known[v] if v in known else self.intern(id(v))

    def intern(self, what: Hashable) -> int:
        return self.interned.setdefault(what, -1 - len(self.interned))  # inputs have the numbers from 0

    def draw(self, e: Eqn, key: int) -> None:
        first = self.drawn.setdefault((key, e.args[1]), e.source)
        if first != e.source and first.file and e.source.file:
            raise KeyReuseError(errors.key_reused(self.name, first, e.source))


def _is_integer(v: Var) -> bool:
    return not v.is_tensor or not (v.dtype.is_floating_point or v.dtype.is_complex)
