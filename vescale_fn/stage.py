"""A stage of a pipeline as three sub-programs of the trace under way: forward, and the two halves of backward.

Each is traced once, and recorded as a call: F0, I0 and W0 for stage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vescale_fn.functional import outside_transforms
from vescale_fn.halves import Halves, halve, inputs_read
from vescale_fn.regions.region import Ambient, note_sub_program
from vescale_fn.sharding.graph import Call, Graph
from vescale_fn.trace import Trace
from vescale_fn.tracing import Aval, aval_of, current_trace

Body = Callable[[list[Any], list[Any]], Sequence[Tensor]]  # weights, inputs -> results


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage, and what it was traced on.

    before: the numbers of the step, then the weights, then what the stage closes over. inputs: of one microbatch.
    trained: indices of the weights that it reads and that have gradients. pulled: indices of the inputs whose gradient
    is wanted.
    """

    index: int
    halves: Halves
    before: tuple[Any, ...]
    inputs: tuple[Any, ...]
    trained: tuple[int, ...]
    pulled: tuple[int, ...]
    closures: tuple[Any, ...]

    @cached_property
    def primals(self) -> list[Any]:
        return [*self.before, *self.inputs]

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and residuals."""
        out = _emit(self.halves.forward, f"F{self.index}", self.primals)
        return out[: self.halves.num_results], out[self.halves.num_results :]

    def input_half(
        self, cotangents: Sequence[Tensor], residuals: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of the inputs in `pulled`, and what is kept for the other half. Cotangents are those of the
        floating-point results."""
        out = _emit(self.halves.input_half, f"I{self.index}", [*self.primals, *cotangents, *residuals])
        return out[: self.halves.num_input_gradients], out[self.halves.num_input_gradients :]

    def weight_half(
        self, cotangents: Sequence[Tensor], residuals: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gradients of the weights in `trained`."""
        operands = [*self.primals, *cotangents, *residuals, *kept]
        return _emit(self.halves.weight_half, f"W{self.index}", operands)


def trace_stage(
    index: int, fn: Body, weights: Sequence[Any], inputs: Sequence[Any], pulled: Sequence[int], trains: bool = True
) -> Stage:
    """Trace fn(weights, inputs) and its derivative, in the trace under way.

    pulled: which inputs, floating-point ones, have gradients. trains: whether there is a backward at all.
    """
    outer = current_trace()
    assert outer is not None
    numbers = outer.numbers
    first = len(numbers)
    n = first + len(weights)

    def flat(*values: Any) -> Sequence[Tensor]:
        return fn(list(values[first:n]), list(values[n : n + len(inputs)]))

    given = [*numbers, *weights, *inputs]
    forward, _ = _traced(outer, flat, given, [])
    read = inputs_read(forward)
    trained = tuple(
        i for i, w in enumerate(weights) if trains and w.dtype.is_floating_point and forward.inputs[first + i] in read
    )
    moving = [*(first + i for i in trained), *(n + i for i in pulled)] if trains else []
    floats = [v for v in forward.outputs if v.dtype.is_floating_point] if moving else []
    cotangents = [Aval(v.shape, v.dtype, _device(given)) for v in floats]

    def joint(*values: Any) -> list[Tensor]:
        def results_of(*changed: Any) -> Any:
            full = list(values)
            for i, x in zip(moving, changed):
                full[i] = x
            out = list(flat(*full))
            return [r for r in out if r.dtype.is_floating_point], out

        if not moving:
            return list(flat(*values))
        pull: Any
        _, pull, out = torch.func.vjp(results_of, *[values[i] for i in moving], has_aux=True)  # type: ignore[misc]
        return [*out, *pull(list(values[len(given) :]))]

    graph, closures = _traced(outer, joint, given, cotangents)
    k, end = len(given), len(given) + len(cotangents)
    order = (*graph.inputs[:n], *graph.inputs[end:], *graph.inputs[n:k], *graph.inputs[k:end])
    graph = Graph(order, graph.eqns, graph.outputs)
    halves = halve(graph, len(forward.outputs), len(cotangents), n + len(closures), len(trained))
    before = (*numbers, *weights, *closures)
    return Stage(index, halves, before, tuple(inputs), trained, tuple(pulled) if trains else (), closures)


def _traced(
    outer: Trace, fn: Callable[..., Sequence[Tensor]], given: Sequence[Any], more: Sequence[Aval]
) -> tuple[Graph, tuple[Any, ...]]:
    """The graph of fn, and what it closes over: those are the last inputs."""
    avals = [*map(aval_of, given), *more]
    around = Ambient.of(given)

    def run(*values: Any) -> Sequence[Tensor]:
        with around.around(values):
            return fn(*values)

    with outside_transforms() as levels:
        traced, _ = Trace(outer.fn_name, outer.decompositions, outer, len(levels)).run(
            run, avals, [f"x_{i}" for i in range(len(avals))]
        )
    return traced.graph, traced.captured


def _emit(graph: Graph, name: str, operands: Sequence[Any]) -> list[Tensor]:
    """The results of a graph, recorded as one call."""
    trace = current_trace()
    assert trace is not None
    if not graph.outputs:
        return []
    operands = [trace.bring(x) for x in operands]
    op = Call(graph, name)
    device = _device(operands)
    results = trace.emit(op, operands, [Aval(v.shape, v.dtype, device) for v in graph.outputs])
    note_sub_program(op, operands, results)
    return results


def _device(operands: Sequence[Any]) -> str:
    return next((str(x.device) for x in operands if isinstance(x, Tensor)), "cpu")
