"""Operations of our own. Each is one node in a trace and works under every transform of torch.func: a plain library
operation inside an autograd.Function with static forward, setup_context, jvp and vmap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_fn.regions.region import current_region
from vescale_fn.regions.texts import RegionError, manual_spec
from vescale_fn.remat import NAMED
from vescale_fn.sharding.bind import bind_sized, check_shape
from vescale_fn.sharding.cotangent import cotangent_spec
from vescale_fn.sharding.forms import SpecLike, as_spec
from vescale_fn.sharding.grammar import parse
from vescale_fn.sharding.graph import Eqn, Graph, equations
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.spec import SpecError
from vescale_fn.tracing import current_trace

_LIBRARY: Any = torch.library.Library("vescale_fn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("reshard(Tensor x, str spec) -> Tensor")
_LIBRARY.impl("reshard", lambda x, spec: x.clone(), "CompositeExplicitAutograd")

RESHARD = torch.ops.vescale_fn.reshard.default


class Reshard(torch.autograd.Function):
    """The identity, with a wish for the layout of the value; its gradient has the same wish."""

    @staticmethod
    def forward(x: Tensor, spec: str) -> Tensor:
        result: Tensor = RESHARD(x, spec)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.spec = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return constrained(grad, cotangent_spec(ctx.spec)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return constrained(tangent, ctx.spec)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], x: Tensor, spec: str) -> Any:
        return constrained(x.movedim(in_dims[0] or 0, 0), f"_ {spec}".strip()), 0


def constrained(x: Tensor, spec: str) -> Tensor:
    """x with the wish to live where the spec says, under any transform."""
    result: Tensor = Reshard.apply(x, spec)  # type: ignore[no-untyped-call]
    return result


def reshard(x: Any, spec: SpecLike, **sizes: int | Sequence[int]) -> Any:
    """`x` in the layout that `spec` says; the value does not change.

    Inside pjit a constraint on where the value lives, and on an Array a move. On a plain tensor only rank and sizes
    are checked, so a function that uses it runs without a mesh too. In a region, "b s/tp -> b s" is the one collective
    that brings the value from one layout to the other; a spec without an arrow speaks of the solver's axes.

    sizes: of factors inside groups and of named units, as in `reshard(w, "d (qkv h/tp k)", qkv=3, h=16)`.
    Raises SpecError when rank or sizes do not fit.

    >>> reshard(torch.ones(4, 6), "b/dp (h/tp k)", h=2).shape
    torch.Size([4, 6])
    >>> reshard(torch.ones(4), "b/dp d")
    Traceback (most recent call last):
    vescale_fn.sharding.spec.SpecError: vf.reshard: The spec has 2 dims, but the tensor of shape [4] has 1 dim.
      b/dp d
      ^
    """
    region = current_region()
    if region is not None and isinstance(spec, str) and "->" in spec:
        from vescale_fn.regions.collectives import reshard_by  # which constrains values too

        return reshard_by(x, spec)
    parsed, own = as_spec(spec)
    for axis in parsed.axes:
        if region is not None and axis in region.manual:
            raise RegionError(manual_spec(str(parsed), axis))
    given = {**own, **sizes}
    trace = current_trace()
    if trace is None and not isinstance(x, Tensor):
        from vescale_fn.move import move  # runs a program, whose lowering needs this module

        return move(x, parsed, **given)
    value = x if trace is None else trace.bring(x)
    try:
        check_shape(spec, tuple(value.shape), **sizes)
    except SpecError as e:
        raise e.within("vf.reshard") from None
    return value if trace is None else constrained(value, str(parsed.with_sizes(given)))


with_sharding_constraint = reshard


class Named(torch.autograd.Function):
    """The identity, with a name for a value; derivatives pass."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        result: Tensor = NAMED(x, name)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return tangent.clone()

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], x: Tensor, name: str) -> Any:
        return Named.apply(x, name), in_dims[0]  # type: ignore[no-untyped-call]


def named(x: Tensor, name: str) -> Tensor:
    """`x`, under a name that a policy of `vescale_fn.schedules.remat` can keep it by.

    >>> named(torch.ones(2), "hidden")
    tensor([1., 1.])
    """
    trace = current_trace()
    if trace is None:
        return x
    result: Tensor = Named.apply(trace.bring(x), name)  # type: ignore[no-untyped-call]
    return result


def constraints(graph: Graph, mesh: MeshShape) -> dict[Eqn, Layout]:
    """The layout that each equation of `reshard` asks for, sub-programs included."""
    return {e: constraint_layout(e, mesh) for e in equations(graph) if e.op is RESHARD}


def constraint_layout(e: Eqn, mesh: MeshShape) -> Layout:
    """The layout that an equation of `reshard` asks for. 'ct' speaks of the gradient: the value itself is whole."""
    (x,) = e.operands
    spec = parse(e.args[1])
    try:
        return bind_sized(replace(spec, state=tuple(s for s in spec.state if s.kind != "ct")), x.shape, mesh, {})
    except SpecError as error:
        raise error.within(f"vf.reshard at {e.source}: {e.source.code}") from None
