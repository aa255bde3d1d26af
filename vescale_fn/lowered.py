"""`Lowered`: a step as the program of one rank, before it runs: to read, to cost, to export, to load into an engine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vescale_fn.cost_report import CollectiveTable, Cost
    from vescale_fn.debug import Debug
    from vescale_fn.engines import Executable
    from vescale_fn.memory import MemoryStats
    from vescale_fn.program import Program
    from vescale_fn.sharding.layout import Layout
    from vescale_fn.sharding.mesh import Mesh
    from vescale_fn.sharding.plan import Plan
    from vescale_fn.tracing import Traced

# What reads a program is imported by the method that needs it, so that importing the package stays cheap.


Keep = Literal["all", "none"] | int


@dataclass(frozen=True, eq=False)
class Request:
    """What a traced step is lowered for.

    inputs: layout of each graph input, None where the solver chooses (captured values included).
    outputs: layout that each output must have, None where the solver chooses.
    roles: "data" or "state" for each graph input.
    continues: output index -> input index whose layout it takes.
    donated: indices of inputs whose storage may be reused.
    rules: extra sharding rules by operation.
    keep: what is kept for backward of the parameters that forward gathers: "all", "none", or bytes.
    paths: what the inputs that are arguments are called.
    debug: what the program watches for.
    """

    mesh: Mesh
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    roles: tuple[str, ...]
    continues: Mapping[int, int]
    donated: frozenset[int]
    rules: Mapping[Any, Any]
    keep: Keep = "all"
    paths: tuple[str, ...] = ()
    debug: Debug | None = None


@dataclass(frozen=True, eq=False)
class Lowered:
    """A step as the program of one rank, before it runs.

    Attributes: `traced` (the global graph), `plan` (layouts), `program` (per-rank operations and collectives).

    >>> import torch, vescale_fn as vf
    >>> x = vf.device_put(torch.ones(8, 4), "b/dp d", vf.make_mesh(dp=2))
    >>> lowered = vf.pjit(lambda x: x.sum(0)).lower(x)
    >>> [(r.kind, r.axes, r.nbytes) for r in lowered.collectives]
    [('all_reduce', ('dp',), 16)]
    """

    name: str
    traced: Traced
    request: Request
    plan: Plan
    program: Program

    def as_text(self) -> str:
        """The per-rank program, one operation a line, collectives standing out."""
        from vescale_fn.text import program_text

        return program_text(self.program)

    @cached_property
    def collectives(self) -> CollectiveTable:
        """Every collective: kind, axes, dtype, shape, bytes, phase, source line. Prints as a table."""
        from vescale_fn.cost_report import collectives_of

        return collectives_of(self.program)

    def cost_analysis(self) -> Cost:
        """Floating-point operations and bytes of one rank, and bytes sent by axis."""
        from vescale_fn.cost_report import cost_analysis

        return cost_analysis(self.program)

    def memory_analysis(self, **coords: int) -> MemoryStats:
        """Bytes that a rank holds: arguments, outputs, temporaries, peak. coords: the rank's, 0 where nothing is said;
        `memory_analysis(pp=1)` is of the second rank of a pipeline."""
        from vescale_fn.memory import peak_bytes

        return peak_bytes(self.program, {**dict.fromkeys(self.program.mesh.names, 0), **coords})

    def explain(self, path: str) -> str:
        """Why the value at `path` has its layout, what it costs, and the runner-up (for a plan that was solved here,
        not read from a file)."""
        from vescale_fn.sharding.explain import explain

        return explain(self.plan, path)

    def export(self, path: str | Path) -> None:
        """Write the program as one Python file that needs only torch and runs under torchrun."""
        from vescale_fn.export import export

        export(self.program, path)

    def diff(self, other: Lowered) -> str:
        """The lines in which another program's text differs, as a unified diff; "" when none does."""
        mine, theirs = self.as_text().splitlines(), other.as_text().splitlines()
        return "\n".join(difflib.unified_diff(mine, theirs, self.name, other.name, lineterm=""))

    def compile(self, *, deterministic: bool = False, backend: str | None = None) -> Executable:
        """The program loaded into the engine of its mesh.

        deterministic: the same bits for any number of processes.
        backend: None runs generated code; "inductor" compiles it, which takes minutes for a real step on CPU and is
            possible for programs without collectives only. Raises ValueError for others.
        """
        from vescale_fn.engines import engine_for
        from vescale_fn.inductor import compiled

        executable = engine_for(self.request.mesh, deterministic=deterministic).load(self.program)
        return executable if backend is None else compiled(executable, self.name)
