"""What a handler sees while one equation is rewritten for a rank, and the builder it appends local equations to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vescale_fn.names import Names
from vescale_fn.program import LocalDim
from vescale_fn.sharding.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    ToPartial,
)
from vescale_fn.sharding.graph import Eqn, Source, Var
from vescale_fn.sharding.layout import Layout, Ragged
from vescale_fn.sharding.reshard import plan as plan_reshard

_SUFFIX: dict[type, str] = {
    AllReduce: "ar",
    AllGather: "ag",
    ReduceScatter: "rs",
    AllToAll: "a2a",
    Permute: "pm",
    Exchange: "ex",
    Slice: "own",
    ToPartial: "part",
}


@dataclass(eq=False)
class Builder:
    """Local equations of one graph in the making, with a layout for every Var and unique names."""

    layouts: dict[Var, Layout]
    names: Names
    eqns: list[Eqn] = field(default_factory=list)

    def var(self, name: str, shape: Sequence[int], dtype: Any, layout: Layout | None) -> Var:
        v = Var(self.names.fresh(name), tuple(shape), dtype)
        if layout is not None and v.is_tensor:
            self.layouts[v] = layout
        return v

    def reshard(self, v: Var, to: Layout, source: Source, phase: str) -> list[Var]:
        """Append the collectives that bring v to layout `to`; the Vars after each step (empty when none is needed)."""
        chain: list[Var] = []
        for step in plan_reshard(self.layouts[v], to):
            out = self.var(f"{v.name}_{_SUFFIX[type(step.comm)]}", v.shape, v.dtype, step.layout)
            self.eqns.append(Eqn(step.comm, (v,), {}, (out,), source, phase))
            chain.append(out)
            v = out
        return chain


@dataclass(eq=False)
class Context:
    """One equation being rewritten. `ins` and `outs` are the layouts of its tensor operand slots, as delivered, and
    of its results, as required; `letters` maps a mesh axis to the letter of its rule that the axis shards."""

    builder: Builder
    eqn: Eqn
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]  # a scalar's for a result that is no tensor
    letters: Mapping[str, str]

    def emit(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        layouts: Sequence[Layout] | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        dtypes: Sequence[Any] | None = None,
    ) -> tuple[Var, ...]:
        """Append a local equation; its results default to those of the global equation."""
        layouts = self.outs if layouts is None else layouts
        if shapes is None:
            same = len(layouts) == len(self.eqn.outs)
            shapes = [v.shape for v in self.eqn.outs] if same else [x.shape for x in layouts]
        dtypes = [v.dtype for v in self.eqn.outs] if dtypes is None else dtypes
        names = [v.name for v in self.eqn.outs]
        names += names[:1] * (len(layouts) - len(names))
        outs = tuple(self.builder.var(n, s, d, x) for n, s, d, x in zip(names, shapes, dtypes, layouts))
        self.builder.eqns.append(Eqn(op, tuple(args), dict(kwargs or {}), outs, self.eqn.source, self.eqn.phase))
        return outs

    def reshard(self, v: Var, to: Layout) -> Var:
        """v in layout `to`."""
        return ([v] + self.builder.reshard(v, to, self.eqn.source, self.eqn.phase))[-1]

    def local_shape(self, layout: Layout) -> tuple[Any, ...]:
        """The local shape of a tensor of this layout, as arguments: ints, and LocalDim where an axis cuts the dim.
        Dims that a Ragged state merges are one."""
        return tuple(local_dim(layout.flat, d) for d in range(layout.flat.ndim))


Handler = Callable[[Context, tuple[Any, ...], dict[str, Any]], tuple[Var, ...]]


def local_dim(layout: Layout, dim: int) -> int | LocalDim:
    """The local extent of a dim: an int when every rank holds as much of it, whatever its coordinates."""
    even = layout.is_even or not (
        any(isinstance(s, Ragged) for s in layout.states) or any(s.uneven for _, s in layout.shards(dim))
    )
    return layout.max_local_shape[dim] if even else LocalDim(layout, dim)
