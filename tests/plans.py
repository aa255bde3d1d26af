"""Graphs and plans for the tests of the solver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.func import grad

from vescale_fn.sharding.graph import Eqn, Graph, Scan, Source, Var
from vescale_fn.sharding.layout import WHOLE, Layout, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.solve import solve
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval

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


def mlp_step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    """Loss gradient and a step of gradient descent."""

    def loss(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return ((x @ up).relu() @ down).square().sum()

    gu, gd = grad(loss, argnums=(0, 1))(up, down)
    return up - 0.1 * gu, down - 0.1 * gd


MLP = ((32, 8), (8, 16), (16, 8))


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
