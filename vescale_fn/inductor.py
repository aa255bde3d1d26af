"""`compile="inductor"`: the generated code of a program without collectives, compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn import errors
from vescale_fn.codegen import Code
from vescale_fn.engines import Executable
from vescale_fn.engines.lockstep import LockStep


@dataclass(frozen=True, eq=False)
class CompiledExecutable:
    """A program bound to the ranks of this process, which do not communicate; compiled at the first call."""

    code: Code
    constants: Sequence[tuple[Any, ...]]
    function: Callable[..., list[Any]]

    @torch.no_grad()
    def __call__(self, inputs: list[list[Any]]) -> list[list[Any]]:
        results = [self.function(args, k) for args, k in zip(inputs, self.constants)]
        for args in inputs:
            args.clear()
        return results


def compiled(executable: Executable, name: str) -> Executable:
    """The executable with its code compiled by inductor. Raises ValueError where there are collectives."""
    if executable.code.communicates:
        raise ValueError(errors.cannot_compile(name, len(executable.code.sites)))
    assert isinstance(executable, LockStep)
    step = executable.code.function

    def run(args: list[Any], k: tuple[Any, ...]) -> list[Any]:
        results: list[Any] = step([*args], k)
        return results

    function = torch.compile(run, fullgraph=True, dynamic=False)
    return CompiledExecutable(executable.code, executable.constants, function)
