"""The solver: optimal within intent, deterministic, and the plans that textbooks give."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import chain, combinations, product
from math import inf, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import CONSTRAINT, DP, DP_TP, MLP, TP, Builder, States, aten, conversions, mlp_step, plan_of, summary, traced
from torch.func import grad

import vescale_fn.sharding.solve as solve_module
from vescale_fn.sharding.choice import AxisProblem
from vescale_fn.sharding.classes import classes_of, each_alone
from vescale_fn.sharding.digits import exists
from vescale_fn.sharding.exact import NoSolution, solve_exact
from vescale_fn.sharding.fallback import solve_locally
from vescale_fn.sharding.graph import Graph, Var
from vescale_fn.sharding.layout import WHOLE, Layout, Shard, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.plan_file import dump

# --- the optimum ------------------------------------------------------------------------------------------------------


def cheapest_conversions(problem: AxisProblem, v: Var, made: State, wanted: set[State]) -> float:
    """By trying every set of states that could be obtained from the one in which the value is made."""
    states = sorted(wanted | {WHOLE}, key=repr)
    best = inf
    for bought in chain.from_iterable(combinations(states, k) for k in range(len(states) + 1)):
        have = {made, *bought}
        if all(t in have or (isinstance(t, Shard) and WHOLE in have) for t in wanted):
            possible = all(problem.can_convert(v, made, t) for t in bought)
            best = min(best, sum(problem.seconds(v, made, t) for t in bought) if possible else inf)
    return best


def brute_force(problem: AxisProblem) -> float:
    """The least cost over all assignments of strategies."""
    nodes = list(problem.problem.nodes)
    best = inf
    for picks in product(*(range(len(problem.strategies[node])) for node in nodes)):
        choice = dict(zip(nodes, picks))
        cost = sum(problem.work[node][k] for node, k in choice.items())
        for v in problem.problem.makers:
            wanted = problem.wanted(choice, v)
            cost += cheapest_conversions(problem, v, problem.made(choice, v), wanted)
        best = min(best, cost)
    return best


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[Graph, dict[Var | int, States], frozenset[int], dict[int, States]]:
    """Random graphs of square matrices, so that every operation fits every value."""
    n = draw(st.sampled_from([4, 64, 512]))
    b = Builder()
    values = [b.input(n, n) for _ in range(draw(st.integers(1, 3)))]
    pick = st.sampled_from
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(pick(["mm", "add", "mul", "relu", "t", "zeros"]))
        if kind in ("mm", "add", "mul"):
            values.append(getattr(b, kind)(draw(pick(values)), draw(pick(values))))
        elif kind == "zeros":
            values.append(b.op(aten.full.default, [n, n], 0, shape=(n, n)))
        else:
            values.append(getattr(b, kind)(draw(pick(values))))
    states = pick([WHOLE, Shard(0), Shard(1), Shard(0, 2)])
    inputs: dict[Var | int, States] = {i: {"tp": draw(states)} for i in range(len(b.inputs))}
    data = frozenset(i for i in range(len(b.inputs)) if draw(st.booleans()))
    outs = [values[-1], draw(pick(values))]
    fixed = {i: {"tp": draw(states)} for i in range(2) if draw(st.booleans())}
    return b.graph(*outs), inputs, data, fixed


@settings(max_examples=80)
@given(small_problems())
def test_the_cost_is_the_least_of_all_choices_within_intent(
    case: tuple[Graph, dict[Var | int, States], frozenset[int], dict[int, States]],
) -> None:
    graph, inputs, data, fixed = case
    plan = plan_of(graph, MeshShape(("tp",), (2,)), inputs, data=data, outputs=fixed)
    ((problem, choice),) = plan.choices
    if prod(len(s) for s in problem.strategies.values()) > 4000:
        return
    assert problem.cost(choice) == pytest.approx(brute_force(problem), rel=1e-9, abs=2e-11)


@settings(max_examples=40)
@given(small_problems())
def test_the_fallback_finds_a_valid_choice(
    case: tuple[Graph, dict[Var | int, States], frozenset[int], dict[int, States]],
) -> None:
    graph, inputs, data, fixed = case
    plan = plan_of(graph, MeshShape(("tp",), (2,)), inputs, data=data, outputs=fixed)
    ((problem, choice),) = plan.choices
    found = problem.cost(solve_locally(problem))
    assert problem.cost(choice) <= found * (1 + 1e-9) + 2e-11
    assert found < inf


@pytest.mark.parametrize(
    ("mesh", "specs"),
    [
        (DP, [{"dp": Shard(0)}, {}, {}]),
        (TP, [{}, {"tp": Shard(1)}, {"tp": Shard(0)}]),
        (DP, [{"dp": Shard(0)}, {"dp": Shard(0)}, {"dp": Shard(0)}]),
    ],
    ids=["data parallel", "tensor parallel", "parameters sharded"],
)
def test_without_highs_the_textbook_plans_are_found_too(
    mesh: MeshShape, specs: list[States], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan() -> Plan:
        return plan_of(
            traced(mlp_step, *MLP), mesh, dict(enumerate(specs)), data=[0], outputs={0: specs[1], 1: specs[2]}
        )

    def refuse(*_: Any) -> Any:
        raise NoSolution("no time left")

    exact = summary(plan())
    monkeypatch.setattr(solve_module, "solve_exact", refuse)
    assert summary(plan()) == exact


@settings(max_examples=20)
@given(small_problems())
def test_the_plan_does_not_depend_on_the_order_in_which_objects_were_made(
    case: tuple[Graph, dict[Var | int, States], frozenset[int], dict[int, States]],
) -> None:
    graph, inputs, data, fixed = case
    mesh = MeshShape(("tp",), (2,))
    first, second = (plan_of(graph, mesh, inputs, data=data, outputs=fixed) for _ in range(2))
    assert first.values == second.values
    assert first.operands == second.operands
    assert first.outputs == second.outputs


def plan_on_two_axes() -> str:
    specs = {0: {"dp": Shard(0)}, 1: {"tp": Shard(1)}, 2: {"dp": Shard(0)}}
    return dump(plan_of(traced(mlp_step, *MLP), DP_TP, specs, data=[0]))


def test_the_plan_does_not_depend_on_the_hashes_of_strings() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from test_solve import *; print(plan_on_two_axes())"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == plan_on_two_axes()


@settings(max_examples=60)
@given(small_problems(), st.lists(st.sampled_from([WHOLE, Shard(0), Shard(1), Shard(0, 2)]), min_size=3, max_size=3))
def test_every_layout_of_a_plan_exists(
    case: tuple[Graph, dict[Var | int, States], frozenset[int], dict[int, States]], second: list[State]
) -> None:
    graph, inputs, data, _ = case
    mesh = MeshShape(("tp", "dp"), (2, 2))
    both = {i: {**inputs[i], "dp": s} for i, s in zip(range(len(graph.inputs)), second)}
    possible = {i: s for i, s in both.items() if exists(Layout.of(mesh, graph.inputs[i].shape, s))}
    plan = plan_of(graph, mesh, possible, data=data)
    layouts = [*plan.values.values(), *chain.from_iterable(plan.operands.values()), *plan.outputs]
    assert all(exists(x) for x in layouts if x is not None)


def test_nodes_that_look_alike_are_treated_alike_and_that_costs_nothing() -> None:
    b = Builder()
    x = b.input(256, 64)
    weights = [(b.input(64, 256), b.input(256, 64)) for _ in range(6)]
    for up, down in weights:
        x = b.add(x, b.mm(b.relu(b.mm(x, up)), down))
    inputs: dict[Var | int, States] = {}
    for i in range(6):
        inputs |= {1 + 2 * i: {"tp": Shard(1)}, 2 + 2 * i: {"tp": Shard(0)}}
    plan = plan_of(b.graph(x), TP, inputs)
    ((problem, _),) = plan.choices
    alone, tied = (problem.cost(solve_exact(problem, of(problem))) for of in (each_alone, classes_of))
    assert tied == pytest.approx(alone)
    assert len(set(classes_of(problem).values())) < len(problem.problem.nodes)


# --- textbook plans ---------------------------------------------------------------------------------------------------


def test_data_parallel_reduces_each_gradient_once() -> None:
    plan = plan_of(traced(mlp_step, *MLP), DP, {0: {"dp": Shard(0)}}, data=[0], outputs={0: {}, 1: {}})
    assert summary(plan) == {"dp: partial sum -> whole [8, 16]": 1, "dp: partial sum -> whole [16, 8]": 1}


def test_megatron_reduces_activations_once_forward_and_once_backward() -> None:
    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
        def loss(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            return ((x @ up).relu() @ down).square().sum()

        return grad(loss, argnums=(0, 1, 2))(x, up, down)

    specs = {1: {"tp": Shard(1)}, 2: {"tp": Shard(0)}}
    plan = plan_of(traced(step, *MLP), TP, specs, outputs={1: specs[1], 2: specs[2]})
    assert summary(plan) == {"tp: partial sum -> whole [32, 8]": 2}
    assert Counter(phase for _, phase, *_ in conversions(plan)) == {"forward": 1, "backward": 1}


def test_sharded_parameters_are_gathered_and_their_gradients_scattered() -> None:
    specs = {1: {"dp": Shard(0)}, 2: {"dp": Shard(0)}}
    plan = plan_of(
        traced(mlp_step, *MLP), DP, {0: {"dp": Shard(0)}, **specs}, data=[0], outputs={0: specs[1], 1: specs[2]}
    )
    assert summary(plan) == {
        "dp: shard 0 -> whole [8, 16]": 1,
        "dp: shard 0 -> whole [16, 8]": 1,
        "dp: partial sum -> shard 0 [8, 16]": 1,
        "dp: partial sum -> shard 0 [16, 8]": 1,
    }


def momentum_step(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> Any:
    g = grad(lambda w: (x @ w).square().sum())(w)
    m = 0.9 * m + g
    return w - 0.1 * m, m


def test_sharded_moments_scatter_gradients_and_gather_parameters() -> None:
    """ZeRO-1: from the layout of the optimizer's state alone."""
    plan = plan_of(
        traced(momentum_step, (32, 8), (8, 16), (8, 16)),
        DP,
        {0: {"dp": Shard(0)}, 2: {"dp": Shard(0)}},
        data=[0],
        outputs={0: {}, 1: {"dp": Shard(0)}},
    )
    assert summary(plan) == {"dp: partial sum -> shard 0 [8, 16]": 1, "dp: shard 0 -> whole [8, 16]": 1}


