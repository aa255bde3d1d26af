"""Collectives and casts as data, with their transposes, and the one autograd Function that runs them all.

Each is linear in its operand (but max and min). The transpose of a move from state A to state B goes from the cotangent
of B to the cotangent of A: so the table below, with `states.COTANGENT`, is all there is to differentiation.

| forward                | states                | transpose                                    |
|------------------------|-----------------------|----------------------------------------------|
| AllReduce sum          | V->I, U->I            | Cast I->V, I->R                              |
| Cast                   | I->V, I->R, V->U, R->V, R->I | AllReduce, AllReduce of U, Cast, Cast, Keep |
| Keep (others: zeros)   | I->U, V->V            | Cast R->I, Keep                              |
| AllGather              | V->V, V->I, V->R      | ReduceScatter, OwnSlice, ReduceScatter of U  |
| ReduceScatter          | V->V, U->V            | AllGather, AllGather to reduced              |
| OwnSlice               | I->V                  | AllGather to invarying                       |
| AllToAll               | V->V                  | AllToAll, dims swapped                       |
| PPermute               | V->V                  | PPermute, pairs swapped                      |
| Broadcast              | V->V                  | AllReduce, then Keep                         |
| ToLocal, ToGlobal      | the edges of a region | each other                                   |

Source of the states and rows: JAX's shard_map with check_vma (`jax/_src/shard_map.py`, "varying manual axes").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vescale_fn.regions import ops, texts
from vescale_fn.regions.states import COTANGENT, State
from vescale_fn.sharding.cotangent import cotangent_spec
from vescale_fn.source import user_source


@dataclass(frozen=True)
class Move:
    """axes: the mesh axes that take part, major to minor, as text "dp=2,tp=4"."""

    axes: str

    op: ClassVar[Any]

    def __call__(self, x: Tensor) -> Tensor:
        """The move of x, under any transform of torch.func."""
        result: Tensor = Primitive.apply(x, self)  # type: ignore[no-untyped-call]
        return result

    def record(self, x: Tensor) -> Tensor:
        """The one node itself."""
        result: Tensor = self.op(x, *astuple(self))
        return result

    def pull(self, cotangent: Tensor) -> Tensor:
        """The transpose, applied."""
        raise NotImplementedError

    def batched(self) -> Move:
        """The same move of a tensor with one more dim, the first."""
        return self


@dataclass(frozen=True)
class StateMove(Move):
    """A move inside a region. The last field, `states`, says what it makes of what, "V->I"."""

    @property
    def ends(self) -> tuple[State, State]:
        """The state before and after."""
        before, _, after = self.states.partition("->")  # type: ignore[attr-defined]
        return before, after

    @property
    def back(self) -> str:
        """The states of the transpose.

        >>> AllGather("tp=2", 0, "V->R").back
        'U->V'
        """
        before, after = self.ends
        return f"{COTANGENT[after]}->{COTANGENT[before]}"


@dataclass(frozen=True)
class DimMove(StateMove):
    """A move along one tensor dim."""

    dim: int
    states: str

    def batched(self) -> Move:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True)
class Cast(StateMove):
    """The same value in another state: free."""

    states: str

    op = ops.CAST

    def pull(self, cotangent: Tensor) -> Tensor:
        before, after = self.ends
        if before == "I" and after in ("V", "R", "?"):
            return AllReduce(self.axes, "sum", self.back)(cotangent)
        if self.states == "R->I":
            return Keep(self.axes, 0, self.back)(cotangent)
        if self.states == "?->I":  # a promise: the ranks share the cotangent of the value that they all hold
            return Cast(self.axes, self.back)(cotangent) / ops.group_of(self.axes).size
        return Cast(self.axes, self.back)(cotangent)


@dataclass(frozen=True)
class Keep(StateMove):
    """The value on the rank at `index` along the axes, zeros on the others."""

    index: int
    states: str

    op = ops.KEEP

    def pull(self, cotangent: Tensor) -> Tensor:
        if self.states == "I->U":
            return Cast(self.axes, self.back)(cotangent)
        return Keep(self.axes, self.index, self.back)(cotangent)


@dataclass(frozen=True)
class AllReduce(StateMove):
    """The sum (max, min) over the axes, on every rank."""

    kind: str
    states: str

    op = ops.ALL_REDUCE

    def pull(self, cotangent: Tensor) -> Tensor:
        if self.states == "?->?":  # unchecked: every rank contributes the cotangent that it sees
            return AllReduce(self.axes, "sum", self.back)(cotangent)
        return Cast(self.axes, self.back)(cotangent)


@dataclass(frozen=True)
class AllGather(DimMove):
    """The pieces of all ranks, one after the other along a dim."""

    op = ops.ALL_GATHER

    def pull(self, cotangent: Tensor) -> Tensor:
        transposed = OwnSlice if self.states == "V->I" else ReduceScatter
        return transposed(self.axes, self.dim, self.back)(cotangent)


@dataclass(frozen=True)
class ReduceScatter(DimMove):
    """This rank's piece, along a dim, of the sum over ranks."""

    op = ops.REDUCE_SCATTER

    def pull(self, cotangent: Tensor) -> Tensor:
        return AllGather(self.axes, self.dim, self.back)(cotangent)


