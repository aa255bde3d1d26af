"""How the package is built: layers along the flow of a step, between which imports run one way, and short modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_package import ROOT, sources

# In order: a module imports from its own layer and from those before it. A name stands for what it contains, too.
LAYERS = {
    "sharding": "sharding",
    "values": "names program errors tree mesh shardings array array_text random.errors random.forms random.philox",
    "trace": "tracing trace trace_errors trace_modes indexing ambient source functional strided effects fx_graph "
    "dead_code interpret decompositions decompositions_norm remat cast primitives debug debug_print subprogram form "
    "loop split halves stage random regions",
    "partition": "regions.lower decompose quantized orthogonal host fused register local_ops local_print localize "
    "partition",
    "optimize": "liveness nonfinite passes",
    "run": "site actions codegen engines text cost_report memory export inline inductor",
    "step": "arguments variety continuation request lowered lowering plan_cache placement loaded verify audit pjit "
    "lift move dtensor visualize regions.shard_map regions.rank_tensor",
    "library": "optim module checkpoint schedules",
}

# An Array can be moved, converted, and given to any torch function: functions of it run a step, when they are called.
CALLED_LATER = {
    ("array", "lift"),
    ("array", "move"),
    ("array", "dtensor"),
    ("primitives", "move"),
}

LONGEST = 450  # lines


# Within vescale_fn.schedules.pipelines, which uses no other part of the library.
PIPELINE = "messages table costs order faults structure transfers check drawing gantt simulate greedy generators names"
PIPELINE += " search auto schedule"


def layer_of(module: str) -> int:
    """The layer of a module, by the longest of its names that is in the table."""
    name = module.removeprefix("vescale_fn.")
    places = {n: i for i, names in enumerate(LAYERS.values()) for n in names.split()}
    while name not in places and "." in name:
        name = name.rpartition(".")[0]
    assert name in places, f"vescale_fn.{name} is in no layer: add it to the table"
    return places[name]


def imports(node: ast.AST, later: bool = False) -> Iterator[tuple[str, bool]]:
    """The modules of this package that a module imports, and whether it does so inside a function only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((a.name, later) for a in child.names if a.name.startswith("vescale_fn"))
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("vescale_fn"):
            yield from ((f"{child.module}.{a.name}", later) for a in child.names)
        yield from imports(child, later or isinstance(child, ast.FunctionDef))


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = [p for p in sources() if module_name(p) != "vescale_fn"]  # which offers what all layers have


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_run_one_way_along_the_flow_of_a_step(path: Path) -> None:
    here = module_name(path)
    for target, later in imports(ast.parse((ROOT / path).read_text())):
        there = target if (ROOT / path.parts[0] / Path(*target.split(".")[1:])).with_suffix(".py").exists() else ""
        there = there or target.rpartition(".")[0] or target
        if later and (here.removeprefix("vescale_fn."), there.removeprefix("vescale_fn.")) in CALLED_LATER:
            continue
        assert layer_of(there) <= layer_of(here), f"{here} imports {there}, which comes after it"


def test_pipeline_tables_use_nothing_but_each_other_one_way() -> None:
    folder, order = ROOT / "schedules" / "pipelines", PIPELINE.split()
    assert {p.stem for p in folder.glob("*.py")} == {*order, "__init__"}
    for at, name in enumerate(order):
        for target, _ in imports(ast.parse((folder / f"{name}.py").read_text())):
            inside = target.removeprefix("vescale_fn.schedules.pipelines.").split(".")[0]
            assert inside in order[:at], f"{name} imports {target}, which comes after it"


def test_the_tables_name_modules_that_exist() -> None:
    known = {module_name(p).removeprefix("vescale_fn.") for p in sources()} | {"sharding"}
    assert {n for names in LAYERS.values() for n in names.split()} <= known
    assert {n for pair in CALLED_LATER for n in pair} <= known


@pytest.mark.parametrize("path", sources(), ids=str)
def test_modules_are_short_and_say_what_they_are(path: Path) -> None:
    text = (ROOT / path).read_text()
    assert len(text.splitlines()) <= LONGEST
    assert not text or ast.get_docstring(ast.parse(text)), f"{path} has no text that says what it is"
