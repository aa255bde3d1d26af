"""Every sharding that a rule admits, through the product: partition rewrites the equation, the virtual engine runs it.

The samples, the cases and what is right are those of the rule machine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_layouts import layout_of
from op_samples import FROM_SCHEMA, SAMPLES, Sample
from rule_machine import Case, check, equation

from vescale_fn.engines.virtual import VirtualEngine
from vescale_fn.partition import partition
from vescale_fn.sharding.graph import Eqn, Graph, Var
from vescale_fn.sharding.mesh import Mesh, MeshShape
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.rules.rule import Rule


def by_product(eqn: Eqn, rule: Rule, case: Case, held: list[list[torch.Tensor]]) -> list[list[Any]]:
    """The equation as a step of its own, partitioned for the layouts of the case."""
    mesh = MeshShape(tuple(f"m{i}" for i in range(len(case.sizes))), case.sizes)
    inputs = tuple(Var(f"x{i}", v.shape, v.dtype) for i, v in enumerate(eqn.operands))
    outs = tuple(Var(f"y{i}", v.shape, v.dtype) for i, v in enumerate(eqn.outs))
    names = iter(inputs)
    local = eqn.with_args(lambda v: next(names), outs)
    ins = tuple(layout_of(mesh, rule, case, v, dims, slot) for slot, (v, dims) in enumerate(zip(inputs, rule.operands)))
    made = {v: layout_of(mesh, rule, case, v, dims) for v, dims in zip(outs, rule.results) if v.is_tensor}
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


ALL = [*SAMPLES, *(sample for sample in FROM_SCHEMA if sample is not None)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sample", ALL, ids=str)
def test_every_sharding_a_rule_admits_runs_as_a_program(sample: Sample) -> None:
    rule = rule_for(equation(sample))
    assert rule is not None
    check(sample, rule, by_product, meshes=[(3,), (2, 2)])
