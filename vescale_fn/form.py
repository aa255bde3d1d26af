"""The form of a sub-program: which of its operands and results are constants, carries, and slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vescale_fn.remat import Policy
from vescale_fn.sharding.graph import Call, Graph, Pipeline, Scan
from vescale_fn.sharding.layout import WHOLE, State
from vescale_fn.tracing import Aval, aval_of


@dataclass(frozen=True)
class Staged:
    """How a loop over microbatches is run by the ranks of a pipeline; see `sharding.graph.Pipeline`.

    given: states along the axis of tensors that the body closes over, by id, where they are not whole. carried: states
    of what the loop carries.
    """

    axis: str
    name: str
    placement: tuple[int, ...]
    rows: tuple[tuple[tuple[str, int, int], ...], ...]
    given: Mapping[int, State]
    carried: tuple[State, ...]
    closed: tuple[State, ...] = ()  # of the constants, in order

    def closing_over(self, constants: Sequence[Any]) -> Staged:
        return replace(self, closed=tuple(self.given.get(id(x), WHOLE) for x in constants))

    def op(self, body: Graph, length: int) -> Pipeline:
        states = (*self.closed, *self.carried)
        outside = {v.name: s for v, s in zip(body.inputs, states)}
        sizes = len(self.closed), len(self.carried), length
        return Pipeline(body, *sizes, False, self.axis, self.name, self.placement, self.rows, outside)


@dataclass(frozen=True)
class Form:
    """Operands of a body are constants, carries, slices; its results are carries, slices. A call (length None) has
    slices only, and does not slice them."""

    name: str
    num_consts: int = 0
    num_carry: int = 0
    length: int | None = None
    reverse: bool = False
    remat: bool | Policy = False
    staged: Staged | None = None

    def parts(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, carries and slices."""
        first = self.num_consts + self.num_carry
        return [*operands[: self.num_consts]], [*operands[self.num_consts : first]], [*operands[first:]]

    def slice(self, aval: Any) -> Any:
        """What the body sees of an operand that it iterates over."""
        return aval if self.length is None else replace(aval, shape=aval.shape[1:])

    def stack(self, aval: Aval) -> Aval:
        return aval if self.length is None else replace(aval, shape=(self.length, *aval.shape))

    @property
    def batch_dim(self) -> int:
        """Where vmap puts its dim in operands that are iterated over."""
        return 0 if self.length is None else 1

    def op(self, body: Graph) -> Scan | Call:
        """The operation that is recorded."""
        if self.length is None:
            return Call(body, self.name, self.remat)
        if self.staged is not None:
            return self.staged.op(body, self.length)
        return Scan(body, self.num_consts, self.num_carry, self.length, self.reverse)


def operand_avals(form: Form, operands: Sequence[Any]) -> tuple[Any, ...]:
    """What the body sees of each operand."""
    consts, carries, slices = form.parts([aval_of(x) for x in operands])
    return (*consts, *carries, *map(form.slice, slices))
