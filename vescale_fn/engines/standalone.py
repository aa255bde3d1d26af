"""Running generated code with one process per rank and no engine around it: what an exported file does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale_fn.engines.kernels import Group
from vescale_fn.engines.routes import shapes_of
from vescale_fn.engines.transport import Team, Wire
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.site import Constant, Site, Start, Wait, bind_to_rank

Step = Callable[[list[Any], tuple[Any, ...]], Any]


def run_rank(
    step: Step, mesh: MeshShape, constants: Sequence[Constant], sites: Sequence[Site], inputs: list[Any], device: str
) -> list[Any]:
    """The results of this process, which is one rank of the mesh. `inputs` is emptied."""
    coords = mesh.coords(dist.get_rank())
    routes = [_route(site, _team(site.comm.axes, mesh)) for site in sites]
    run = step(inputs, tuple(bind_to_rank(c, mesh, coords, torch.device(device)) for c in constants))
    if isinstance(run, list):
        return run
    answer = None
    while True:
        try:
            what, xs = run.send(answer)
        except StopIteration as stop:
            results: list[Any] = stop.value
            return results
        if isinstance(what, Wait):
            answer = iter(xs[0]()[0])
            continue
        site = what.site if isinstance(what, Start) else what
        team, groups, shapes = routes[site.index]
        finish = team.start(site.comm, groups, shapes, [xs], site.overwritable)
        answer = iter([finish] if isinstance(what, Start) else finish()[0])


def _route(site: Site, team: Team) -> tuple[Team, list[Group], list[Any]]:
    coords = site.mesh.coords(dist.get_rank())
    groups = [site.group(coords, k) for k in range(len(site.outs))]
    return team, groups, [shapes_of(site, k, g) for k, g in enumerate(groups)]


def _team(axes: tuple[str, ...], mesh: MeshShape) -> Team:
    """This rank's group along some axes. All processes make all groups."""
    rank, mine = dist.get_rank(), Team(Wire(), (0,))
    for ranks in mesh.groups(axes):
        processes = sorted(ranks)
        group = dist.new_group(processes) if len(processes) > 1 else None
        if rank in ranks and group is not None:
            wire = Wire(len(processes), processes.index(rank), group)
            mine = Team(wire, tuple(processes.index(r) for r in ranks))
    return mine


def main(
    step: Step, mesh: MeshShape, constants: Sequence[Constant], sites: Sequence[Site], files: Sequence[str]
) -> None:
    """Read this rank's inputs from files[0], run, write its results to files[1]; `{rank}` in a name is the rank."""
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device != "cpu" else "gloo")
    source, target = (name.replace("{rank}", str(dist.get_rank())) for name in files)
    torch.save(run_rank(step, mesh, constants, sites, torch.load(source, map_location=device), device), target)
    dist.destroy_process_group()
