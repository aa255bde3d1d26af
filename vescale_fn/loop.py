"""Sub-programs as primitives: one node with its own graph, under every transform of torch.func.

A `Loop` is a scan or, without a length, a call. It has two faces: `fn`, the body as a function of plain tensors that
torch.func can transform, and `graph`, what is recorded. They agree on the results of `fn`; the graph may return more
(residuals) and read more, so that backward need not compute forward again. Derivatives of any order come from `fn`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vescale_fn.ambient import NO_AUTOCAST, autocast
from vescale_fn.cast import WIDEN, cast
from vescale_fn.dead_code import without_effects
from vescale_fn.effects import is_silent, silence
from vescale_fn.form import Form, operand_avals
from vescale_fn.functional import outside_transforms
from vescale_fn.interpret import evaluate_equation, run_graph
from vescale_fn.primitives import RESHARD, constrained, named
from vescale_fn.random.bits import FOLD_IN, RANDOM_BITS, fold_key
from vescale_fn.random.scope import again
from vescale_fn.regions.moves import move_of
from vescale_fn.regions.ops import RAGGED_ALL_TO_ALL
from vescale_fn.regions.ragged import exchange_rows
from vescale_fn.regions.region import note_sub_program
from vescale_fn.remat import NAMED
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan
from vescale_fn.split import as_backward, fresh, split
from vescale_fn.trace import Trace
from vescale_fn.tracing import Aval, current_trace

Body = Callable[..., Sequence[Any]]

# How a transform sees operations of our own.
PRIMITIVES: Mapping[Any, Callable[..., Any]] = {
    RESHARD: constrained,
    NAMED: named,
    WIDEN: cast,
    RANDOM_BITS: again,
    FOLD_IN: fold_key,
}


@dataclass(frozen=True, eq=False)
class Loop:
    """A body in a form. Operands of `graph` are those of fn (`avals`, as the body sees them), then residuals; results
    are the first `num_results`, those of fn, then residuals. With `keeps_carry`, the last results of fn are the
    carries that came in, which backward reads."""

    fn: Body
    form: Form
    graph: Graph
    avals: tuple[Any, ...]
    num_results: int
    keeps_carry: bool = False
    residual_transpose: Loop | None = None  # backward that reads the residuals

    @staticmethod
    def of(fn: Body, form: Form, avals: Sequence[Any], **more: Any) -> Loop:
        graph = trace_body(fn, avals, form.name)
        return Loop(fn, form, graph, tuple(avals), len(graph.outputs), **more)

    def __call__(self, operands: Sequence[Any], below: int | None = None) -> list[Tensor]:
        """The results of fn, recorded as one node.

        below: the level of torch.func whose backward this is. It will not be differentiated at that level again.
        """
        loop, primals = self, operands[: len(self.avals)]
        followed = torch.is_grad_enabled() and any(requires_grad(x, below) for x in primals)
        if followed and any(map(is_float, self.result_avals)):
            loop, operands = differentiable(self), primals
        return list(apply(loop, operands)[: self.num_results])

    def record(self, operands: Sequence[Any]) -> tuple[Tensor, ...]:
        """The node itself; operands are free of transforms, and may come from outside."""
        trace = current_trace()
        assert trace is not None
        operands = [trace.bring(x) for x in operands]  # one that a transform had wrapped could not be brought before
        device = next((str(x.device) for x in operands if isinstance(x, Tensor)), "cpu")
        avals = [Aval(v.shape, v.dtype, device) for v in self.graph.outputs]
        carries, slices = avals[: self.form.num_carry], avals[self.form.num_carry :]
        op = self.form.op(fresh(self.graph))
        results = trace.emit(op, operands, [*carries, *map(self.form.stack, slices)])
        note_sub_program(op, operands, results)
        return tuple(results)

    @cached_property
    def result_avals(self) -> list[Aval]:
        """Results of fn, as the body makes them."""
        device = next((a.device for a in self.avals if isinstance(a, Aval)), "cpu")
        return [Aval(v.shape, v.dtype, device) for v in self.graph.outputs[: self.num_results]]


def trace_body(fn: Body, avals: Sequence[Any], name: str) -> Graph:
    """The graph of a body that closes over nothing."""
    outer = current_trace()
    assert outer is not None
    with outside_transforms() as levels, torch.enable_grad(), autocast(NO_AUTOCAST):
        traced, _ = Trace(outer.fn_name, outer.decompositions, outer, len(levels)).run(
            fn, avals, [f"{name}_{i}" for i in range(len(avals))]
        )
    if traced.captured:
        raise ValueError(
            f"The derivative of {name} reads a tensor that {name} itself does not read. Pass it to {name} as an "
            "argument."
        )
    return traced.graph


def replay(graph: Graph, operands: Sequence[Any]) -> list[Any]:
    """The graph as a function that torch.func can transform."""

    trace = current_trace()
    assert trace is not None
    if is_silent():
        graph = without_effects(graph)

    def transformable(e: Eqn, args: Sequence[Any], kwargs: Any) -> list[Any]:
        with trace.lines.held_at(e.source, e.phase == "backward"):
            if e.op in PRIMITIVES:
                return [PRIMITIVES[e.op](*args)]
            if e.op is RAGGED_ALL_TO_ALL:
                return [exchange_rows(args[6], args[0], args[1], (args[2], args[3], args[4], args[5]))]
            move = move_of(e.op, args[1:])
            if move is not None:
                return [move(args[0])]
            if isinstance(e.op, (Scan, Call)):
                return list(loop_of(e.op, args)(args))
            return evaluate_equation(e, args, kwargs)

    return run_graph(graph, operands, transformable)


def loop_of(op: Scan | Call, operands: Sequence[Any]) -> Loop:
    """The loop that a recorded sub-program is."""
    if isinstance(op, Call):
        form = Form(op.name, remat=op.remat)
    else:
        form = Form("scan", op.num_consts, op.num_carry, op.length, op.reverse)
    avals = operand_avals(form, operands)
    return Loop(lambda *ops: replay(op.body, ops), form, op.body, avals, len(op.body.outputs))


class Primitive(torch.autograd.Function):
    """The node of a loop under grad, vmap and jvp."""

    @staticmethod
    def forward(loop: Loop, *operands: Any) -> tuple[Tensor, ...]:
        return loop.record(operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        loop, *operands = inputs
        tensors = [x for x in operands if isinstance(x, Tensor)]
        ctx.loop, ctx.numbers = loop, [None if isinstance(x, Tensor) else x for x in operands]
        ctx.level = torch._C._functorch.maybe_current_level()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for i, t in enumerate(output) if i >= loop.num_results or not is_float(t)])
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        operands = [next(saved) if x is None else x for x in ctx.numbers]
        return None, *pull_back(ctx.loop, operands, list(saved), cotangents, ctx.level)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        operands = [next(saved) if x is None else x for x in ctx.numbers]
        return tuple(push_forward(ctx.loop, operands, tangents))

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], loop: Loop, *operands: Any) -> Any:
        return batch(loop, operands, in_dims[1:], info.batch_size, info.randomness)


def apply(loop: Loop, operands: Sequence[Any]) -> tuple[Tensor, ...]:
    """Results and residuals of a loop, recorded as one node."""
    results: tuple[Tensor, ...] = Primitive.apply(loop, *operands)  # type: ignore[no-untyped-call]
    return results


def requires_grad(x: Any, below: int | None = None) -> bool:
    """Whether any grad transform under way follows x, at a level lower than `below` if given. (The pull-back of a vjp
    runs when its own transform is over: what that had wrapped is dead, and nobody follows it.)"""
    functorch = torch._C._functorch
    while isinstance(x, Tensor):
        dead = functorch.is_functorch_wrapped_tensor(x) and functorch.is_dead_tensor_wrapper(x)  # type: ignore[attr-defined]
        if not dead and x.requires_grad and (below is None or functorch.maybe_get_level(x) < below):
            return True
        if not functorch.is_functorch_wrapped_tensor(x):
            return False
        x = functorch.get_unwrapped(x)
    return False


def is_float(x: Any) -> bool:
    """Whether a tensor or aval can have a derivative."""
    return isinstance(x, (Tensor, Aval)) and (x.dtype.is_floating_point or x.dtype.is_complex)


def floats(values: Sequence[Any], like: Sequence[Any] | None = None) -> list[Any]:
    """The values that stand where `like` (by default the values) has floating-point numbers."""
    return [v for v, x in zip(values, values if like is None else like, strict=True) if is_float(x)]


def merge(values: Sequence[Any], changed: Sequence[Any], where: Sequence[bool]) -> list[Any]:
    """`values` with those marked in `where` taken from `changed` instead."""
    new = iter(changed)
    return [next(new) if w else v for v, w in zip(values, where, strict=True)]


# ---- reverse mode


def differentiable(loop: Loop) -> Loop:
    """The same loop, which also returns the carries that came in, and residuals for its transpose."""
    keeping = _keeping_carry(loop)
    adjoint = Adjoint(keeping)
    joint = trace_body(adjoint.joint, adjoint.avals, loop.form.name)
    forward, backward = split(
        joint, keeping.num_results, adjoint.cotangents(joint), joint.inputs[: loop.form.num_consts], loop.form.remat
    )
    again = Adjoint(silent(keeping)).fn
    transpose = Loop(again, adjoint.form, backward, adjoint.avals, len(backward.outputs))
    return replace(keeping, graph=forward, residual_transpose=transpose)


def silent(loop: Loop) -> Loop:
    """The loop without its effects, for what runs beside the loop itself."""

    def fn(*operands: Any) -> Sequence[Any]:
        with silence():
            return loop.fn(*operands)

    return replace(loop, fn=fn, graph=without_effects(loop.graph))


def _keeping_carry(loop: Loop) -> Loop:
    """The loop, which also returns the carries that came in."""
    form, graph, n = loop.form, loop.graph, loop.num_results
    kept = form.parts(graph.inputs)[1]
    return Loop(
        lambda *operands: [*loop.fn(*operands), *form.parts(operands)[1]],
        form,
        replace(graph, outputs=(*graph.outputs[:n], *kept)),
        loop.avals,
        n + len(kept),
        keeps_carry=True,
    )


class Adjoint:
    """The backward of a loop that keeps its carries: a loop in the other direction.

    Its constants are those of the loop. Its carries are cotangents of carries, and sums of cotangents of constants.
    Its slices are the carries that came in, the slices, and cotangents of what the loop stacked.
    """

    def __init__(self, loop: Loop, of_kept: bool = False) -> None:
        """of_kept: whether there are cotangents of the carries that the loop kept."""
        form, n = loop.form, loop.num_results
        consts, carries, slices = form.parts(loop.avals)
        stacked = loop.result_avals[form.num_carry : n if of_kept else n - form.num_carry]
        carry = [*floats(carries), *floats(consts)]
        self.loop = loop
        self.is_float = [is_float(a) for a in loop.avals]
        self.num_cotangents = form.num_carry + len(stacked)
        self.form = Form(f"{form.name}_backward", len(consts), len(carry), form.length, not form.reverse, form.remat)
        self.avals = (*consts, *carry, *carries, *slices, *floats(stacked))
        self.sizes = [len(p) for p in (consts, floats(carries), floats(consts), carries, slices, floats(stacked))]

    def parts(self, operands: Sequence[Any]) -> list[list[Any]]:
        """Constants, cotangents of carries, sums for constants, carries, slices, cotangents of stacked results."""
        rest = iter(operands)
        return [[next(rest) for _ in range(n)] for n in self.sizes]

    def cotangents(self, joint: Graph) -> list[Any]:
        """The inputs of the joint graph on which forward does not depend."""
        _, carries, sums, _, _, stacked = self.parts(joint.inputs)
        return [*carries, *sums, *stacked]

    def fn(self, *operands: Any) -> list[Any]:
        """One step backward."""
        return self._step(operands)[1]

    def joint(self, *operands: Any) -> list[Any]:
        """One step forward, and backward."""
        results, gradients = self._step(operands)
        return [*results, *gradients]

    def _step(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        consts, carries_out, sums, carries, slices, stacked = self.parts(operands)
        primals = [*consts, *carries, *slices]

        def results_of(*changed: Any) -> Any:
            results = self.loop.fn(*merge(primals, changed, self.is_float))
            return floats(results[: self.num_cotangents]), results

        pull: Any
        _, pull, results = torch.func.vjp(results_of, *floats(primals), has_aux=True)  # type: ignore[misc]
        gradients = iter(pull([*carries_out, *stacked]))
        of_consts, of_carries, of_slices = ([next(gradients) for _ in floats(p)] for p in (consts, carries, slices))
        return results, [*of_carries, *(a + g for a, g in zip(sums, of_consts)), *of_slices]


def pull_back(
    loop: Loop, operands: Sequence[Any], outputs: Sequence[Tensor], cotangents: Sequence[Any], level: int | None
) -> list[Any]:
    """Cotangents of the operands, given those of the outputs (None where there is none)."""
    if not loop.keeps_carry:
        loop = silent(_keeping_carry(loop))
        outputs = loop(operands, level)
        cotangents = [*cotangents, *[None] * loop.form.num_carry]
    form, n = loop.form, loop.num_results
    of_kept = any(c is not None for c in cotangents[n - form.num_carry : n])
    adjoint, residuals = Adjoint(silent(loop), of_kept), outputs[n:]
    transpose = loop.residual_transpose
    if transpose is None or of_kept:
        graph = as_backward(trace_body(adjoint.fn, adjoint.avals, form.name))
        transpose, residuals = Loop(adjoint.fn, adjoint.form, graph, adjoint.avals, len(graph.outputs)), []
    given = [
        torch.zeros_like(t) if c is None else c
        for t, c in zip(outputs[: adjoint.num_cotangents], cotangents)
        if is_float(t)
    ]
    consts, carries, slices = form.parts(operands[: len(loop.avals)])
    last = len(floats(carries))
    sums = [torch.zeros_like(c) for c in floats(consts)]
    kept = outputs[n - form.num_carry : n]
    results = transpose([*consts, *given[:last], *sums, *kept, *slices, *given[last:], *residuals], level)
    of_carries, of_consts, of_slices = results[:last], results[last : last + len(sums)], results[last + len(sums) :]
    gradients = merge([None] * len(loop.avals), [*of_consts, *of_carries, *of_slices], adjoint.is_float)
    return [*gradients, *[None] * (len(operands) - len(loop.avals))]


# ---- forward mode


def push_forward(loop: Loop, operands: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Tangents of the outputs: a loop over values and tangents."""
    loop = silent(loop)
    form = loop.form
    values = form.parts(operands[: len(loop.avals)])
    tangents = [torch.zeros_like(x) if t is None and is_float(x) else t for x, t in zip(operands, tangents)]
    moves = form.parts([is_float(a) for a in loop.avals])
    moving = [[t for t, m in zip(ts, ms) if m] for ts, ms in zip(form.parts(tangents[: len(loop.avals)]), moves)]
    both = [[*v, *t] for v, t in zip(values, moving)]
    sizes = [(len(v), len(t)) for v, t in zip(values, moving)]
    pushed = replace(form, name=f"{form.name}_jvp", num_consts=len(both[0]), num_carry=len(both[1]))

    def fn(*mixed: Any) -> list[Any]:
        rest = iter(mixed)
        taken = [([next(rest) for _ in range(a)], [next(rest) for _ in range(b)]) for a, b in sizes]
        primals = [x for v, _ in taken for x in v]
        flags = [is_float(a) for a in loop.avals]

        def results_of(*changed: Any) -> Any:
            results = loop.fn(*merge(primals, changed, flags))
            return tuple(floats(results)), results

        directions = tuple(t for _, ts in taken for t in ts)
        _, outs, results = torch.func.jvp(results_of, tuple(floats(primals)), directions, has_aux=True)  # type: ignore[misc]
        return [*results[: form.num_carry], *outs]

    flat = [x for part in both for x in part]
    results = Loop.of(fn, pushed, operand_avals(pushed, flat))(flat)
    new = merge([None] * loop.num_results, results[form.num_carry :], [is_float(a) for a in loop.result_avals])
    return [*new, *[None] * (len(loop.graph.outputs) - loop.num_results)]


