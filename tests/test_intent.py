"""What the solver may choose from: pending reductions, what ties values together, sub-programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plans import CONSTRAINT, DP, MLP, TP, Builder, accumulation, aten, conversions, mlp_step, plan_of, summary, traced

from vescale_fn.sharding.digits import exists
from vescale_fn.sharding.graph import Call, Scan
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Shard, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.plan_file import equations, variables
from vescale_fn.sharding.solve import solve
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval

# --- partial sums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after",
    [lambda y: y + 10, lambda y: y * y, lambda y: y.clamp(min=0), lambda y: y + torch.ones_like(y)],
    ids=["plus a number", "squared", "clamped", "plus something whole"],
)
def test_what_is_not_linear_reduces_first(after: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = traced(lambda a, b: [after(a @ b)], (8, 16), (16, 8))
    plan = plan_of(graph, TP, {0: {"tp": Shard(1)}, 1: {"tp": Shard(0)}})
    assert summary(plan) == {"tp: partial sum -> whole [8, 8]": 1}
    (product_,) = [e for e in graph.eqns if e.op is aten.mm.default]
    assert plan.values[product_.outs[0]]["tp"] == Partial()
    for e in graph.eqns:
        if e is not product_:
            assert all(x["tp"] == WHOLE for x in plan.operands[e])


def test_sums_of_partial_sums_are_reduced_once() -> None:
    graph = traced(lambda a, b, c: [(a @ b + (a @ c) * 2).exp()], (8, 16), (16, 8), (16, 8))
    plan = plan_of(graph, TP, {0: {"tp": Shard(1)}, 1: {"tp": Shard(0)}, 2: {"tp": Shard(0)}})
    assert summary(plan) == {"tp: partial sum -> whole [8, 8]": 1}


def test_a_maximum_passes_through_a_view() -> None:
    graph = traced(lambda a: [a.amax(1).view(2, 4)], (8, 16))
    plan = plan_of(graph, TP, {0: {"tp": Shard(1)}})
    assert sum(summary(plan).values()) == 1
    assert str(next(iter(summary(plan)))).startswith("tp: partial max -> whole")


def test_maxima_do_not_meet_sums_that_pend_on_another_axis() -> None:
    """Found by review: look-ups pass maxima on, and make sums of their own where the rows are sharded."""
    avals = [Aval((8, 64), torch.float32), Aval((2,), torch.int64)]
    graph = trace_flat(lambda a, i: [a.amax(0)[i] * 1.0], avals, names=["a", "i"]).graph
    mesh = MeshShape(("y", "x"), (2, 2))
    plan = plan_of(graph, mesh, {0: {"x": Shard(0), "y": Shard(1)}, 1: {}})
    assert all(map(exists, plan.values.values()))
    assert all(exists(x) for layouts in plan.operands.values() for x in layouts)


def test_one_position_of_a_sharded_dim_is_summed_not_gathered() -> None:
    plan = plan_of(traced(lambda x: [x[:, 5].sin()], (8, 64)), TP, {0: {"tp": Shard(1)}})
    assert summary(plan) == {"tp: partial sum -> whole [8]": 1}


def test_an_output_is_never_left_partial() -> None:
    b = Builder()
    x, w = b.input(8, 16), b.input(16, 8)
    plan = plan_of(b.graph(b.mm(x, w)), TP, {0: {"tp": Shard(1)}, 1: {"tp": Shard(0)}})
    assert plan.outputs[0] == Layout.of(TP, (8, 8))


def test_an_output_that_was_asked_to_be_partial_is() -> None:
    b = Builder()
    x, w = b.input(8, 16), b.input(16, 8)
    specs = {0: {"tp": Shard(1)}, 1: {"tp": Shard(0)}}
    plan = plan_of(b.graph(b.mm(x, w), x), TP, specs, outputs={0: {"tp": Partial()}, 1: {"tp": Partial()}})
    assert all(x is not None and x["tp"] == Partial() for x in plan.outputs)


# --- intent -----------------------------------------------------------------------------------------------------------


def test_nothing_is_sharded_that_the_user_did_not_tie_to_anything() -> None:
    graph = traced(lambda a, b, c: [a @ b, (c @ c).exp()], (8, 8), (8, 8), (8, 8))
    plan = plan_of(graph, TP, {0: {"tp": Shard(0)}}, free=[1, 2])
    assert [x["tp"] for x in plan.outputs if x] == [Shard(0), WHOLE]
    assert plan.values[graph.inputs[2]].is_whole


def test_a_free_input_that_is_tied_takes_part() -> None:
    graph = traced(lambda a, b: [(a * b).exp()], (8, 8), (8, 8))
    plan = plan_of(graph, TP, {0: {"tp": Shard(0)}}, free=[1])
    assert plan.values[graph.inputs[1]]["tp"] == Shard(0)


def test_an_output_that_continues_a_free_input_has_its_layout() -> None:
    graph = traced(lambda a, b: [a @ b, (a @ b).exp()], (8, 8), (8, 8))
    plan = plan_of(graph, TP, {0: {"tp": Shard(0)}}, free=[1], continues={0: 1})
    assert plan.outputs[0] == plan.values[graph.inputs[1]]


def test_data_has_precedence_over_state() -> None:
    graph = traced(lambda a, b: [(a @ b).exp()], (8, 8), (8, 8))
    specs = {0: {"tp": Shard(0)}, 1: {"tp": Shard(1)}}
    rows = plan_of(graph, TP, specs, data=[0])
    columns = plan_of(graph, TP, specs, data=[1])
    assert rows.outputs[0] == Layout.of(TP, (8, 8), {"tp": Shard(0)})
    assert columns.outputs[0] == Layout.of(TP, (8, 8), {"tp": Shard(1)})


def test_a_list_operation_decides_about_each_of_its_tensors() -> None:
    from vescale_fn.sharding.rules.registry import make_rule

    b = Builder()
    ps, gs = [b.input(8, 8), b.input(8)], [b.input(8, 8), b.input(8)]
    outs = b.ops("update", ps, gs, shapes=[(8, 8), (8,)])
    first, second = (("a",), ("b",)), (("c",),)
    rule = make_rule([first, second, first, second], [first, second], {"a": 8, "b": 8, "c": 8})
    mesh, graph = TP, b.graph(*outs)
    given = {ps[0]: {"tp": Shard(1)}, ps[1]: {"tp": Shard(0)}}
    plan = solve(
        graph,
        mesh,
        inputs={v: Layout.of(mesh, v.shape, given.get(v, {})) for v in graph.inputs},
        outputs=[None, None],
        roles={},
        constraints={},
        rule_for=lambda e: rule,
        continues={},
    )
    assert [x["tp"] for x in plan.operands[b.eqns[0]]] == [Shard(1), Shard(0), Shard(1), Shard(0)]
    assert [x["tp"] for x in plan.outputs if x] == [Shard(1), Shard(0)]


def test_sizes_that_do_not_divide_stay_whole() -> None:
    b = Builder()
    x = b.input(6, 8)
    y = b.op(aten.view.default, x, [6, 2, 4], shape=(6, 2, 4))
    plan = plan_of(b.graph(y), TP, {0: {"tp": Shard(1)}})
    assert summary(plan) == {"tp: shard 1 -> whole [6, 8]": 1}
    assert plan.messages == ("in0 is gathered along tp: aten.view at step.py:1 cannot work on parts of it.",)


@pytest.mark.parametrize("spec", [Shard(0), Shard(1)])
def test_gathers_of_what_the_user_sharded_are_reported(spec: State) -> None:
    b = Builder()
    graph = b.graph(b.mm(b.input(8, 8), b.input(8, 8)))
    plan = plan_of(graph, DP, {0: {"dp": Shard(0)}, 1: {"dp": spec}}, data=[0])
    assert plan.messages == ("in1 is gathered along dp: aten.mm at step.py:1 works on parts of its other operands.",)


def test_gathers_that_the_user_asked_for_say_so() -> None:
    b = Builder()
    x, y = b.input(8, 8), b.input(8, 8)
    whole = b.op(CONSTRAINT, b.t(y), shape=(8, 8))
    plan = plan_of(
        b.graph(x, b.relu(whole)),
        DP,
        {0: {"dp": Shard(0)}, 1: {"dp": Shard(0)}},
        outputs={0: {}},
        constraints={b.eqns[1]: {}},
    )
    assert plan.messages == (
        "in0 is gathered along dp: the step returns it whole.",
        "in1 is gathered along dp: the constraint at step.py:2 asks for it whole.",
    )


def test_repeated_work_is_reported() -> None:
    b = Builder()
    bias, x, w = b.input(8), b.input(8, 8), b.input(8, 8)
    y = b.op(aten.addmm.default, bias, x, w, shape=(8, 8))
    plan = plan_of(b.graph(y), DP, {1: {"dp": Shard(1)}})
    assert plan.messages == (
        "in1 is gathered along dp: aten.addmm at step.py:1 cannot work on parts of it.",
        "Every rank along dp repeats aten.addmm at step.py:1, although in1 is sharded: the operation has no dim that "
        "could be split instead.",
    )


def test_heads_that_cannot_be_split_are_reported() -> None:
    b = Builder()
    q = b.mm(b.input(6, 8), b.input(8, 8))
    heads = b.op(aten.view.default, q, [6, 2, 4], shape=(6, 2, 4))
    scores = b.op(
        aten.bmm.default, heads, b.op(aten.permute.default, heads, [0, 2, 1], shape=(6, 4, 2)), shape=(6, 2, 2)
    )
    plan = plan_of(b.graph(scores), TP, {1: {"tp": Shard(1)}})
    assert plan.messages == (
        "Every rank along tp repeats aten.bmm at step.py:4, although v0 is sharded: the operation has no dim that "
        "could be split instead.",
    )


def test_an_axis_of_size_one_costs_nothing_and_says_nothing() -> None:
    mesh = MeshShape(("dp", "tp"), (1, 1))
    plan = plan_of(traced(mlp_step, *MLP), mesh, {0: {"dp": Shard(0)}}, data=[0])
    assert all(x.is_whole for x in plan.values.values())
    assert not plan.choices


def test_uneven_shards_pass_pointwise_operations_and_lead_their_dims() -> None:
    mesh = MeshShape(("dp",), (4,))
    b = Builder()
    x = b.input(5, 3)
    y = b.op(aten.view.default, b.relu(x), [15], shape=(15,))
    plan = plan_of(b.graph(y), mesh, {0: {"dp": Shard(0, 1, uneven=5)}})
    assert plan.outputs[0] == Layout.of(mesh, (15,), {"dp": Shard(0, 1, uneven=5)})


# --- sub-programs -----------------------------------------------------------------------------------------------------


def test_a_loop_that_starts_with_zeros_accumulates_partial_sums_and_reduces_once() -> None:
    graph, loop = accumulation()
    plan = plan_of(graph, DP, {0: {"dp": Shard(1)}, 1: {"dp": Shard(1)}}, data=[0, 1])
    assert summary(plan) == {"dp: partial sum -> whole [8, 16]": 1}
    assert [x["dp"] for x in plan.operands[loop]] == [Partial(), Shard(1), Shard(1)]
    assert [plan.values[v]["dp"] for v in loop.op.body.inputs] == [Partial(), Shard(0), Shard(0)]
    assert plan.values[loop.outs[0]]["dp"] == Partial()


def test_a_loop_that_starts_with_something_else_reduces_in_each_iteration() -> None:
    graph, loop = accumulation(zeros=False)
    plan = plan_of(graph, DP, {0: {"dp": Shard(1)}, 1: {"dp": Shard(1)}}, data=[0, 1])
    ((_, _, value, src, dst),) = conversions(plan)
    assert value in {v for e in loop.op.body.eqns for v in e.outs}
    assert (src, dst) == (Partial(), WHOLE)
    ((problem, _),) = plan.choices
    assert problem.problem.times[value] == 5


def test_stacked_results_of_a_loop_are_whole_along_the_loop() -> None:
    inner = Builder()
    w, x = inner.input(8, 8), inner.input(4, 8)
    body = inner.graph(inner.mm(x, w))
    outer = Builder()
    ws, xs = outer.input(8, 8), outer.input(6, 4, 8)
    out = outer.op(Scan(body, 1, 0, 6), ws, xs, shape=(6, 4, 8))
    plan = plan_of(outer.graph(out), TP, {0: {"tp": Shard(1)}})
    assert plan.outputs[0] == Layout.of(TP, (6, 4, 8), {"tp": Shard(2)})
    assert not conversions(plan)


def test_weights_of_a_loop_are_gathered_one_slice_at_a_time() -> None:
    inner = Builder()
    x, w = inner.input(8, 4), inner.input(4, 4)
    body = inner.graph(inner.relu(inner.mm(x, w)))
    outer = Builder()
    start, ws = outer.input(8, 4), outer.input(6, 4, 4)
    out = outer.op(Scan(body, 0, 1, 6), start, ws, shape=(8, 4))
    plan = plan_of(outer.graph(out), DP, {0: {"dp": Shard(0)}, 1: {"dp": Shard(1)}}, data=[0])
    assert [(v, src, dst) for _, _, v, src, dst in conversions(plan)] == [(w, Shard(0), WHOLE)]


def test_a_call_passes_layouts_in_and_out() -> None:
    inner = Builder()
    x, up, down = inner.input(32, 8), inner.input(8, 16), inner.input(16, 8)
    body = inner.graph(inner.mm(inner.relu(inner.mm(x, up)), down))
    outer = Builder()
    args = outer.input(32, 8), outer.input(8, 16), outer.input(16, 8)
    y = outer.op(Call(body), *args, shape=(32, 8))
    plan = plan_of(outer.graph(outer.relu(y)), TP, {1: {"tp": Shard(1)}, 2: {"tp": Shard(0)}})
    assert summary(plan) == {"tp: partial sum -> whole [32, 8]": 1}
    assert set(variables(plan.graph)) == set(plan.values)
    assert set(equations(plan.graph)) == set(plan.operands)