def test_a_fused_projection_stays_sharded_when_its_factor_is() -> None:
    def heads(x: torch.Tensor, w: torch.Tensor) -> Any:
        return [(y.unflatten(-1, (4, 2))).exp() for y in (x @ w).chunk(3, -1)]

    graph = traced(heads, (32, 8), (8, 24))
    strided = plan_of(graph, TP, {1: {"tp": Shard(1, pre=3)}})
    assert not conversions(strided)
    assert [x["tp"] for x in strided.outputs if x] == [Shard(1)] * 3
    assert conversions(plan_of(graph, TP, {1: {"tp": Shard(1)}}))  # contiguous: crosses q, k and v


def test_a_tied_weight_is_reduced_once() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        return [grad(lambda w: (x @ w @ w.t()).square().sum())(w)]

    plan = plan_of(traced(step, (32, 8), (8, 16)), DP, {0: {"dp": Shard(0)}}, data=[0], outputs={0: {}})
    assert sum(summary(plan).values()) == 1


def test_sequence_parallel_follows_from_a_constraint() -> None:
    b = Builder()
    x, up, down = b.input(64, 16), b.input(16, 32), b.input(32, 16)
    x = b.relu(b.op(CONSTRAINT, x, shape=x.shape))
    y = b.mm(b.relu(b.mm(x, up)), down)
    y = b.op(CONSTRAINT, b.add(x, y), shape=y.shape)
    rows = {"tp": Shard(0)}
    asked = {e: rows for e in b.eqns if e.op is CONSTRAINT}
    plan = plan_of(b.graph(b.relu(y)), TP, {0: rows, 1: {"tp": Shard(1)}, 2: {"tp": Shard(0)}}, constraints=asked)
    assert summary(plan) == {"tp: shard 0 -> whole [64, 16]": 1, "tp: partial sum -> shard 0 [64, 16]": 1}


