"""The ranks that one process holds, run in lock step: each up to its next collective, then the collective for all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_fn.codegen import Code
from vescale_fn.nonfinite import FirstFound
from vescale_fn.sharding.mesh import rank_text
from vescale_fn.site import Site, Start, Wait

Request = tuple[Site | Start | Wait, tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class LockStep:
    """A program bound to `ranks`, with the constants of each."""

    code: Code
    ranks: Sequence[int]
    constants: Sequence[tuple[Any, ...]]

    @abstractmethod
    def exchange(self, site: Site, operands: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Results [rank][operand] of one collective, for operands [rank][operand]."""

    def start(self, site: Site, operands: Sequence[Sequence[Tensor]]) -> list[Any]:
        """Begin a collective. Something for each rank that `finish` takes."""
        return self.exchange(site, operands)

    def finish(self, site: Site, pending: Sequence[Any]) -> list[list[Tensor]]:
        """The results of a collective that `start` began."""
        return list(pending)

    def answer(self, what: Site | Start | Wait, operands: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """What each rank gets for its request. Errors name the collective and the user's line."""
        try:
            if isinstance(what, Start):
                return [[handle] for handle in self.start(what.site, operands)]
            if isinstance(what, Wait):
                return self.finish(what.site, [handle for (handle,) in operands])
            return self.exchange(what, operands)
        except Exception as error:
            error.add_note(f"in {what if isinstance(what, Site) else what.site}")
            raise

    def __call__(self, inputs: list[list[Any]]) -> list[list[Any]]:
        """Results [rank][leaf] for inputs [rank][leaf]; empties the inner lists. Gradients and the casts of autocast
        are part of the program, so the caller's contexts are switched off."""
        with torch.no_grad(), torch._C._DisableAutocast():
            return self.run(inputs)

    def run(self, inputs: list[list[Any]]) -> list[list[Any]]:
        """Run all ranks to the end."""
        watch, runs = FirstFound(), []
        for i, (args, k) in enumerate(zip(inputs, self.constants)):
            with watch:
                runs.append(self.on_rank(i, self.code.function, args, k))
        watch.raise_first()
        if not self.code.communicates:
            return runs
        answers: list[Iterator[Tensor] | None] = [None] * len(runs)
        while True:
            requests: list[Request] = []
            results: list[list[Any]] = []
            for i, run in enumerate(runs):
                answer, answers[i] = answers[i], None
                try:
                    with watch:
                        requests.append(self.on_rank(i, run.send, answer))
                except StopIteration as stop:
                    results.append(stop.value)
            watch.raise_first()
            if not requests:
                return results
            what = _same_request(requests, results)
            # An iterator lets go of its list once unpacked: an answer lives no longer than the generated code keeps it.
            answers = [iter(xs) for xs in self.answer(what, [xs for _, xs in requests])]

    def on_rank(self, i: int, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args) for the i-th rank of this process, which any error then names."""
        try:
            return fn(*args)
        except Exception as error:
            if not isinstance(error, StopIteration):
                mesh = self.code.program.mesh
                error.add_note(f"on {rank_text(self.ranks[i], mesh.coords(self.ranks[i]))} of mesh {mesh}")
            raise


def _same_request(requests: Sequence[Request], results: Sequence[Any]) -> Site | Start | Wait:
    """The collective that all ranks ask for."""
    what = requests[0][0]
    if results or any(other is not what for other, _ in requests):
        sites = [w if isinstance(w, Site) else w.site for w, _ in requests]
        asked = sorted(set(map(str, sites))) + ["the end of the step"] * bool(results)
        raise RuntimeError(
            f"Ranks do not agree on the next collective: {' | '.join(asked)}. All ranks of a mesh must run the same "
            "program; a Python number that differs between ranks must not decide how often a loop runs."
        )
    return what
