"""Random programs in worker processes."""

from __future__ import annotations

import torch
from programs import Program
from programs.check import called
from torch.utils._pytree import tree_leaves

import vescale_fn as vf
from vescale_fn.mesh import Mesh


def shards(program: Program, processes: int | None = None) -> list[list[torch.Tensor]]:
    """What the ranks of this process hold of each result, [rank][leaf]."""
    mesh: Mesh = vf.make_mesh(processes=processes, **program.mesh)
    result = called(program, mesh, deterministic=True)
    arrays = [a for a in tree_leaves(result) if isinstance(a, vf.Array)]
    return [[a.shards[i] for a in arrays] for i, _ in enumerate(mesh.local_ranks)]


def shards_of_process(process: int, processes: int, program: Program) -> list[list[torch.Tensor]]:
    return shards(program, processes)
