"""Plans in words and in files."""

from __future__ import annotations

import pytest
from plans import DP, TP, Builder, accumulation, aten, plan_of

from vescale_fn.sharding.explain import explain, find
from vescale_fn.sharding.layout import WHOLE, Shard
from vescale_fn.sharding.plan_file import PlanFileError, diff, dump, equations, graph_hash, load

# --- words and files --------------------------------------------------------------------------------------------------


def test_explain_says_why_what_it_costs_and_the_runner_up() -> None:
    b = Builder()
    x, up, down = b.input(32, 8, name="x"), b.input(8, 16, name="params_up"), b.input(16, 8, name="params_down")
    hidden = b.mm(x, up)
    y = b.mm(b.relu(hidden), down)
    plan = plan_of(b.graph(b.relu(y)), TP, {1: {"tp": Shard(1)}, 2: {"tp": Shard(0)}})
    assert explain(plan, "params.up") == (
        "params_up: f32[8, 16], tp shard 1\n  tp: shard 1: the layout it comes in\n  tp:   no other layout was possible"
    )
    lines = explain(plan, y).splitlines()
    assert lines[0] == "v2: f32[32, 8], tp partial sum"
    assert lines[1] == "  tp: partial sum: aten.mm at step.py:3 runs as shard 1, shard 0 -> partial sum"
    assert lines[2].startswith("  tp:   partial sum -> whole for aten.relu at step.py:4 (")
    assert lines[3].startswith("  tp:   runner-up: whole, ")
    assert "params_up: f32[8, 16], tp shard 1" in str(plan)


def test_find_names_what_is_close() -> None:
    b = Builder()
    b.input(2, name="state_w"), b.input(2, name="grads_w")
    plan = plan_of(b.graph(b.relu(b.inputs[0])), DP, {})
    assert find(plan, "state.w") is b.inputs[0]
    with pytest.raises(KeyError, match=r"Several values match 'w'. There are: state_w, grads_w."):
        find(plan, "w")
    with pytest.raises(KeyError, match=r"No value is called 'z'. There are: state_w, grads_w."):
        find(plan, "z")


def test_a_plan_survives_its_file() -> None:
    graph, _ = accumulation()
    plan = plan_of(graph, DP, {0: {"dp": Shard(1)}, 1: {"dp": Shard(1)}}, data=[0, 1])
    again = load(dump(plan), graph)
    assert (again.values, again.operands, again.outputs) == (plan.values, plan.operands, plan.outputs)
    assert (again.letters, again.messages, again.roles) == (
        {e: dict(plan.letters.get(e, {})) for e in equations(graph)},
        plan.messages,
        plan.roles,
    )
    assert dump(again) == dump(plan)
    other, _ = accumulation()
    assert graph_hash(other) == graph_hash(graph)
    assert load(dump(plan), other).outputs == plan.outputs
    changed, _ = accumulation(zeros=False)
    with pytest.raises(PlanFileError, match="another graph"):
        load(dump(plan), changed)


def test_diff_lists_what_changed() -> None:
    b = Builder()
    x = b.input(8, 8)
    graph = b.graph(b.relu(x))
    before, after = (plan_of(graph, TP, {0: {"tp": s}}) for s in (Shard(0), Shard(1)))
    assert diff(before, before) == ""
    assert diff(before, after).splitlines() == [
        "~ in0: [8, 8] {tp: shard 0} -> [8, 8] {tp: shard 1}",
        "~ v0: [8, 8] {tp: shard 0} -> [8, 8] {tp: shard 1}",
    ]


def test_operations_without_a_rule_are_reported() -> None:
    b = Builder()
    x, w = b.input(8, 8), b.input(8, 8)
    y = b.op(aten.matrix_exp.default, x, shape=(8, 8))
    plan = plan_of(b.graph(b.mm(y, w)), TP, {0: {"tp": Shard(0)}})
    assert plan.values[y]["tp"] == WHOLE
    assert plan.messages == (
        "in0 is gathered along tp: aten.matrix_exp at step.py:1 has no rule.",
        "aten.matrix_exp at step.py:1 has no rule: every rank does all of it. State one with "
        'vescale_fn.register_rule(op, "b !d -> b !d").',
    )
