"""What every engine offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from vescale_fn.program import Program

if TYPE_CHECKING:
    from vescale_fn.codegen import Code


class Executable(Protocol):
    """A program ready to run on the ranks that this process holds."""

    @property
    def code(self) -> Code: ...

    def __call__(self, inputs: list[list[Any]]) -> list[list[Any]]:
        """Results [local rank][leaf] for inputs [local rank][leaf]. The inner lists are emptied, so that inputs which
        nobody else holds are freed at their last use."""
        ...


class Engine(Protocol):
    """Runs programs on one mesh."""

    def load(self, program: Program) -> Executable:
        """Generate the code of a program and bind it to the ranks of this process."""
        ...
