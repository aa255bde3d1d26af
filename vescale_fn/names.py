"""Names of values and functions in graphs, programs and generated code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


def identifier(path: str) -> str:
    """A Python identifier that resembles the path of an argument.

    >>> identifier("state.blocks[0].w_qkv")
    'state_blocks_0_w_qkv'
    """
    name = re.sub(r"\W+", "_", path).strip("_") or "x"
    return f"_{name}" if name[0].isdigit() else name


@dataclass
class Names:
    """Hands out names, each once.

    >>> names = Names({"mul"})
    >>> names.fresh("mul"), names.fresh("mul_1"), names.fresh("add")
    ('mul_1', 'mul_2', 'add')
    """

    taken: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)  # the last number that was given to a name

    def fresh(self, name: str) -> str:
        """`name`, or the first of name_1, name_2, ... that is free."""
        stem, unique = re.sub(r"_\d+$", "", name), name
        while unique in self.taken:
            self.counts[stem] = self.counts.get(stem, 0) + 1
            unique = f"{stem}_{self.counts[stem]}"
        self.taken.add(unique)
        return unique
