"""Stages for a pipeline out of one function of a single device: cut by cost, where little passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vescale_fn.cast import WIDEN, Cast
from vescale_fn.functional import outside_transforms
from vescale_fn.interpret import flat_results, run_graph
from vescale_fn.primitives import RESHARD, constrained, named
from vescale_fn.random.scope import Scope, current_scope
from vescale_fn.regions.lower import OPS as REGION_OPS
from vescale_fn.remat import NAMED
from vescale_fn.schedules.pieces import Piece, TooFewError, pieces_of
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, equations, type_text
from vescale_fn.subprogram import Slots, call, scan
from vescale_fn.trace import Trace, trace_flat
from vescale_fn.tracing import ShapeDtype, aval_of, current_trace
from vescale_fn.tree import flatten, unflatten


@dataclass(frozen=True)
class Splitting:
    """A function to be cut into n stages, when the shapes are known."""

    fn: Callable[[Any, Any], Any]
    n: int
    slack: float


@dataclass(frozen=True)
class Part:
    """Stage `k` of a function that is cut when the first stage is traced; see `split`."""

    of: Splitting
    k: int

    def __call__(self, params: Any, x: Any) -> Any:
        if current_trace() is None:  # one device: the last stage is the function
            return self.of.fn(params, x) if self.k == self.of.n - 1 else x
        if self.k == 0:
            cuts, passed = Cuts.of_function(self.of, params, x), tuple(Slots.of(flatten(x)[0]).dynamic(flatten(x)[0]))
        else:
            cuts, passed = x[0], x[1:]
        return cuts.run(self.k, params, passed)


def split(fn: Callable[[Any, Any], Any], n: int, *, slack: float = 0.1) -> tuple[Part, ...]:
    """`fn` as n stages for `schedules.pipeline`: an unmodified model can be pipelined.

    fn: (params, x) -> output; pytrees of tensors. It is traced with the shapes that it meets.
    slack: the longest stage costs at most 1 + slack times what it must (by operations and bytes); among such cuts those
        are taken where fewest bytes pass. A loop over stacked layers is cut between iterations, and what depends on
        parameters only is not passed on, but computed where it is needed.
    Every stage is called with all of `params`, reads its own, and passes tensors on to the next. Outside of a step the
    last stage runs the function.
    Raises ValueError when fn has fewer pieces of work than n, or a region of `vf.shard_map` that would be cut.

    >>> import torch, vescale_fn as vf
    >>> def model(params, x):
    ...     for w in params:
    ...         x = torch.relu(x @ w)
    ...     return x
    >>> stages = split(model, 2)
    >>> print(cuts(stages, [torch.ones(8, 8)] * 4, torch.ones(4, 8)))
    stage  cost   passes on   bytes  first line
        0   50%  f32[4, 8]     128   ...
        1   50%                  0   ...
    """
    if n < 1:
        raise ValueError(f"schedules.split: {n} stages; it must be at least 1.")
    if slack < 0:
        raise ValueError(f"schedules.split: slack={slack} must not be negative.")
    whole = Splitting(fn, n, slack)
    return tuple(Part(whole, k) for k in range(n))


def cuts(stages: Sequence[Part], params: Any, x: Any) -> Cuts:
    """Where `split` cuts, for parameters and a microbatch of these shapes: printable. Leaves may be `ShapeDtype`s, or
    tensors on the meta device, which stand for tensors on the CPU."""
    found: list[Cuts] = []

    def look(*values: Any) -> list[Any]:
        found.append(Cuts.of_function(stages[0].of, *unflatten(treedef, slots.fill(values))))
        return []

    leaves, treedef = flatten((params, x))
    leaves = [torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, ShapeDtype) else v for v in leaves]
    slots = Slots.of(leaves)
    avals = [aval_of(v) for v in slots.dynamic(leaves)]
    trace_flat(look, [replace(a, device="cpu") if a.device == "meta" else a for a in avals])
    return found[0]


@dataclass(frozen=True, eq=False)
class Cuts:
    """A function in pieces, for arguments of some shapes. `captured`: what it closes over; `params`, `out`, `form`:
    which leaves of the parameters and of the result are tensors, and the form of the result."""

    of: Splitting
    pieces: tuple[Piece, ...]
    captured: tuple[Any, ...]
    params: Slots
    out: Slots
    form: Any

    @staticmethod
    def of_function(of: Splitting, params: Any, x: Any) -> Cuts:
        """Trace the function on tensors of the trace under way, and cut it."""
        outer, scope = current_trace(), current_scope()
        assert outer is not None
        (leaves, treedef), own = flatten((params, x)), Slots.of(flatten(params)[0])
        slots, form, out = Slots.of(leaves), None, Slots()
        values = slots.dynamic(leaves)
        keys = [scope.key] if scope is not None else []
        count = len(outer.numbers)

        def flat(*given: Any) -> list[Any]:
            nonlocal form, out
            rest = given[count:]
            around = Scope(rest[0], scope.count) if scope is not None else contextlib.nullcontext()
            with around as inner:
                results, form = flatten(of.fn(*unflatten(treedef, slots.fill(rest[len(keys) :]))))
            if scope is not None and inner is not None:
                scope.count = inner.count
            out = Slots.of(results)
            return out.dynamic(results)

        avals = [*outer.numbers, *map(aval_of, (*keys, *values))]
        names = [f"x{i}" for i in range(len(avals))]
        with outside_transforms() as levels:
            traced, _ = Trace(outer.fn_name, outer.decompositions, outer, len(levels)).run(flat, avals, names)
        graph, k = traced.graph, count + len(keys) + sum(own.is_dynamic)
        inputs, closed = graph.inputs[: len(avals)], graph.inputs[len(avals) :]
        graph = Graph((*inputs[:k], *closed, *inputs[k:]), graph.eqns, graph.outputs)
        _check(of, graph)
        try:
            pieces = pieces_of(graph, k + len(closed), of.n, of.slack)
        except TooFewError as e:
            raise ValueError(_too_few(of, str(e))) from None
        return Cuts(of, pieces, traced.captured, own, out, form)

    def run(self, k: int, params: Any, passed: Sequence[Any]) -> Any:
        """Piece k, on what the piece before passed."""
        trace, scope = current_trace(), current_scope()
        assert trace is not None
        known = [*trace.numbers, *([scope.key] if scope is not None else []), *self.params.dynamic(flatten(params)[0])]
        inputs = [*known, *map(trace.bring, self.captured), *passed]
        draws = scope.count if scope is not None else 0
        results = run_graph(self.pieces[k].graph, inputs, _evaluate)
        if scope is not None:  # what a piece draws was numbered when the function was traced
            scope.count = draws
        if k < self.of.n - 1:
            return (self, *results)
        return unflatten(self.form, self.out.fill(results))

    def __str__(self) -> str:
        total = sum(p.cost for p in self.pieces)
        rows = [("stage", "cost", "passes on", "bytes", "first line")]
        for k, piece in enumerate(self.pieces):
            passed = self.pieces[k + 1].passed if k < len(self.pieces) - 1 else ()
            types = ", ".join(map(type_text, passed))
            line = f"{piece.source.short} {piece.source.code}" if piece.source.file else ""
            rows.append((str(k), f"{piece.cost / total:.0%}", types, f"{sum(v.nbytes for v in passed):,}", line))
        width = [max(len(r[i]) for r in rows) for i in range(4)]
        lines = (
            f"{a:>{width[0]}}  {b:>{width[1]}}  {c:<{width[2]}}  {d:>{width[3]}}  {e}".rstrip()
            for a, b, c, d, e in rows
        )
        return "\n".join(lines)


def _check(of: Splitting, graph: Graph) -> None:
    """A piece runs as a graph, in which regions have left no trace of their mesh."""
    for e in equations(graph):
        if e.op in REGION_OPS:
            raise ValueError(
                f"schedules.split: {_name(of)} has a region of vf.shard_map (at {e.source.short}: {e.source.code}), "
                "which it cannot cut. Write the stages by hand, as a list of functions, for schedules.pipeline."
            )


def _too_few(of: Splitting, found: str) -> str:
    return (
        f"schedules.split: {_name(of)} has {found} operations that do any work, too few for {of.n} stages. Ask for "
        "fewer stages."
    )


def _name(of: Splitting) -> str:
    return getattr(of.fn, "__name__", type(of.fn).__name__)


# ---- pieces run so that derivatives can be taken of them


def _evaluate(e: Eqn, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The results of an equation, by what recorded it: sub-programs and our own operations have derivatives there."""
    if isinstance(e.op, Call):
        return list(call(lambda *values: tuple(run_graph(e.op.body, values, _evaluate)), *args, remat=e.op.remat))
    if isinstance(e.op, Scan):
        return _loop(e.op, args)
    run = _OWN.get(e.op, e.op)
    results = run(*args, **kwargs)
    return flat_results(results) if e.outs else []


def _loop(op: Scan, operands: Sequence[Any]) -> list[Any]:
    first, last = op.num_consts, op.num_consts + op.num_carry

    def body(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[Any, Any]:
        out = run_graph(op.body, [*operands[:first], *carry, *xs], _evaluate)
        return tuple(out[: op.num_carry]), tuple(out[op.num_carry :])

    carry, rows = scan(body, tuple(operands[first:last]), tuple(operands[last:]), op.length, op.reverse)
    return [*carry, *rows]


_OWN: Mapping[Any, Callable[..., Any]] = {RESHARD: constrained, NAMED: named, WIDEN: Cast.apply}
