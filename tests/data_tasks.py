"""What the worker processes run for the test of examples/own_rows.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_rows.py"


def train(
    process: int, processes: int, steps: int, folder: str | None = None, resume: bool = False
) -> tuple[list[str], list[int]]:
    """The exact losses, and the rows that were read."""
    spec = importlib.util.spec_from_file_location("own_rows", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    read: list[int] = []

    class Watched(example.Waves):  # type: ignore[misc, name-defined]
        def __getitem__(self, i: int) -> Any:
            read.append(i)
            return super().__getitem__(i)

    losses = example.train(steps, None if folder is None else Path(folder), resume, Watched())
    return [x.hex() for x in losses], read
