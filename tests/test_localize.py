"""Every sharding that a rule admits, through the product: partition rewrites the equation, the virtual engine runs it.

The samples, the cases and what is right are those of the rule machine.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_samples import FROM_SCHEMA, SAMPLES, Sample
from rule_machine import Case, check, equation, is_pending, kind_of

from vescale_fn.engines.virtual import VirtualEngine
from vescale_fn.partition import partition
from vescale_fn.sharding.graph import Eqn, Graph, Var
from vescale_fn.sharding.layout import Layout, Partial, Shard, State
from vescale_fn.sharding.mesh import Mesh, MeshShape
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.rules.rule import Dims, Rule


def by_product(eqn: Eqn, rule: Rule, case: Case, held: list[list[torch.Tensor]]) -> list[list[Any]]:
    """The equation as a step of its own, partitioned for the layouts of the case."""
    mesh = MeshShape(tuple(f"m{i}" for i in range(len(case.sizes))), case.sizes)
    inputs = tuple(Var(f"x{i}", v.shape, v.dtype) for i, v in enumerate(eqn.operands))
    outs = tuple(Var(f"y{i}", v.shape, v.dtype) for i, v in enumerate(eqn.outs))
    names = iter(inputs)
    local = eqn.with_args(lambda v: next(names), outs)
    ins = tuple(_layout(mesh, rule, case, v, dims, slot) for slot, (v, dims) in enumerate(zip(inputs, rule.operands)))
    made = {v: _layout(mesh, rule, case, v, dims) for v, dims in zip(outs, rule.results) if v.is_tensor}
    letters = {a: c.letter for a, c in zip(mesh.names, case.choices) if c.letter}
    plan = Plan(
        mesh,
        Graph(inputs, (local,), tuple(made)),
        values={**dict(zip(inputs, ins)), **made},
        operands={local: ins},
        outputs=tuple(made.values()),
        letters={local: letters},
    )
    results = VirtualEngine(Mesh(mesh)).load(partition(plan))([list(h) for h in held])
    return [[dict(zip(made, r)).get(v) for v in outs] for r in results]


def _layout(mesh: MeshShape, rule: Rule, case: Case, v: Var, dims: Dims, slot: int | None = None) -> Layout:
    """The layout of an operand (`slot`) or a result under a case."""
    states: dict[str, State] = {}
    for axis, (name, choice) in enumerate(zip(mesh.names, case.choices)):
        where = [(d, letters.index(choice.letter)) for d, letters in enumerate(dims) if choice.letter in letters]
        if where:
            dim, at = where[0]
            major = math.prod(rule.sizes[x] for x in dims[dim][:at])
            outer = math.prod(case.sizes[i] for i in case.axes_of(choice.letter) if i < axis)
            size, ranks = rule.sizes[choice.letter], math.prod(case.sizes[i] for i in case.axes_of(choice.letter))
            states[name] = Shard(dim, major * outer, uneven=size if size % ranks else 0)
        elif slot in choice.partial or (slot is None and is_pending(rule, choice, dims)):
            states[name] = Partial(kind_of(rule, choice))
    return Layout.of(mesh, v.shape, states)


ALL = [*SAMPLES, *(sample for sample in FROM_SCHEMA if sample is not None)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sample", ALL, ids=str)
def test_every_sharding_a_rule_admits_runs_as_a_program(sample: Sample) -> None:
    rule = rule_for(equation(sample))
    assert rule is not None
    check(sample, rule, by_product, meshes=[(3,), (2, 2)])
