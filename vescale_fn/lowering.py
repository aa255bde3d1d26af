"""The flow of a step, stage by stage: trace -> solve -> partition -> optimize. Engines take it from there."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from vescale_fn import decompose
from vescale_fn.array import ArrayType
from vescale_fn.cost_report import CollectiveTable, collectives_of, cost_analysis
from vescale_fn.engines import Executable, engine_for
from vescale_fn.fused import RULES as UPDATE_RULES
from vescale_fn.memory import MemoryStats, peak_bytes
from vescale_fn.normalize import drop_dead, drop_metadata_reads
from vescale_fn.partition import partition
from vescale_fn.passes import optimize
from vescale_fn.primitives import RESHARD, constraint_layout
from vescale_fn.program import Program
from vescale_fn.register import registered_rules
from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan, Var
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh, MeshShape
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.problem import RuleFor
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.solve import solve
from vescale_fn.text import program_text
from vescale_fn.trace import Traced


@dataclass(frozen=True, eq=False)
class Request:
    """What a traced step is lowered for.

    inputs: layout of each graph input, None where the solver chooses (captured values included).
    outputs: layout that each output must have, None where the solver chooses.
    roles: "data" or "state" for each graph input.
    continues: output index -> input index whose layout it takes.
    donated: indices of inputs whose storage may be reused.
    """

    mesh: Mesh
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    roles: tuple[str, ...]
    continues: Mapping[int, int]
    donated: frozenset[int]
    rules: Mapping[Any, Any]


@dataclass(frozen=True, eq=False)
class Lowered:
    """A step as the program of one rank, before it runs.

    Attributes: `traced` (the global graph), `plan` (layouts), `program` (per-rank operations and collectives).
    """

    name: str
    traced: Traced
    request: Request
    plan: Plan
    program: Program

    def as_text(self) -> str:
        """The per-rank program, one operation a line, collectives standing out."""
        return program_text(self.program)

    @cached_property
    def collectives(self) -> CollectiveTable:
        """Every collective: kind, axes, dtype, shape, bytes, phase, source line. Prints as a table."""
        return collectives_of(self.program)

    def cost_analysis(self) -> Any:
        """Floating-point operations and bytes of one rank, and bytes sent by axis."""
        return cost_analysis(self.program)

    def memory_analysis(self) -> MemoryStats:
        """Bytes that the rank at the origin holds: arguments, outputs, temporaries, peak."""
        return peak_bytes(self.program, dict.fromkeys(self.program.mesh.names, 0))

    def explain(self, path: str) -> str:
        """Why the value at `path` has its layout, what it costs, and the runner-up."""
        from vescale_fn.sharding.explain import explain

        return explain(self.plan, path)

    def export(self, path: str | Path) -> None:
        """Write the program as one Python file that needs only torch and runs under torchrun."""
        from vescale_fn.export import export

        export(self.program, path)

    def diff(self, other: Lowered) -> str:
        """The lines in which another program's text differs, as a unified diff."""
        mine, theirs = self.as_text().splitlines(), other.as_text().splitlines()
        return "\n".join(difflib.unified_diff(mine, theirs, self.name, other.name, lineterm=""))

    def compile(self, *, deterministic: bool = False) -> Executable:
        """The program loaded into the engine of its mesh."""
        return engine_for(self.request.mesh, deterministic=deterministic).load(self.program)


def lower(name: str, traced: Traced, request: Request) -> Lowered:
    """Solve, partition and optimize a traced step."""

    extra = {**UPDATE_RULES, **registered_rules(), **request.rules}

    @cache
    def rule(e: Eqn) -> Rule | None:
        return rule_for(e, extra)

    graph = prepare(traced.graph, request, rule)
    plan = solve(
        graph,
        request.mesh.shape,
        inputs={v: x for v, x in zip(graph.inputs, request.inputs) if x is not None},
        outputs=request.outputs,
        roles=dict(zip(graph.inputs, request.roles)),
        constraints=constraints(graph, request.mesh.shape),
        rule_for=rule,
        continues={o: graph.inputs[i] for o, i in request.continues.items()},
    )
    program = replace(partition(plan, rule), donated=request.donated)
    return Lowered(name, traced, request, plan, optimize(program))


def prepare(graph: Graph, request: Request, rule: RuleFor) -> Graph:
    """The graph that the solver sees: no metadata reads, no dead code, operations split up where a layout asks for it."""
    graph = drop_dead(drop_metadata_reads(graph))
    return decompose.on_intent(graph, request, rule)


def constraints(graph: Graph, mesh: MeshShape) -> dict[Eqn, Layout]:
    """The layout that each vf.reshard in the graph, sub-programs included, asks for."""
    out: dict[Eqn, Layout] = {}
    for e in graph.eqns:
        if isinstance(e.op, (Scan, Call)):
            out |= constraints(e.op.body, mesh)
        elif e.op is RESHARD:
            out[e] = constraint_layout(e, mesh)
    return out


def output_types(program: Program, mesh: Mesh) -> list[ArrayType | None]:
    """Type of each output that is a tensor."""
    return [
        ArrayType(program.layouts[v], v.dtype, mesh) if isinstance(v, Var) and v.is_tensor else None
        for v in program.graph.outputs
    ]
