"""`verify` finds the equation at which a program goes wrong: right programs pass, planted faults are located."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpt import MEGATRON, Sizes, make_step, on_mesh

import vescale_fn as vf
from vescale_fn.program import AxisIndex, Program
from vescale_fn.sharding.comm import AllGather, AllReduce, ReduceScatter
from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import form
from vescale_fn.tree import flatten
from vescale_fn.verify import verify

aten = torch.ops.aten


@pytest.fixture(scope="module")
def lowered() -> tuple[vf.Lowered, list[Any]]:
    """A sequence-parallel train step on dp x tp, and its inputs: it has every kind of collective but a permute."""
    s = Sizes(layers=1)
    args = on_mesh(s, vf.make_mesh(dp=2, tp=2), MEGATRON, "b/dp s")
    step = vf.pjit(make_step(s, between=lambda h: vf.reshard(h, "b/dp s/tp d")))
    return step.lower(*args), [a.full() for a in flatten(args)[0]]


def test_a_right_program_passes(lowered: tuple[vf.Lowered, list[Any]]) -> None:
    low, inputs = lowered
    found = verify(low.program, low.plan.graph, inputs)
    assert found, str(found)
    assert str(found) == f"all {len(low.program.graph.eqns)} equations equal the plain function"


# ---- faults: what they strike, and what it becomes


def flip(x: torch.Tensor, index: int) -> torch.Tensor:
    """x, with the lowest bit of its first element flipped on the last rank of the axis."""
    if index == 1 and x.numel():
        x = x.clone()
        x.view(-1).view(torch.int32)[0] ^= 1
    return x.clone()


def negate_largest(x: torch.Tensor, index: int) -> torch.Tensor:
    """x, with the sign of its largest element flipped on the last rank of the axis."""
    x = x.clone()
    if index == 1 and x.numel():
        x.view(-1)[x.abs().argmax()] *= -1
    return x


def operation(op: Any, *arguments: Any) -> Callable[[Eqn], Eqn]:
    """The equation with another operation on its first operand."""
    return lambda e: replace(e, op=op, args=(e.operands[0], *arguments), kwargs={})


def tiled(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    return torch.cat([x] * n, dim)


def is_op(op: Any) -> Callable[[Eqn], bool]:
    return lambda e: e.op is op


def is_comm(kind: type) -> Callable[[Eqn], bool]:
    return lambda e: isinstance(e.op, kind) and len(e.operands) == 1


def swapped(e: Eqn) -> Eqn:
    return replace(e, args=(e.args[1], e.args[0], *e.args[2:]))


FAULTS: dict[str, tuple[Callable[[Eqn], bool], Callable[[Eqn], Eqn]]] = {
    "reduction left out": (is_comm(AllReduce), operation(aten.clone.default)),
    "sum became max": (
        lambda e: isinstance(e.op, AllReduce) and e.op.kind == "sum",
        lambda e: replace(e, op=replace(e.op, kind="max")),
    ),
    "reduction over the wrong axis": (
        lambda e: isinstance(e.op, AllReduce) and e.op.axes == ("tp",),
        lambda e: replace(e, op=replace(e.op, axes=("dp",))),
    ),
    "own part in the place of a gather": (is_comm(AllGather), lambda e: operation(tiled, e.op.dim, 2)(e)),
    "scatter without a sum": (
        is_comm(ReduceScatter),
        lambda e: operation(aten.slice.Tensor, e.op.dim, 0, e.outs[0].shape[e.op.dim] // 2)(e),
    ),
    "gelu became relu": (is_op(aten.gelu.default), operation(aten.relu.default)),
    "sum became difference": (is_op(aten.add.Tensor), lambda e: replace(e, op=aten.sub.Tensor)),
    "causal mask lost": (
        is_op(aten._scaled_dot_product_flash_attention_for_cpu.default),
        lambda e: replace(e, args=(*e.args[:4], False)),
    ),
    "wrong epsilon": (
        is_op(aten.native_layer_norm.default),
        lambda e: replace(e, args=(*e.args[:4], 0.5)),
    ),
    "bit flipped on one replica": (
        lambda e: isinstance(e.op, AllReduce) and e.op.axes == ("tp",) and e.outs[0].dtype is torch.float32,
        lambda e: e,  # see `struck`
    ),
    "sign flipped on one rank": (is_op(aten.mm.default), lambda e: e),
}
STRUCK = {"bit flipped on one replica": flip, "sign flipped on one rank": negate_largest}


def planted(program: Program, fault: str, which: int) -> tuple[Program, str]:
    """A program with one fault, and the value that is wrong."""
    strikes, change = FAULTS[fault]
    sites = [i for i, e in enumerate(program.graph.eqns) if strikes(e)]
    i = sites[which * (len(sites) - 1)]  # the first or the last
    eqns: Sequence[Eqn] = program.graph.eqns
    if fault in STRUCK:
        return _with_struck_result(program, i, STRUCK[fault])
    eqns = [*eqns[:i], change(eqns[i]), *eqns[i + 1 :]]
    return replace(program, graph=replace(program.graph, eqns=tuple(eqns))), eqns[i].outs[0].name


def _with_struck_result(program: Program, i: int, strike: Callable[..., Any]) -> tuple[Program, str]:
    """The result of equation i passes through `strike`; whoever read it reads what comes out."""
    e = program.graph.eqns[i]
    out = e.outs[0]
    raw = replace(out, name=f"{out.name}_raw")
    layouts = {**program.layouts, raw: program.layouts[out]}
    made = replace(e, outs=(raw, *e.outs[1:]))
    hit = Eqn(strike, (raw, AxisIndex(("tp",))), {}, (out,), e.source, e.phase)
    eqns = (*program.graph.eqns[:i], made, hit, *program.graph.eqns[i + 1 :])
    return replace(program, graph=replace(program.graph, eqns=eqns), layouts=layouts), out.name


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_located(lowered: tuple[vf.Lowered, list[Any]], fault: str, which: int) -> None:
    low, inputs = lowered
    program, wrong = planted(low.program, fault, which)
    found = verify(program, low.plan.graph, inputs)
    assert not found
    assert found.difference is not None
    assert found.difference.value == wrong, str(found)
    assert found.difference.source.line > 0


def lose_to_zero(x: torch.Tensor, index: int) -> torch.Tensor:
    """Zeros on the last rank of the axis."""
    return torch.zeros_like(x) if index == 1 else x.clone()


def test_nan_on_one_replica_and_zero_on_another_is_located() -> None:
    x = vf.device_put(torch.full((3,), float("nan")), "d", vf.make_mesh(tp=2))
    low = vf.pjit(lambda x: x * 2).lower(x)
    program, wrong = _with_struck_result(low.program, 0, lose_to_zero)
    found = verify(program, low.plan.graph, [x.full()])
    assert found.difference is not None
    assert (found.difference.value, found.difference.ranks) == (wrong, "rank 1, which should hold what rank 0 holds")


def test_wrong_rule_is_located() -> None:
    """A rule that forgets that softmax needs its dim whole."""
    mesh = vf.make_mesh(tp=2)
    x = vf.device_put(torch.randn(4, 6), "b d/tp", mesh)
    forgetful = {aten._softmax.default: form("b d -> b d")}
    low = vf.pjit(lambda x: torch.softmax(x * 2, -1), rules=forgetful).lower(x)
    found = verify(low.program, low.plan.graph, [x.full()])
    assert found.difference is not None
    assert found.difference.operation == "aten._softmax"


def test_message() -> None:
    mesh = vf.make_mesh(tp=2)
    x = vf.device_put(torch.ones(4, 6), "b d/tp", mesh)
    low = vf.pjit(lambda x: x.sum(1)).lower(x)
    (i,) = [i for i, e in enumerate(low.program.graph.eqns) if isinstance(e.op, AllReduce)]
    e = low.program.graph.eqns[i]
    eqns = (*low.program.graph.eqns[:i], operation(aten.clone.default)(e), *low.program.graph.eqns[i + 1 :])
    program = replace(low.program, graph=replace(low.program.graph, eqns=eqns))
    text = str(verify(program, low.plan.graph, [x.full()]))
    assert text.startswith("sum_ar = aten.clone(...) differs from the plain function by 3 on ranks 0, 1, layout 'a' (")