def test_axes_are_independent() -> None:
    specs = {1: {"tp": Shard(1)}, 2: {"tp": Shard(0)}}
    plan = plan_of(
        traced(mlp_step, *MLP), DP_TP, {0: {"dp": Shard(0)}, **specs}, data=[0], outputs={0: specs[1], 1: specs[2]}
    )
    assert summary(plan) == {
        "dp: partial sum -> whole [8, 16]": 1,
        "dp: partial sum -> whole [16, 8]": 1,
        "tp: partial sum -> whole [32, 8]": 1,
    }


def test_axes_that_shard_one_dim_nest() -> None:
    b = Builder()
    x, w = b.input(16, 4), b.input(4, 4)
    plan = plan_of(b.graph(b.relu(b.mm(x, w))), DP_TP, {0: {"dp": Shard(0), "tp": Shard(0, pre=2)}})
    assert plan.outputs[0] == Layout.of(DP_TP, (16, 4), {"dp": Shard(0), "tp": Shard(0, pre=2)})
    assert not conversions(plan)


def test_two_axes_never_cut_the_same_digits() -> None:
    b = Builder()
    x, y = b.input(8, 8), b.input(8, 8)
    plan = plan_of(b.graph(b.add(x, y)), DP_TP, {0: {"dp": Shard(0)}, 1: {"tp": Shard(0)}})
    for layout in (*plan.values.values(), *chain.from_iterable(plan.operands.values())):
        assert len(layout.shards(0)) <= 1
