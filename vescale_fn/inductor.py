"""`compile="inductor"`: the generated code of a program without collectives, compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vescale_fn import errors
from vescale_fn.codegen import Code
from vescale_fn.engines import Executable
from vescale_fn.engines.lockstep import LockStep
from vescale_fn.fused import IN_PLACE


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
    """The executable with its code compiled by inductor, where donated storage is freed at the end of a call only.
    Fused optimizer updates, which dynamo cannot trace in place, run as they are. Raises ValueError where there are
    collectives."""
    if executable.code.communicates:
        raise ValueError(errors.cannot_compile(name, len(executable.code.sites)))
    assert isinstance(executable, LockStep)
    updates = set(map(id, IN_PLACE.values()))
    names = {n: _uncompiled(x) if id(x) in updates else x for n, x in executable.code.names.items()}
    code = replace(executable.code, names=names)
    step = code.function

    def run(args: list[Any], k: tuple[Any, ...]) -> list[Any]:
        results: list[Any] = step([*args], k)
        return results

    return CompiledExecutable(code, executable.constants, torch.compile(run, dynamic=False))


def _uncompiled(fn: Any) -> Any:
    return torch.compiler.disable(fn)  # type: ignore[no-untyped-call]
