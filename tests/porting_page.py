"""The programs of docs/porting.md: the model and the data, and the loops that train it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "porting.md"
SETUP, *PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
LOOPS = [code for code in PROGRAMS if "for x, y in batches:" in code]


def losses(*programs: str) -> list[float]:
    """What the last of these programs leaves as its losses, after the setup, in one namespace."""
    space: dict[str, Any] = {"__name__": "porting"}
    for code in (SETUP, *programs):
        exec(compile(code, str(PAGE), "exec"), space)
    found: list[float] = space["losses"]
    return found


def last_loop(process: int, processes: int) -> list[float]:
    """What a process of torchrun does with the setup and the last loop, whose four ranks the processes share."""
    mesh, shared = "make_mesh(dp=2, tp=2)", f"make_mesh(dp=2, tp=2, processes={processes})"
    assert mesh in LOOPS[-1]
    return losses(LOOPS[-1].replace(mesh, shared))