@dataclass(frozen=True)
class OwnSlice(DimMove):
    """This rank's piece, along a dim, of a value that all ranks hold."""

    op = ops.OWN_SLICE

    def pull(self, cotangent: Tensor) -> Tensor:
        if self.back == "?->?":  # unchecked: every rank contributes its piece, and zeros for the others
            ranks = range(ops.group_of(self.axes).size)
            return torch.cat([Keep(self.axes, i, self.back)(cotangent) for i in ranks], self.dim)
        return AllGather(self.axes, self.dim, self.back)(cotangent)


@dataclass(frozen=True)
class AllToAll(StateMove):
    """Rank i gets piece i along `split_dim` of every rank, one after the other along `concat_dim`."""

    split_dim: int
    concat_dim: int
    states: str

    op = ops.ALL_TO_ALL

    def pull(self, cotangent: Tensor) -> Tensor:
        return AllToAll(self.axes, self.concat_dim, self.split_dim, self.back)(cotangent)

    def batched(self) -> Move:
        return replace(self, split_dim=self.split_dim + 1, concat_dim=self.concat_dim + 1)


@dataclass(frozen=True)
class PPermute(StateMove):
    """What the rank at pairs[2 k] holds goes to the rank at pairs[2 k + 1]; who gets nothing holds zeros."""

    pairs: tuple[int, ...]
    states: str

    op = ops.PPERMUTE

    def pull(self, cotangent: Tensor) -> Tensor:
        swapped = tuple(i for a, b in zip(self.pairs[::2], self.pairs[1::2]) for i in (b, a))
        return PPermute(self.axes, swapped, self.back)(cotangent)


@dataclass(frozen=True)
class Broadcast(StateMove):
    """What the rank at `source` along the axes holds, on every rank."""

    source: int
    states: str

    op = ops.BROADCAST

    def pull(self, cotangent: Tensor) -> Tensor:
        if self.back == "?->?":
            total = AllReduce(self.axes, "sum", "?->?")(cotangent)
        else:
            total = Cast(self.axes, "I->V")(AllReduce(self.axes, "sum", "V->I")(cotangent))
        return Keep(self.axes, self.source, self.back)(total)


@dataclass(frozen=True)
class Edge(Move):
    """Where a region begins or ends. ranks: in a region that runs at once, what makes the parts of all ranks of a plain
    tensor: (tensor, axes, spec) -> parts."""

    spec: str
    ranks: Callable[[Tensor, str, str], Tensor] | None = field(default=None, compare=False, repr=False)

    def record(self, x: Tensor) -> Tensor:
        result: Tensor = self.op(x, self.axes, self.spec)
        return result

    def batched(self) -> Edge:
        return replace(self, spec=f"_ {self.spec}".strip())

    def transposed(self) -> Edge:
        """The edge on which the cotangent goes the other way."""
        raise NotImplementedError

    def pull(self, cotangent: Tensor) -> Tensor:
        return self.transposed()(cotangent)


@dataclass(frozen=True)
class ToLocal(Edge):
    """A global value enters a region: every rank sees its part."""

    op = ops.TO_LOCAL

    def record(self, x: Tensor) -> Tensor:
        if self.ranks is not None and (type(x) is Tensor or not isinstance(x, Tensor)):
            return self.ranks(x, self.axes, self.spec)
        return super().record(x)

    def transposed(self) -> Edge:
        return ToGlobal(self.axes, cotangent_spec(self.spec), self.ranks)


