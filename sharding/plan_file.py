"""Plans as files: written and read as JSON, and compared.

A file names no objects: layouts stand in the order in which the graph lists its values and equations, and the hash of
the graph's structure says whether file and graph belong together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vescale_fn.sharding.graph import Call, Graph, Scan, Var, equations, op_name, type_text, variables
from vescale_fn.sharding.layout import Layout, Manual, Partial, Ragged, Shard, State, Whole
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.plan import Plan

VERSION = 1
_STATES: dict[str, Callable[..., State]] = {
    "whole": Whole,
    "partial": Partial,
    "shard": Shard,
    "ragged": Ragged,
    "manual": Manual,
}
_NAMES: dict[Any, str] = {kind: name for name, kind in _STATES.items()}


class PlanFileError(ValueError):
    """A file holds no plan for the graph at hand."""


def dump(plan: Plan) -> str:
    """The plan as JSON. What explains it (`choices`) is left out."""
    table: dict[tuple[Any, ...], int] = {}

    def entry(layout: Layout | None) -> int | None:
        if layout is None:
            return None
        key = (layout.shape, tuple((_NAMES[type(s)], tuple(asdict(s).items())) for s in layout.states))
        return table.setdefault(key, len(table))

    eqns = list(equations(plan.graph))
    body = {
        "version": VERSION,
        "graph": graph_hash(plan.graph),
        "mesh": [list(plan.mesh.names), list(plan.mesh.sizes)],
        "values": [entry(plan.values.get(v)) for v in variables(plan.graph)],
        "operands": [[entry(x) for x in plan.operands[e]] for e in eqns],
        "outputs": [entry(x) for x in plan.outputs],
        "letters": [dict(plan.letters.get(e, {})) for e in eqns],
        "roles": [plan.roles.get(v) for v in plan.graph.inputs],
        "messages": list(plan.messages),
    }
    body["layouts"] = [[list(shape), [[name, dict(fields)] for name, fields in states]] for shape, states in table]
    return json.dumps(body, separators=(",", ":"))


def load(text: str, graph: Graph) -> Plan:
    """The plan of `graph` that `dump` wrote. Raises PlanFileError if it is of another graph or version."""
    body = json.loads(text)
    if body.get("version") != VERSION:
        raise PlanFileError(f"The plan has version {body.get('version')}; this release reads version {VERSION}.")
    if body["graph"] != graph_hash(graph):
        raise PlanFileError(
            "The plan is of another graph: the step, its shapes or its dtypes have changed. Solve again."
        )
    mesh = MeshShape(tuple(body["mesh"][0]), tuple(body["mesh"][1]))
    layouts = [Layout(mesh, tuple(shape), tuple(_state(*s) for s in states)) for shape, states in body["layouts"]]

    def at(i: int | None) -> Layout | None:
        return None if i is None else layouts[i]

    eqns = list(equations(graph))
    return Plan(
        mesh,
        graph,
        {v: x for v, i in zip(variables(graph), body["values"]) if (x := at(i)) is not None},
        {e: tuple(layouts[i] for i in row) for e, row in zip(eqns, body["operands"])},
        tuple(map(at, body["outputs"])),
        dict(zip(eqns, body["letters"])),
        tuple(body["messages"]),
        roles={v: r for v, r in zip(graph.inputs, body["roles"]) if r is not None},
    )


def _state(name: str, fields: dict[str, Any]) -> State:
    return _STATES[name](**{k: tuple(x) if isinstance(x, list) else x for k, x in fields.items()})


def diff(old: Plan, new: Plan) -> str:
    """The values whose layouts differ, one a line; values are paired by name."""
    before = {v.name: plan_layout for v, plan_layout in old.values.items()}
    after = {v.name: plan_layout for v, plan_layout in new.values.items()}
    lines = [f"- {n}: {x}" for n, x in before.items() if n not in after]
    lines += [f"+ {n}: {x}" for n, x in after.items() if n not in before]
    lines += [f"~ {n}: {x} -> {after[n]}" for n, x in before.items() if n in after and str(after[n]) != str(x)]
    return "\n".join(lines)


def graph_hash(graph: Graph) -> str:
    """A hash of the structure of a graph: operations, arguments, shapes and dtypes, but no names or source lines."""
    number: dict[Var, int] = {}
    digest = hashlib.sha256()

    def text(tree: Any) -> str:
        if isinstance(tree, Var):
            return f"%{number[tree]}"
        if isinstance(tree, (tuple, list)):
            return f"[{','.join(map(text, tree))}]"
        if isinstance(tree, dict):
            return f"{{{','.join(f'{k}:{text(x)}' for k, x in tree.items())}}}"
        return repr(tree)

    def define(variables: tuple[Var, ...]) -> str:
        for v in variables:
            number[v] = len(number)
        return ",".join(map(type_text, variables))

    def visit(g: Graph) -> None:
        digest.update(f"({define(g.inputs)}".encode())
        for e in g.eqns:
            if isinstance(e.op, (Scan, Call)):
                visit(e.op.body)
                kind: Any = {k: x for k, x in vars(e.op).items() if k != "body"}
            else:
                kind = op_name(e.op)
            digest.update(f"{kind}{text(e.args)}{text(e.kwargs)}->{define(e.outs)};".encode())
        digest.update(f"{text(g.outputs)})".encode())

    visit(graph)
    return digest.hexdigest()
