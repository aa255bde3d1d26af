"""The solver: optimal within intent, deterministic, and the plans that textbooks give."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, combinations, product
from math import inf, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

import vescale_fn.sharding.solve as solve_module
from vescale_fn.sharding.choice import AxisProblem
from vescale_fn.sharding.classes import classes_of, each_alone
from vescale_fn.sharding.digits import exists
from vescale_fn.sharding.exact import NoSolution, solve_exact
from vescale_fn.sharding.explain import explain, find
from vescale_fn.sharding.fallback import solve_locally
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Source, Var
from vescale_fn.sharding.layout import WHOLE, Layout, Partial, Shard, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.plan_file import PlanFileError, diff, dump, equations, graph_hash, load, variables
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.solve import solve
from vescale_fn.trace import Aval, trace_flat

aten = torch.ops.aten
CONSTRAINT = object()  # stands for the operation whose only meaning is a layout
DP = MeshShape(("dp",), (2,))
TP = MeshShape(("tp",), (4,))
DP_TP = MeshShape(("dp", "tp"), (2, 4))

States = Mapping[str, State]

# --- graphs by hand ---------------------------------------------------------------------------------------------------


class Builder:
    """Builds a graph one equation at a time; every value is f32."""

    def __init__(self) -> None:
        self.inputs: list[Var] = []
        self.eqns: list[Eqn] = []

    def input(self, *shape: int, name: str = "") -> Var:
        self.inputs.append(Var(name or f"in{len(self.inputs)}", shape, torch.float32))
        return self.inputs[-1]

    def op(self, op: Any, *args: Any, shape: Sequence[int], **kwargs: Any) -> Var:
        out = Var(f"v{len(self.eqns)}", tuple(shape), torch.float32)
        self.eqns.append(Eqn(op, args, kwargs, (out,), Source("step.py", len(self.eqns) + 1)))
        return out

    def ops(self, op: Any, *args: Any, shapes: Sequence[Sequence[int]]) -> tuple[Var, ...]:
        outs = tuple(Var(f"v{len(self.eqns)}_{i}", tuple(s), torch.float32) for i, s in enumerate(shapes))
        self.eqns.append(Eqn(op, args, {}, outs))
        return outs

    def mm(self, a: Var, b: Var) -> Var:
        return self.op(aten.mm.default, a, b, shape=(a.shape[0], b.shape[1]))

    def add(self, a: Var, b: Var) -> Var:
        return self.op(aten.add.Tensor, a, b, shape=a.shape)

    def mul(self, a: Var, b: Var) -> Var:
        return self.op(aten.mul.Tensor, a, b, shape=a.shape)

    def relu(self, a: Var) -> Var:
        return self.op(aten.relu.default, a, shape=a.shape)

    def t(self, a: Var) -> Var:
        return self.op(aten.t.default, a, shape=a.shape[::-1])

    def graph(self, *outputs: Any) -> Graph:
        return Graph(tuple(self.inputs), tuple(self.eqns), outputs)


def plan_of(
    graph: Graph,
    mesh: MeshShape,
    inputs: Mapping[Var | int, States],
    *,
    outputs: Mapping[int, States] | None = None,
    data: Iterable[int] = (),
    constraints: Mapping[Eqn, States] | None = None,
    continues: Mapping[int, int] | None = None,
    free: Iterable[int] = (),
) -> Plan:
    """Solve; inputs that are not named are whole, unless `free`. `data`, `free`, `continues`: indices of inputs."""
    given = {v: inputs.get(i, {}) for i, v in enumerate(graph.inputs) if i not in set(free)}
    return solve(
        graph,
        mesh,
        inputs={v: Layout.of(mesh, v.shape, s) for v, s in given.items()},
        outputs=[
            Layout.of(mesh, v.shape, outputs[i]) if outputs and i in outputs else None
            for i, v in enumerate(graph.outputs)
        ],
        roles={v: "data" if i in set(data) else "state" for i, v in enumerate(graph.inputs)},
        constraints={e: Layout.of(mesh, e.outs[0].shape, s) for e, s in (constraints or {}).items()},
        rule_for=lambda e: None if e.op is CONSTRAINT else rule_for(e),
        continues={o: graph.inputs[i] for o, i in (continues or {}).items()},
    )


def traced(fn: Callable[..., Any], *shapes: Sequence[int]) -> Graph:
    """The graph of a function of f32 tensors, called a, b, c, ..."""
    avals = [Aval(tuple(s), torch.float32) for s in shapes]
    return trace_flat(lambda *a: list(fn(*a)), avals, names="abcdefghij"[: len(shapes)]).graph


def conversions(plan: Plan) -> list[tuple[str, str, Var, State, State]]:
    """(axis, phase of the equation that makes the value, value, from, to), cuts of whole values left out."""
    found = []
    for problem, choice in plan.choices:
        for v, (node, _) in problem.problem.makers.items():
            phase = node.eqn.phase if node.eqn else "input"
            found += [(problem.axis, phase, v, src, dst) for src, dst in problem.conversions(choice, v) if src != WHOLE]
    return found


def summary(plan: Plan) -> Counter[str]:
    """How often each conversion occurs: `dp: partial sum -> whole [8, 4]`."""
    return Counter(f"{axis}: {src} -> {dst} {list(v.shape)}" for axis, _, v, src, dst in conversions(plan))


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


@settings(max_examples=80, deadline=None)
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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=20, deadline=None)
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


@settings(max_examples=60, deadline=None)
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


def mlp_step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    """Loss gradient and a step of gradient descent."""

    def loss(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return ((x @ up).relu() @ down).square().sum()

    gu, gd = grad(loss, argnums=(0, 1))(up, down)
    return up - 0.1 * gu, down - 0.1 * gd


MLP = ((32, 8), (8, 16), (16, 8))


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


def accumulation(zeros: bool = True) -> tuple[Graph, Eqn]:
    """A loop over microbatches that adds up a gradient: sum of x.T @ y over slices x, y."""
    inner = Builder()
    acc, x, y = inner.input(8, 16, name="acc"), inner.input(32, 8, name="x"), inner.input(32, 16, name="y")
    body = inner.graph(inner.add(acc, inner.mm(inner.t(x), y)))
    outer = Builder()
    xs, ys = outer.input(5, 32, 8, name="xs"), outer.input(5, 32, 16, name="ys")
    start = outer.op(aten.full.default, [8, 16], 0 if zeros else 1, shape=(8, 16))
    total = outer.op(Scan(body, 0, 1, 5), start, xs, ys, shape=(8, 16))
    return outer.graph(outer.relu(total)), outer.eqns[1]


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
    y = b.op(aten.histc.default, x, shape=(8, 8))
    plan = plan_of(b.graph(b.mm(y, w)), TP, {0: {"tp": Shard(0)}})
    assert plan.values[y]["tp"] == WHOLE
    assert plan.messages == (
        "in0 is gathered along tp: aten.histc at step.py:1 has no rule.",
        "aten.histc at step.py:1 has no rule: every rank does all of it. State one with "
        'vescale_fn.register_rule(op, "b !d -> b !d").',
    )