@dataclass(frozen=True)
class ToGlobal(Edge):
    """The parts of all ranks leave a region as one global value."""

    op = ops.TO_GLOBAL

    def transposed(self) -> Edge:
        return ToLocal(self.axes, cotangent_spec(self.spec), self.ranks)


MOVES: dict[Any, type[Move]] = {
    m.op: m
    for m in (
        Cast,
        Keep,
        AllReduce,
        AllGather,
        ReduceScatter,
        OwnSlice,
        AllToAll,
        PPermute,
        Broadcast,
        ToLocal,
        ToGlobal,
    )
}


def move_of(op: Any, args: Sequence[Any]) -> Move | None:
    """The move that a recorded operation is; args without the operand."""
    kind = MOVES.get(op)
    if kind is None:
        return None
    values: list[Any] = [tuple(a) if isinstance(a, (list, tuple)) else a for a in args]
    return kind(**dict(zip((f.name for f in fields(kind)), values, strict=False)))


@dataclass(frozen=True)
class Wide(Move):
    """A move whose gradient is summed in another dtype than the value has."""

    move: Move
    dtype: torch.dtype

    def record(self, x: Tensor) -> Tensor:
        return self.move.record(x)

    def pull(self, cotangent: Tensor) -> Tensor:
        return self.move.pull(cotangent.to(self.dtype)).to(cotangent.dtype)

    def batched(self) -> Move:
        return replace(self, move=self.move.batched())


class Primitive(torch.autograd.Function):
    """A move under grad, vmap and jvp."""

    @staticmethod
    def forward(x: Tensor, move: Move) -> Tensor:
        return move.record(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.move = inputs[1]
        ctx.set_materialize_grads(False)  # zeros that autograd makes belong to no rank
        ctx.line = user_source() if _has_no_derivative(ctx.move) else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        if ctx.line is not None:
            raise texts.RegionError(texts.not_differentiable(ctx.move.kind, ctx.move.axes, ctx.line))
        return ctx.move.pull(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        if ctx.line is not None:
            raise texts.RegionError(texts.not_differentiable(ctx.move.kind, ctx.move.axes, ctx.line))
        return ctx.move(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], x: Tensor, move: Move) -> Any:
        return move.batched()(x.movedim(in_dims[0] or 0, 0)), 0


@dataclass(frozen=True)
class Edges:
    """The edges that several values cross together."""

    edges: tuple[Edge, ...]

    def __call__(self, values: Sequence[Any]) -> list[Tensor]:
        """The values on the other side, under any transform: torch.func pays for a Function once, not for each."""
        return list(Crossing.apply(self, *values)) if values else []  # type: ignore[no-untyped-call]


class Crossing(torch.autograd.Function):
    """Values that enter or leave a region together."""

    @staticmethod
    def forward(crossed: Edges, *values: Any) -> tuple[Tensor, ...]:
        return tuple(edge.record(x) for edge, x in zip(crossed.edges, values, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.crossed, *values = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in output if not _is_continuous(t)))
        ctx.save_for_forward(*(x for x in values if isinstance(x, Tensor)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = Edges(tuple(e.transposed() for e, g in zip(ctx.crossed.edges, grads) if g is not None))
        found = iter(back([g for g in grads if g is not None]))
        return None, *(None if g is None else next(found) for g in grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> Any:
        moving = [_is_continuous(x) for x in ctx.saved_tensors]
        given = [torch.zeros_like(x) if t is None else t for x, t in zip(ctx.saved_tensors, tangents)]
        edges = Edges(tuple(e for e, m in zip(ctx.crossed.edges, moving) if m))
        found = iter(edges([t for t, m in zip(given, moving) if m]))
        return tuple(next(found) if m else None for m in moving)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], crossed: Edges, *values: Any) -> Any:
        dims = in_dims[1:]
        edges = tuple(e if d is None else e.batched() for e, d in zip(crossed.edges, dims))
        moved = [x if d is None else x.movedim(d, 0) for x, d in zip(values, dims)]
        return tuple(Edges(edges)(moved)), tuple(None if d is None else 0 for d in dims)


def _is_continuous(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _has_no_derivative(move: Move) -> bool:
    return isinstance(move, AllReduce) and move.kind != "sum"
