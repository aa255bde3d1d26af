"""Plans kept as files, so that a step which was solved once is not solved again: `pjit(cache_dir=)`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_fn.sharding import plan_file
from vescale_fn.sharding.graph import Graph
from vescale_fn.sharding.plan import Plan

if TYPE_CHECKING:
    from vescale_fn.lowered import Request


@dataclass(frozen=True, eq=False)
class PlanCache:
    """The file in `folder` for one step, keyed on everything that a plan depends on: the graph, the mesh, the layouts
    and roles that were asked for, the user's rules, and the release."""

    folder: Path
    name: str
    request: Request
    rules: Mapping[Any, Any]

    def plan(self, graph: Graph, solve: Callable[[], Plan]) -> Plan:
        """The plan in the file; where there is none, or none that fits, the one that `solve` finds, which is kept."""
        path = self.path(graph)
        try:
            return plan_file.load(path.read_text(), graph)
        except (OSError, ValueError, KeyError):  # no file, a damaged one, or one of another release
            plan = solve()
            self._write(path, plan_file.dump(plan))
            return plan

    def path(self, graph: Graph) -> Path:
        """The file for a graph."""
        r = self.request
        facts = [version("vescale-fn"), plan_file.graph_hash(graph), r.mesh.shape, r.inputs, r.outputs, r.roles]
        facts += [sorted(r.continues.items()), *(f"{op}: {rule!r}" for op, rule in self.rules.items())]
        key = hashlib.sha256("\n".join(map(repr, facts)).encode()).hexdigest()
        name = re.sub(r"\W+", "_", self.name).strip("_")
        return self.folder / f"{name}-{key[:16]}.plan.json"

    def _write(self, path: Path, text: str) -> None:
        """In one step, so that processes which start together never read half a file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(text)
        draft.replace(path)
