"""Moving an Array to another layout: a program of collectives only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from vescale_fn.array import Array, ArrayType
from vescale_fn.engines import Executable, engine_for
from vescale_fn.localize.context import Builder
from vescale_fn.names import Names
from vescale_fn.program import Program
from vescale_fn.sharding.bind import bind_sized
from vescale_fn.sharding.graph import Graph, Source, Var
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.spec import Spec, SpecError


def move(x: Array, spec: Spec, **sizes: int | Sequence[int]) -> Array:
    """x in the layout that a spec says."""
    try:
        layout = bind_sized(spec, tuple(x.shape), x.mesh.shape, sizes)
    except SpecError as e:
        raise e.within("vf.reshard") from None
    moved = move_to(x, layout)
    return Array(moved.type, moved.shards, str(spec.with_sizes(sizes)))


def move_to(x: Array, to: Layout) -> Array:
    """x in layout `to`; x itself when it is there already."""
    if x.layout == to:
        return x
    (shards,) = zip(*_mover(x.type, to)([[s] for s in x.shards]))
    return Array(ArrayType(to, x.dtype, x.mesh), list(shards))


@lru_cache(maxsize=1024)
def _mover(start: ArrayType, to: Layout) -> Executable:
    source = Var("x", start.layout.shape, start.dtype)
    builder = Builder({source: start.layout}, Names({"x"}))
    chain = builder.reshard(source, to, Source(), "forward")
    program = Program(start.layout.mesh, Graph((source,), tuple(builder.eqns), (chain[-1],)), builder.layouts)
    return engine_for(start.mesh).load(program)
