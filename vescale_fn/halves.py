"""Backward in two halves: gradients of a stage's inputs, which others wait for, and of its weights, which can wait.

Both come from one traced vjp by partial evaluation: the first half is what the gradients of the inputs need, the second
is the rest, and reads what the first has computed. So every equation of backward runs once, however often a weight is
used, and forward is never computed again (but for views, and for what depends on weights only).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from vescale_fn.dead_code import drop_dead, needed_results
from vescale_fn.remat import Policy
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var, vars_in
from vescale_fn.split import fresh, recomputed, silenced, split
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval


@dataclass(frozen=True, eq=False)
class Halves:
    """A stage as three graphs. `primals` are weights, then inputs; `forward` maps them to results, then residuals;
    `input_half` maps primals, cotangents of the results and residuals to gradients of the inputs, then what is kept;
    `weight_half` maps primals, cotangents, residuals and what is kept to gradients of the weights. A graph need not
    read all of its inputs."""

    forward: Graph
    input_half: Graph
    weight_half: Graph
    num_weights: int
    num_results: int
    num_input_gradients: int

    @property
    def residuals(self) -> tuple[Var, ...]:
        """What forward returns for backward, beside its results."""
        return tuple(self.forward.outputs[self.num_results :])

    @property
    def kept(self) -> tuple[Var, ...]:
        """What the input half returns for the weight half, beside the gradients."""
        return tuple(self.input_half.outputs[self.num_input_gradients :])

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes held of a microbatch between forward and backward: the stage's inputs and residuals that backward
        reads. Weights are there anyway."""
        primals, known = len(self.forward.inputs), len(self.input_half.inputs)
        read = self._held(self.input_half) | self._held(self.weight_half)
        late = range(known - len(self.residuals), known)
        return sum(self._bytes[i] for i in read if i < primals or i in late)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes held of a microbatch between the halves of backward: inputs, residuals, cotangents and kept values
        that the weight half reads."""
        return sum(self._bytes[i] for i in self._held(self.weight_half))

    @cached_property
    def _bytes(self) -> list[int]:
        return [v.nbytes for v in self.weight_half.inputs]

    def _held(self, half: Graph) -> set[int]:
        """Positions of inputs, other than weights, that a half reads."""
        read = inputs_read(half)
        return {i for i, v in enumerate(half.inputs) if i >= self.num_weights and v in read}


def halves_of(
    fn: Callable[[list[Any], list[Any]], Sequence[Any]],
    weights: Sequence[Aval],
    inputs: Sequence[Aval],
    remat: bool | Policy = False,
) -> Halves:
    """Trace fn(weights, inputs), which returns a flat list of tensors, and its vjp, once.

    Cotangents are of the floating-point results, gradients of the floating-point weights and inputs, each in order.

    >>> f64 = [Aval((2, 2), torch.float64)]
    >>> halves = halves_of(lambda w, x: [torch.sin(x[0] @ w[0])], f64, f64)
    >>> for graph in (halves.forward, halves.input_half, halves.weight_half):
    ...     print(*(e.op for e in graph.eqns))
    aten.mm.default aten.sin.default aten.cos.default
    aten.mul.Tensor aten.t.default aten.mm.default
    aten.t.default aten.mm.default
    """
    primals = [*weights, *inputs]
    n, moves = len(weights), [a.dtype.is_floating_point for a in primals]
    results: list[Any] = []

    def joint(*values: Any) -> list[Any]:
        def of_floats(*changed: Any) -> Any:
            new = iter(changed)
            full = [next(new) if m else v for v, m in zip(values, moves)]
            out = list(fn(full[:n], full[n:]))
            return [r for r in out if r.dtype.is_floating_point], out

        floats = [v for v, m in zip(values, moves) if m]
        pulled, pull, out = torch.func.vjp(of_floats, *floats, has_aux=True)  # type: ignore[misc]
        results[:] = out
        return [*out, *pull(list(values[len(primals) :] or pulled))]

    outputs = trace_flat(lambda *values: fn(list(values[:n]), list(values[n:])), primals).graph.outputs
    cotangents = [Aval(v.shape, v.dtype) for v in outputs if isinstance(v, Var) and v.dtype.is_floating_point]
    graph = trace_flat(joint, [*primals, *cotangents]).graph
    return halve(graph, len(outputs), len(cotangents), n, sum(moves[:n]), remat)


def halve(
    joint: Graph, num_results: int, num_cotangents: int, num_weights: int, num_weight_gradients: int, remat: Any = False
) -> Halves:
    """The halves of a joint graph, which maps weights, inputs and cotangents to results, gradients of weights and
    gradients of inputs.

    remat: backward computes forward again, or what a policy does not keep; that is part of the first half that needs
    it, and never runs twice.
    """
    weights = joint.inputs[:num_weights]
    forward, backward = split(joint, num_results, joint.inputs[len(joint.inputs) - num_cotangents :], weights, remat)
    of_inputs = range(num_weight_gradients, len(backward.outputs))
    first, second, _ = divide(backward, of_inputs, weights)
    return Halves(fresh(forward), fresh(first), fresh(second), num_weights, num_results, len(of_inputs))


def divide(
    graph: Graph, first: Collection[int], constants: Collection[Var] = (), lost: Collection[Var] = ()
) -> tuple[Graph, Graph, tuple[Var, ...]]:
    """Partial evaluation: a graph that computes the outputs at the indices in `first`, one that computes the others,
    and the values that the second takes from the first.

    The first returns its outputs, then these values; the second takes the inputs of the graph, without those in
    `lost`, then these values. Every equation is in one of the two, but for views, constants, and what depends on
    `constants` (inputs that both have) only: the second computes them again rather than keep their results.
    Sub-programs are divided, too. An effect comes once: with the second, unless what has it is whole in the first.
    """
    outputs = tuple(v for i, v in enumerate(graph.outputs) if i in first)
    others = tuple(v for i, v in enumerate(graph.outputs) if i not in first)
    eqns, in_first = _assigned(graph, outputs)
    early = [e for e in eqns if e in in_first]
    again = silenced(recomputed(early, constants))
    late = drop_dead(Graph((), tuple(again.get(e, e) for e in eqns if e in again or e not in in_first), others)).eqns
    reads = (*(v for e in late for v in e.reads), *vars_in(others))
    lacks = {*lost, *(v for e in early for v in e.outs)}.difference(v for e in late for v in e.outs)
    kept = tuple(dict.fromkeys(v for v in reads if v in lacks))
    inputs = tuple(v for v in graph.inputs if v not in lost)
    return (
        drop_dead(Graph(graph.inputs, tuple(early), (*outputs, *kept))),
        Graph((*inputs, *kept), late, others),
        kept,
    )


def _assigned(graph: Graph, outputs: tuple[Any, ...]) -> tuple[list[Eqn], set[Eqn]]:
    """The equations in order, with sub-programs divided that are needed in part, and those that `outputs` need."""
    needed = set(vars_in(outputs))
    eqns: list[Eqn] = []
    found: set[Eqn] = set()
    for e in reversed(graph.eqns):
        wanted = [i for i, v in enumerate(e.outs) if v in needed]
        parts = [e]
        if wanted and len(wanted) < len(e.outs) and isinstance(e.op, (Scan, Call)):
            parts = _divided(e, wanted)
        if wanted:
            found.add(parts[0])
            needed.update(parts[0].reads)
        eqns += reversed(parts)
    return eqns[::-1], found


def _divided(e: Eqn, wanted: Sequence[int]) -> list[Eqn]:
    """A sub-program as two, of which the first has the results in `wanted`."""
    op, n = e.op, len(e.args)
    consts, carry = (op.num_consts, op.num_carry) if isinstance(op, Scan) else (0, 0)
    first = needed_results(op, wanted) if isinstance(op, Scan) else list(wanted)
    carries = [i for i in first if i < carry]
    lost = [op.body.inputs[consts + i] for i in carries]  # the second cannot run them: it gets them as slices
    early, late, kept = divide(op.body, first, op.body.inputs[:consts], lost)
    if passed := [i for i, v in enumerate(op.body.outputs) if i >= carry and i not in first and v in kept]:
        return _divided(e, [*wanted, *passed])  # the second would only hand on what the first has

    def operands(which: Collection[int]) -> list[int]:
        return [i for i in range(n) if not consts <= i < consts + carry or i - consts in which]

    def form(body: Graph, carries: int) -> Scan | Call:
        return replace(op, body=body, num_carry=carries) if isinstance(op, Scan) else replace(op, body=body)

    def stacked(v: Var) -> Var:
        return replace(v, shape=(op.length, *v.shape)) if isinstance(op, Scan) else replace(v)

    mine, values = operands(carries), tuple(map(stacked, kept))
    inputs = tuple(early.inputs[i] for i in mine)
    parts = [
        replace(
            e,
            op=form(replace(early, inputs=inputs), len(carries)),
            args=tuple(e.args[i] for i in mine),
            outs=(*(e.outs[i] for i in first), *values),
        )
    ]
    rest = [i for i in range(len(e.outs)) if i not in first]
    if rest:
        theirs = operands([i for i in rest if i < carry])
        args = (*(e.args[i] for i in theirs), *values)
        parts.append(replace(e, op=form(late, carry - len(carries)), args=args, outs=tuple(e.outs[i] for i in rest)))
    parts[0] = drop_dead(Graph((), (parts[0],), parts[0].outs)).eqns[0]  # without operands that only the second reads
    return parts


def inputs_read(graph: Graph) -> set[Var]:
    """The inputs that anything in the graph reads."""
    read = {v for e in graph.eqns for v in e.reads} | set(vars_in(graph.outputs))
    return read.intersection(graph.inputs)
