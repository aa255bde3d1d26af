"""Gantt charts of timelines: ranks downwards, time to the right, one box for each action."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from vescale_fn.schedules.pipelines.drawing import GLYPH, Box, Drawing, Text
from vescale_fn.schedules.pipelines.table import Action, Table

Times = tuple[tuple[float, ...], ...]  # by rank, of each of its actions


class Chart(Protocol):
    """What a chart shows: a table, and when its actions start and end; a Timeline is one. Its text is the title."""

    @property
    def table(self) -> Table: ...
    @property
    def starts(self) -> Times: ...
    @property
    def ends(self) -> Times: ...
    @property
    def makespan(self) -> float: ...


_COLOURS = {"F": (0x6A, 0x9F, 0xD8), "B": (0x6F, 0xB9, 0x6B), "I": (0x5F, 0xC0, 0xA8), "W": (0xF2, 0xB4, 0x5C)}
_NAMES = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
_IDLE = "#eeeeee"
_ROW, _MARGIN, _NAME = 18, 10, 70  # pixels: height of a rank, white around, width of its name
_ANSI = {"F": 74, "B": 71, "I": 79, "W": 215}  # colours of a terminal


def picture(charts: Sequence[Chart], width: int = 1200) -> Drawing:
    """One chart under another, all with the same scale of time; later stages of a rank are lighter."""
    longest = max(line.makespan for line in charts) or 1
    scale = (width - 2 * _MARGIN - _NAME) / longest
    boxes: list[Box] = []
    texts: list[Text] = []
    y = float(_MARGIN)
    for line in charts:
        texts.append(Text(_MARGIN, y + _ROW / 2, str(line)))
        y += _ROW
        for rank in range(line.table.ranks):
            texts.append(Text(_MARGIN, y + _ROW / 2, f"rank {rank}"))
            boxes.append(Box(_MARGIN + _NAME, y, line.makespan * scale, _ROW, _IDLE))
            boxes += _boxes(line, rank, y, scale)
            y += _ROW
        y += _ROW / 2
    kinds = [k for k in _NAMES if any(a.kind == k for line in charts for _, a in line.table.actions())]
    for i, kind in enumerate(kinds):
        x = _MARGIN + i * (width - 2 * _MARGIN) / len(kinds)
        boxes.append(Box(x, y, _ROW, _ROW, _colour(kind, 0)))
        texts.append(Text(x + _ROW + 4, y + _ROW / 2, _NAMES[kind]))
    return Drawing(width, round(y + _ROW + _MARGIN), tuple(boxes), tuple(texts))


def _boxes(line: Chart, rank: int, y: float, scale: float) -> Iterator[Box]:
    chunks = {s: i for i, s in enumerate(s for s, r in enumerate(line.table.placement) if r == rank)}
    for a, start, end in zip(line.table.rows[rank], line.starts[rank], line.ends[rank]):
        wide = (end - start) * scale
        label = str(a.microbatch) if wide > GLYPH * len(str(a.microbatch)) else ""
        colour = _colour(a.kind, chunks[a.stage] / len(chunks))
        yield Box(_MARGIN + _NAME + start * scale, y, wide, _ROW, colour, label, f"{a}: {start:g} to {end:g}")


def _colour(kind: str, lighter: float) -> str:
    return "#" + "".join(f"{round(c + (255 - c) * 0.7 * lighter):02x}" for c in _COLOURS[kind])


def plot(charts: Chart | Sequence[Chart], path: str | Path, width: int = 1200) -> None:
    """Draw the charts of one or more timelines, one under another, `width` pixels wide, to a .svg or .png file.

    Raises ValueError when the path ends otherwise.
    """
    several = charts if isinstance(charts, Sequence) else [charts]
    picture(several, width).save(path)


def as_text(line: Chart, width: int = 100, colour: bool = False) -> str:
    """The chart in letters, at most `width` columns wide: each action as its kind and microbatch where that fits,
    else as its kind; a dot is idle time."""
    labels = [f"rank {r}" for r in range(line.table.ranks)]
    margin = max(map(len, labels)) + 2
    scale = min((width - margin) / (line.makespan or 1), _columns_of_a_unit(line))
    rows = [label.ljust(margin) + _cells(line, r, scale, colour) for r, label in enumerate(labels)]
    return "\n".join([str(line), *rows])


def _columns_of_a_unit(line: Chart) -> float:
    """How many columns a unit of time needs for each action to be written in full."""
    return max(
        (
            (len(_label(a)) + 1) / (end - start)
            for row, starts, ends in zip(line.table.rows, line.starts, line.ends)
            for a, start, end in zip(row, starts, ends)
            if end > start
        ),
        default=1,
    )


def _label(a: Action) -> str:
    return f"{a.kind}{a.microbatch}"


def _cells(line: Chart, rank: int, scale: float, colour: bool) -> str:
    out, column = "", 0
    for a, start, end in zip(line.table.rows[rank], line.starts[rank], line.ends[rank]):
        begin, stop = round(start * scale), round(end * scale)
        wide, label = stop - begin, _label(a)
        text = label.ljust(wide) if wide > len(label) else a.kind * wide
        out += "·" * (begin - column) + (f"\x1b[30;48;5;{_ANSI[a.kind]}m{text}\x1b[0m" if colour else text)
        column = stop
    return out + "·" * (round(line.makespan * scale) - column)


def show(line: Chart, width: int, file: TextIO | None = None) -> None:
    """Print `as_text`, in colour if it goes to a terminal."""
    out = file or sys.stdout
    print(as_text(line, width, colour=out.isatty()), file=out)
