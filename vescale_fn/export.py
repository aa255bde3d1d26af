"""A program as one Python file that needs only torch and runs under torchrun."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vescale_fn.codegen import generate
from vescale_fn.engines.standalone import main
from vescale_fn.fused import IN_PLACE, functional
from vescale_fn.host import KERNELS as HOST_KERNELS
from vescale_fn.inline import Inliner
from vescale_fn.orthogonal import KERNELS as MATRIX_KERNELS
from vescale_fn.program import Program
from vescale_fn.random.bits import KERNELS as RANDOM_KERNELS
from vescale_fn.sharding.graph import Pipeline, equations
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.site import Start, Wait
from vescale_fn.text import value_text

KERNELS = {**RANDOM_KERNELS, **MATRIX_KERNELS, **HOST_KERNELS}

_HEAD = '''"""One rank's part of a step on mesh {mesh}, with explicit collectives; the same file runs on every rank.

    torchrun --nproc-per-node {size} {file} "inputs-{{rank}}.pt" "outputs-{{rank}}.pt"

Each input file holds the list of one rank's inputs, each output file the list of its results (torch.save). Local
shapes are written as global sizes and the mesh axes that divide them: `8/dp`. Inputs:

{inputs}
"""

from __future__ import annotations'''


def export(program: Program, path: str | Path) -> None:
    """Write a program to a file that runs under torchrun without this package and gives the same bits.

    Raises ValueError when the program holds an operation whose source cannot be written down.
    """
    Path(path).write_text(export_text(program, Path(path).name))


def export_text(program: Program, file: str = "step_rank.py") -> str:
    """The text that `export` writes."""
    if any(isinstance(e.op, Pipeline) for e in equations(program.graph)):
        raise ValueError(
            "export: the step has a pipeline, whose ranks run different programs, and one file runs on every rank. "
            "Export the step of one stage."
        )
    writer = _Writer()
    for thing in (main, MeshShape, *generate(program).names.values()):
        writer.take_in(thing)
    # Generated again, now that the names of what it stands on are known and can be left alone.
    settled = {"MESH": program.mesh, "SITES": (), "CONSTANTS": (), **writer.inliner.objects}
    code = generate(program, settled)
    values = [line for name, thing in code.names.items() if (line := writer.binding(name, thing))]
    constants = [writer.text(c) for c in code.constants]
    names = [
        f"MESH = {program.mesh!r}",
        *(f"{name} = {text}" for name, text in writer.layout_texts()),
        *values,
        _list("CONSTANTS", constants),
        _list("SITES", [s.name for s in code.sites]),
    ]
    sections = [
        _head(program, file),
        "\n".join(sorted({"import sys", *writer.inliner.imports.values()})),
        code.source.rstrip(),
        "# What the step stands on: layouts, collectives, and how they run on torch.distributed.",
        "\n\n\n".join(writer.inliner.definitions.values()),
        "\n".join(names),
        'if __name__ == "__main__":\n    main(step, MESH, CONSTANTS, SITES, sys.argv[1:])\n',
    ]
    return "\n\n\n".join(sections)


def _list(name: str, items: list[str]) -> str:
    return "\n".join([f"{name} = [", *(f"    {item}," for item in items), "]"]) if items else f"{name} = []"


def _head(program: Program, file: str) -> str:
    width = max((len(v.name) for v in program.graph.inputs), default=0)
    inputs = "\n".join(f"    {v.name:<{width}} : {value_text(v, program.layouts)}" for v in program.graph.inputs)
    return _HEAD.format(mesh=program.mesh, size=program.mesh.size, file=file, inputs=inputs or "    none")


@dataclass(eq=False)
class _Writer:
    """Objects as source text, and the definitions which that text needs."""

    inliner: Inliner = field(default_factory=Inliner)
    layouts: dict[Layout, str] = field(default_factory=dict)

    def take_in(self, thing: Any) -> None:
        """Make sure that whatever `thing` refers to is defined."""
        if not inspect.ismodule(thing) and not isinstance(thing, torch._ops.OpOverload):
            self.text(thing)
        elif thing in IN_PLACE:
            self.text(functional)
            self.text(IN_PLACE[thing])
        elif thing in KERNELS:
            self.text(KERNELS[thing])

    def binding(self, name: str, thing: Any) -> str | None:
        """The line that gives a name of the generated code its meaning; None where a definition does."""
        text = f"torch.ops.{thing}" if isinstance(thing, torch._ops.OpOverload) else None
        if thing in IN_PLACE:
            text = f"{self.text(functional)}({self.text(IN_PLACE[thing])})"
        if thing in KERNELS:
            text = self.text(KERNELS[thing])
        text = text or ("" if inspect.ismodule(thing) else self.text(thing))
        return f"{name} = {text}" if text not in ("", name) else None

    def text(self, thing: Any) -> str:
        """An expression for a function, a class, or data made of dataclasses."""
        if inspect.isroutine(thing) or inspect.isclass(thing):
            return self.inliner.add(thing)
        if isinstance(thing, MeshShape):
            return "MESH"
        if isinstance(thing, (Start, Wait)):
            return f"{self.inliner.add(type(thing))}({thing.site.name})"
        if isinstance(thing, Layout):
            self.plain(thing)
            return self.layouts.setdefault(thing, f"L{len(self.layouts)}")
        if isinstance(thing, (tuple, list)):
            return f"({', '.join(map(self.text, thing))}{',' * (len(thing) == 1)})"
        if isinstance(thing, torch.device):
            return f"torch.device({str(thing)!r})"
        return self.plain(thing) if dataclasses.is_dataclass(thing) else repr(thing)

    def plain(self, thing: Any) -> str:
        """A dataclass as a call of its class, without the defaults at the end."""
        fields = list(dataclasses.fields(thing))
        while fields and getattr(thing, fields[-1].name) == fields[-1].default:
            fields.pop()
        return f"{self.inliner.add(type(thing))}({', '.join(self.text(getattr(thing, f.name)) for f in fields)})"

    def layout_texts(self) -> Iterator[tuple[str, str]]:
        """Names of the layouts seen so far, and their text."""
        return ((name, self.plain(layout)) for layout, name in self.layouts.items())
