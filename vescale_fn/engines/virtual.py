"""All ranks of a mesh in this process, in lock step: reductions in rank order, the same bits on every run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vescale_fn.codegen import Code, Site, generate
from vescale_fn.engines.engine import rank_text
from vescale_fn.engines.kernels import collective
from vescale_fn.program import Program
from vescale_fn.sharding.mesh import Mesh

Request = tuple[Site, tuple[Tensor, ...]]
Run = Generator[Request, Iterator[Tensor], list[Any]]


@dataclass(frozen=True)
class VirtualEngine:
    """Runs programs on the virtual ranks of a mesh.

    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> VirtualEngine(Mesh(MeshShape(("dp",), (2,)))).mesh.size
    2
    """

    mesh: Mesh

    def load(self, program: Program) -> VirtualExecutable:
        """Generate the code of a program and bind it to every rank."""
        code = generate(program)
        coords = [program.mesh.coords(r) for r in range(program.mesh.size)]
        bound = [code.bind(c, self.mesh.device_of(r)) for r, c in enumerate(coords)]
        return VirtualExecutable(code, bound)


@dataclass(frozen=True, eq=False)
class VirtualExecutable:
    """A program bound to every rank of a virtual mesh."""

    code: Code
    constants: Sequence[tuple[Any, ...]]

    def __call__(self, inputs: list[list[Any]]) -> list[list[Any]]:
        runs = [self.on_rank(rank, self.code.function, args, self.constants[rank]) for rank, args in enumerate(inputs)]
        if not self.code.communicates:
            return runs
        answers: list[Iterator[Tensor] | None] = [None] * len(runs)
        while True:
            requests: list[Request] = []
            results = []
            for rank, run in enumerate(runs):
                answer, answers[rank] = answers[rank], None
                try:
                    requests.append(self.on_rank(rank, run.send, answer))
                except StopIteration as stop:
                    results.append(stop.value)
            if not requests:
                return results
            site = _same_site(requests, results)
            # An iterator lets go of its list once unpacked, so an answer lives no longer than the generated code keeps it.
            answers = [iter(xs) for xs in self.exchange(site, [xs for _, xs in requests])]

    def on_rank(self, rank: int, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args), with the rank named in any error."""
        try:
            return fn(*args)
        except StopIteration:
            raise
        except Exception as error:
            error.add_note(
                f"on {rank_text(rank, self.code.program.mesh.coords(rank))} of mesh {self.code.program.mesh}"
            )
            raise

    def exchange(self, site: Site, operands: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Results [rank][operand] of one collective, for operands [rank][operand]."""
        mesh = self.code.program.mesh
        answers: list[list[Tensor]] = [[] for _ in operands]
        for group in mesh.groups(site.comm.axes):
            sizes = site.sizes(mesh, mesh.coords(group[0]))
            for i, size in enumerate(sizes):
                outs = collective(site.comm, mesh, [operands[r][i] for r in group], size)
                for rank, out in zip(group, outs):
                    answers[rank].append(out)
        return answers


def _same_site(requests: Sequence[Request], results: Sequence[Any]) -> Site:
    """The collective that all ranks ask for."""
    site = requests[0][0]
    if results or any(other is not site for other, _ in requests):
        asked = sorted({str(s) for s, _ in requests}) + ["the end of the step"] * bool(results)
        raise RuntimeError(
            f"Ranks do not agree on the next collective: {' | '.join(asked)}. All ranks of a mesh must run the same "
            "program; a Python number that differs between ranks must not decide how often a loop runs."
        )
    return site
