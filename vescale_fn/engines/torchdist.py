"""Programs on real processes: torch.distributed with gloo or NCCL, one or several ranks in each process.

The process groups of a mesh are made when a program first needs them and kept by the engine. On gloo, reductions that
scatter, and with `deterministic=True` all reductions, are taken in rank order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from vescale_fn.codegen import generate
from vescale_fn.engines.engine import Executable
from vescale_fn.engines.kernels import Group
from vescale_fn.engines.lockstep import Answers, LockStep, Operands
from vescale_fn.engines.routes import shapes_of
from vescale_fn.engines.transport import Team, Wire
from vescale_fn.engines.watch import Watch
from vescale_fn.program import Program
from vescale_fn.sharding.mesh import Mesh, rank_text
from vescale_fn.site import Site


@dataclass(eq=False)
class TorchDistEngine:
    """Runs programs on the processes of a mesh, which are those of torch.distributed.

    deterministic: the same bits for any number of processes.
    """

    mesh: Mesh
    deterministic: bool = False
    wires: dict[tuple[int, ...], Wire] = field(default_factory=dict)  # by the processes they join
    watch: Watch = field(init=False)
    world: Any = None  # the process group that the wires and the watch belong to
    failures: int = 0

    def __post_init__(self) -> None:
        self.start_afresh(failures=0)

    def load(self, program: Program) -> Executable:
        """Generate the code of a program and bind it to the ranks of this process. Nothing is communicated yet."""
        code, ranks = generate(program), self.mesh.local_ranks
        constants = [code.bind(program.mesh.coords(r), self.mesh.device_of(r)) for r in ranks]
        return TorchDistExecutable(code, ranks, constants, self)

    def enter(self) -> None:
        """Notice that torch.distributed was started anew."""
        if self.world is not dist.group.WORLD:
            self.start_afresh(failures=0)

    def start_afresh(self, failures: int) -> None:
        """No wires, and a watch that knows of no failure. All processes count failures alike: one ends what all run."""
        self.world, self.failures, self.wires = dist.group.WORLD, failures, {}
        self.watch = self.new_watch()

    def new_watch(self) -> Watch:
        name = f"vescale_fn/{self.mesh}/{self.deterministic}/{self.failures}"
        store = PrefixStore(name, dist.distributed_c10d._get_default_store()) if dist.is_initialized() else None
        ranks = self.mesh.local_ranks
        first = rank_text(ranks[0], self.mesh.shape.coords(ranks[0]))
        held = first if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        who = f"Process {self.mesh.process}, which holds {held},"
        return Watch(store, who, self.mesh.process, self.mesh.processes)

    def owner(self, rank: int) -> int:
        """The process that holds a rank."""
        return rank // (self.mesh.size // self.mesh.processes)

    def teams(self, axes: tuple[str, ...]) -> list[tuple[tuple[int, ...], Team]]:
        """The groups along `axes` in which this process has ranks, and the team of each. Every process must ask for
        the same axes in the same order: groups are made by all processes together."""
        found = []
        for ranks in self.mesh.shape.groups(axes):
            owners = [self.owner(r) for r in ranks]
            processes = tuple(sorted(set(owners)))
            wire = self.wire(processes)
            if self.mesh.process in processes:
                found.append((ranks, Team(wire, tuple(map(processes.index, owners)), self.deterministic)))
        return found

    def wire(self, processes: tuple[int, ...]) -> Wire:
        """The wire between some processes, made on first use."""
        if processes not in self.wires:
            group = dist.new_group(list(processes)) if len(processes) > 1 else None
            me = processes.index(self.mesh.process) if self.mesh.process in processes else 0
            wait = self.watch.wait if self.mesh.device == "cpu" else dist.Work.wait
            self.wires[processes] = Wire(len(processes), me, group, wait)
        return self.wires[processes]

    def fail(self, error: Exception) -> None:
        """Tell the other processes, and cut the wires so that nobody waits on them. The next program starts afresh."""
        if self.mesh.processes == 1:
            return
        self.watch.tell(error)
        for wire in self.wires.values():
            if wire.group is not None and wire.group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(wire.group)
        self.start_afresh(self.failures + 1)


@dataclass(frozen=True, eq=False)
class Route:
    """How one collective runs for one group of ranks. `local`: positions of its members among this process's ranks.
    `groups` and `shapes`: see `Team.start`."""

    team: Team
    local: tuple[int, ...]
    groups: tuple[Group, ...]
    shapes: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class TorchDistExecutable(LockStep):
    """A program bound to the ranks of one process."""

    engine: TorchDistEngine
    routes: dict[Site, list[Route]] = field(default_factory=dict)
    prepared: list[Any] = field(default_factory=list)  # the engine's wires when the routes were made

    def __call__(self, inputs: list[list[Any]]) -> list[list[Any]]:
        if not self.code.communicates:
            return super().__call__(inputs)
        engine = self.engine
        engine.enter()
        try:
            first = not self.prepared or self.prepared[0] is not engine.wires
            engine.watch.begin(self.code, first)
            if first:
                self.prepare()
            return super().__call__(inputs)
        except Exception as error:
            self.routes.clear()  # a group lives as long as anyone holds it, and others wait on it as long as it lives
            self.prepared.clear()
            engine.fail(error)
            raise

    def prepare(self) -> None:
        """Work out how each collective travels."""
        self.routes.clear()
        wires = len(self.engine.wires)
        for site in self.code.sites:
            teams = self.engine.teams(site.comm.axes)
            self.routes[site] = [self.route(site, ranks, team) for ranks, team in teams]
        self.prepared[:] = [self.engine.wires]
        if len(self.engine.wires) > wires:  # one that failed now would cut wires that others still connect
            self.engine.watch.meet("connected")

    def route(self, site: Site, ranks: tuple[int, ...], team: Team) -> Route:
        start = self.ranks[0]
        local = tuple(ranks[m] - start for m in team.mine)
        groups = tuple(site.group(site.mesh.coords(ranks[0]), k) for k in range(len(site.outs)))
        return Route(team, local, groups, tuple(shapes_of(site, k, g) for k, g in enumerate(groups)))

    def start(self, site: Site, operands: Operands) -> dict[int, Any]:
        started: dict[int, Any] = {}
        for route in self.routes[site]:
            if route.local[0] in operands:
                mine = [operands[i] for i in route.local]
                finish = route.team.start(site.comm, route.groups, route.shapes, mine, site.overwritable)
                started.update(dict.fromkeys(route.local, (route.local, finish)))
        return started

    def finish(self, site: Site, pending: Mapping[int, Any]) -> Answers:
        results: Answers = {}
        for i, (local, finish) in pending.items():
            if i not in results:
                results.update(zip(local, finish()))
        return results

    def exchange(self, site: Site, operands: Operands) -> Answers:
        return self.finish(site, self.start(site, operands))
