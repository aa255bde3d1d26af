"""`scan` and `call`: sub-programs of a step, each one node of the traced graph.

A layer stack written with `scan` is traced and solved once, whatever its depth; `call` names a part of a step, and with
remat=True computes it again in backward instead of keeping its intermediate values. Outside a trace both just run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vescale_fn import trace_errors as errors
from vescale_fn.ambient import AutocastState, autocast, autocast_state
from vescale_fn.array import Array
from vescale_fn.form import Form, operand_avals
from vescale_fn.functional import outside_transforms
from vescale_fn.loop import Loop
from vescale_fn.random.scope import per_iteration, resumed
from vescale_fn.regions.casts import carried
from vescale_fn.regions.region import Ambient
from vescale_fn.remat import Policy
from vescale_fn.sharding.graph import dtype_text
from vescale_fn.trace import Trace
from vescale_fn.tracing import aval_of, current_trace
from vescale_fn.tree import flatten, flatten_with_paths, map_leaves, unflatten

Carry = TypeVar("Carry")


def scan(
    body: Callable[[Carry, Any], tuple[Carry, Any]],
    init: Carry,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Carry, Any]:
    """A loop: `carry, y = body(carry, x)` for each slice x of xs along dim 0, from `init`.

    init: pytree of tensors; the body returns carries of the same shapes and dtypes.
    xs: pytree of tensors with equal extent along dim 0, or None for a loop of `length` iterations.
    reverse: start with the last slice; ys are stacked in the order of xs all the same.
    Returns the last carry, and the ys stacked along a new dim 0 (leaves that are no tensors are left as they are).
    Differentiable any number of times, under vmap and jvp; the body may close over tensors.
    Raises ValueError when extents differ, or the body changes the form of the carry.

    >>> total, sums = scan(lambda total, x: (total + x, total + x), torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
    >>> total, sums
    (tensor(6.), tensor([1., 3., 6.]))
    """
    n = _length(xs, length)
    body, xs = per_iteration(body, xs, n)
    if current_trace() is None:
        return _run(body, init, xs, n, reverse)
    return loop(body, init, xs, Form("scan", length=n, reverse=reverse))


def loop(body: Callable[[Carry, Any], tuple[Carry, Any]], init: Carry, xs: Any, form: Form) -> tuple[Carry, Any]:
    """A loop of this form, but for its numbers of operands, in the trace under way. Arguments and results of `scan`."""
    trace = current_trace()
    assert trace is not None
    (init_leaves, init_def), (x_leaves, x_def) = flatten(init), flatten(xs)
    step = _ScanBody(body, Slots.of(init_leaves), init_def, Slots.of(x_leaves), x_def, flatten_with_paths(init)[0])
    carries = [trace.bring(x) for x in step.carry.dynamic(init_leaves)]
    slices = [trace.bring(x) for x in step.xs.dynamic(x_leaves)]
    results = _record(step, replace(form, num_carry=len(carries)), [*carries, *slices])
    ys = step.ys.fill(results[len(carries) :])
    return unflatten(init_def, step.carry.fill(results[: len(carries)])), unflatten(step.y_def, ys)


def call(fn: Callable[..., Any], *args: Any, remat: bool | Policy = False) -> Any:
    """fn(*args) as one node of the step; without arguments, a function that does this when called.

    remat: backward computes fn again from its arguments instead of keeping its intermediate values; a policy says
        which of them it keeps all the same (see `vescale_fn.schedules.remat`).

    >>> gelu = call(torch.nn.functional.gelu, remat=True)
    >>> gelu(torch.zeros(2))
    tensor([0., 0.])
    """
    if not args:
        return functools.wraps(fn)(lambda *a, **k: _call(fn, a, k, remat))
    return _call(fn, args, {}, remat)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], remat: bool | Policy) -> Any:
    trace = current_trace()
    if trace is None:
        return fn(*args, **kwargs)
    leaves, treedef = flatten((args, kwargs))
    body = _CallBody(resumed(fn), Slots.of(leaves), treedef)
    operands = [trace.bring(x) for x in body.arguments.dynamic(leaves)]
    name = getattr(fn, "__name__", "call")
    results = _record(body, Form(name if name.isidentifier() else "call", remat=remat), operands)
    return unflatten(body.out_def, body.results.fill(results))


# ---- bodies as flat functions


@dataclass
class Slots:
    """The leaves of a pytree: constants, and None where a tensor goes. A number that varies is a constant: sub-programs
    know the numbers of the step, and torch writes any other as arithmetic on them."""

    constants: list[Any] = field(default_factory=list)
    is_dynamic: list[bool] = field(default_factory=list)

    @staticmethod
    def of(leaves: Sequence[Any]) -> Slots:
        dynamic = [_is_array(x) for x in leaves]
        return Slots([None if d else x for x, d in zip(leaves, dynamic)], dynamic)

    def dynamic(self, leaves: Sequence[Any]) -> list[Any]:
        return [x for x, d in zip(leaves, self.is_dynamic) if d]

    def fill(self, values: Sequence[Any]) -> list[Any]:
        rest = iter(values)
        return [next(rest) if d else c for c, d in zip(self.constants, self.is_dynamic)]


@dataclass(eq=False)
class _ScanBody:
    """The body of a scan on flat lists of tensors; knows the form of its results once it has run."""

    body: Callable[[Any, Any], Any]
    carry: Slots
    carry_def: Any
    xs: Slots
    x_def: Any
    paths: list[str]
    ys: Slots = field(default_factory=Slots)
    y_def: Any = None

    def __call__(self, *values: Any) -> list[Any]:
        n = sum(self.carry.is_dynamic)
        before = unflatten(self.carry_def, self.carry.fill(values[:n]))
        out = self.body(before, unflatten(self.x_def, self.xs.fill(values[n:])))
        after, y = _checked(out, before, self.paths)
        y_leaves, self.y_def = flatten(y)
        self.ys = Slots.of(y_leaves)
        return [*self.carry.dynamic(after), *self.ys.dynamic(y_leaves)]


@dataclass(eq=False)
class _CallBody:
    """A function on flat lists of tensors; knows the form of its results once it has run."""

    fn: Callable[..., Any]
    arguments: Slots
    treedef: Any
    results: Slots = field(default_factory=Slots)
    out_def: Any = None

    def __call__(self, *values: Any) -> list[Any]:
        args, kwargs = unflatten(self.treedef, self.arguments.fill(values))
        leaves, self.out_def = flatten(self.fn(*args, **kwargs))
        self.results = Slots.of(leaves)
        return self.results.dynamic(leaves)


def _record(body: Callable[..., list[Any]], form: Form, operands: list[Any]) -> list[Tensor]:
    """Trace a body and record it in the trace under way. What it closes over becomes its first operands (constants of
    a scan, arguments of a call), and so do the numbers of the step, which it may compute with."""
    outer = current_trace()
    assert outer is not None
    numbers, avals = outer.numbers, operand_avals(form, operands)
    names = [f"number_{i}" for i in range(len(numbers))]
    names += [f"carry_{i}" if i < form.num_carry else f"x_{i - form.num_carry}" for i in range(len(avals))]
    around = Ambient.of(operands)

    def first(*values: Any) -> list[Any]:
        given = values[len(numbers) :]
        with around.around(given):
            return body(*given)

    with outside_transforms() as levels:
        traced, _ = Trace(outer.fn_name, outer.decompositions, outer, len(levels)).run(first, [*numbers, *avals], names)
    closures, given = traced.captured, len(numbers) + len(avals)
    outside = [*map(outer.bring, closures), *numbers]
    graph = traced.graph
    if form.length is not None:
        form = replace(form, num_consts=len(outside))
    if form.staged is not None:
        form = replace(form, staged=form.staged.closing_over([*closures, *numbers]))
    sub_program = Loop(
        _closed(body, closures, len(outside), autocast_state(), Ambient.of([*outside, *operands])),
        form,
        replace(graph, inputs=(*graph.inputs[given:], *graph.inputs[:given])),
        (*map(aval_of, outside), *avals),
        len(graph.outputs),
    )
    return sub_program([*outside, *operands])


def _closed(
    body: Callable[..., list[Any]], closures: Sequence[Any], num_outside: int, ambient: AutocastState, around: Ambient
) -> Callable[..., list[Any]]:
    """The body as a function of what it closes over too. It runs again for each derivative, in a trace of its own."""

    def fn(*operands: Any) -> list[Any]:
        trace = current_trace()
        assert trace is not None
        given = dict(zip(map(id, closures), operands))
        with trace.substituting(given), autocast(ambient), around.around(operands):
            return [trace.bring(x) for x in body(*operands[num_outside:])]

    return fn


# ---- forms


def _length(xs: Any, length: int | None) -> int:
    """The number of iterations."""
    paths, leaves, _ = flatten_with_paths(xs)
    extents: dict[str, int | None] = {p: x.shape[0] if x.ndim else None for p, x in zip(paths, leaves) if _is_array(x)}
    if length is not None:
        extents["length="] = length
    if len(set(extents.values())) != 1 or None in extents.values():
        raise ValueError(errors.scan_extents(extents))
    n = next(iter(extents.values())) or 0
    if n == 0:
        raise ValueError(errors.empty_scan())
    return n


def _checked(out: Any, before: Any, paths: Sequence[str]) -> tuple[list[Any], Any]:
    """Leaves of the new carry, and y. Raises when the body does not return a carry of the form it got."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(errors.scan_result("tensor" if isinstance(out, Tensor) else type(out).__name__))
    old, new = flatten(before), flatten(out[0])
    if old[1] != new[1]:
        raise ValueError(errors.carry_tree(old[1], new[1]))
    for path, a, b in zip(paths, old[0], new[0]):
        arrays = _is_array(a), _is_array(b)
        if arrays[0] != arrays[1] or ((a.shape, a.dtype) != (b.shape, b.dtype) if all(arrays) else a != b):
            raise ValueError(errors.carry_leaf(path, _kind(a), _kind(b)))
    return [carried(path, a, b) for path, a, b in zip(paths, old[0], new[0])], out[1]


def _kind(x: Any) -> str:
    return f"{dtype_text(x.dtype)}{list(x.shape)}" if _is_array(x) else repr(x)


def _is_array(x: Any) -> bool:
    """Whether x is a tensor, or an Array."""
    return isinstance(x, (Tensor, Array))


def _run(body: Callable[[Any, Any], Any], carry: Any, xs: Any, length: int, reverse: bool) -> tuple[Any, Any]:
    """The loop in plain Python."""
    paths, rows = flatten_with_paths(carry)[0], []
    for i in reversed(range(length)) if reverse else range(length):
        x = map_leaves(lambda leaf, i=i: leaf[i] if _is_array(leaf) else leaf, xs)
        out = body(carry, x)
        _, y = _checked(out, carry, paths)
        carry, row = out[0], flatten(y)
        rows.append(row)
    if reverse:
        rows.reverse()
    columns = zip(*(leaves for leaves, _ in rows))
    return carry, unflatten(rows[0][1], [torch.stack(c) if _is_array(c[0]) else c[0] for c in columns])