# ---- vmap


def batch(
    loop: Loop, operands: Sequence[Any], in_dims: Sequence[int | None], size: int, randomness: str = "error"
) -> Any:
    """The loop over a batch: every carry has the batch as dim 0, what is stacked has it after the dim of the loop."""
    form = loop.form
    consts, carries, slices = form.parts(list(zip(operands, in_dims)))
    moved = [
        *(x if d is None else x.movedim(d, 0) for x, d in consts),
        *(x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in carries),
        *(x if d is None else x.movedim(d, form.batch_dim) for x, d in slices),
    ]
    flags = [0 if d is not None else None for d in in_dims]
    flags[form.num_consts : form.num_consts + form.num_carry] = [0] * form.num_carry
    primal_flags = tuple(flags[: len(loop.avals)])

    def fn(*values: Any) -> Sequence[Any]:
        return torch.vmap(lambda *one: tuple(loop.fn(*one)), primal_flags, randomness=randomness)(*values)

    def recorded(*values: Any) -> Sequence[Any]:
        return torch.vmap(lambda *one: tuple(replay(loop.graph, one)), tuple(flags), randomness=randomness)(*values)

    avals = operand_avals(form, moved)
    graph = trace_body(recorded, avals, form.name)
    batched = Loop(fn, form, graph, avals[: len(loop.avals)], loop.num_results, loop.keeps_carry)
    results = apply(batched, moved)
    return results, tuple(0 if i < form.num_carry else form.batch_dim for i in range(len(results)))
