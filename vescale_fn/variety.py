"""How often a function is lowered anew, and a warning when that is for values or shapes that keep changing."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from vescale_fn import errors
from vescale_fn.arguments import CallArguments

MANY = 8  # programs of one function before a warning says what each is for

Shapes = tuple[tuple[int, ...] | None, ...]  # by leaf; None for what has no shape


@dataclass(eq=False)
class Variety:
    """What the arguments of a function have been, call by call that had to be lowered.

    constants: by path, the ints it has been. shapes: by the paths of a call, its shapes in order.
    """

    name: str
    constants: dict[str, set[int]] = field(default_factory=dict)
    shapes: dict[tuple[str, ...], dict[Shapes, None]] = field(default_factory=dict)

    def note(self, call: CallArguments) -> None:
        """A call that is lowered. Warns, once for each cause, on the user's line."""
        for path, x in zip(call.paths, call.leaves):
            if type(x) is int:
                seen = self.constants.setdefault(path, set())
                seen.add(x)
                if len(seen) == MANY + 1:
                    warnings.warn(errors.many_values(self.name, path, len(seen)), stacklevel=5)
        shapes = tuple(tuple(x.shape) if hasattr(x, "shape") else None for x in call.leaves)
        known = self.shapes.setdefault(call.paths, {})
        if shapes not in known:
            known[shapes] = None
            if len(known) == MANY + 1:
                warnings.warn(errors.many_shapes(self.name, len(known), varying(call.paths, [*known])), stacklevel=5)


def varying(paths: tuple[str, ...], shapes: list[Shapes]) -> dict[str, list[tuple[int, ...]]]:
    """The leaves whose shape is not always the same, and the shapes each has had."""
    found = {p: list(dict.fromkeys(s for s in column if s is not None)) for p, column in zip(paths, zip(*shapes))}
    return {p: column for p, column in found.items() if len(column) > 1}
