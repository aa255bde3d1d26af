"""All ranks of a mesh in this process, in lock step: reductions in rank order, the same bits on every run."""

from __future__ import annotations

from dataclasses import dataclass

from vescale_fn.codegen import generate
from vescale_fn.engines.engine import Executable
from vescale_fn.engines.kernels import collective
from vescale_fn.engines.lockstep import Answers, LockStep, Operands
from vescale_fn.engines.rows import ragged_all_to_all
from vescale_fn.program import Program
from vescale_fn.sharding.comm import RaggedAllToAll
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.site import Site


@dataclass(frozen=True)
class VirtualEngine:
    """Runs programs on the virtual ranks of a mesh.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> VirtualEngine(Mesh(MeshShape(("dp",), (2,)))).mesh.size
    2
    """

    mesh: Mesh

    def load(self, program: Program) -> Executable:
        """Generate the code of a program and bind it to every rank."""
        code, ranks = generate(program), range(program.mesh.size)
        constants = [code.bind(program.mesh.coords(r), self.mesh.device_of(r)) for r in ranks]
        return VirtualExecutable(code, ranks, constants)


class VirtualExecutable(LockStep):
    """A program bound to every rank of a virtual mesh."""

    def exchange(self, site: Site, operands: Operands) -> Answers:
        mesh = site.mesh
        answers: Answers = {rank: [] for rank in operands}
        for ranks in mesh.groups(site.comm.axes):
            if ranks[0] not in operands:
                continue
            for i in range(len(site.outs)):
                group = site.group(mesh.coords(ranks[0]), i)
                if isinstance(site.comm, RaggedAllToAll):
                    outs = ragged_all_to_all([operands[r] for r in ranks])
                else:
                    outs = collective(site.comm, group, [operands[r][i] for r in ranks])
                for rank, out in zip(ranks, outs):
                    answers[rank].append(out)
        return answers
