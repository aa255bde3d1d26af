"""Who holds what: a grid of the global tensor for one or two dims, a table of ranks for more."""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fn.array import Array
from vescale_fn.sharding.bind import spec_of
from vescale_fn.sharding.layout import Layout

_COLOURS = ("#dbe9f6", "#fde3cf", "#d9f0d3", "#f6d9e8", "#e7e1ef", "#fff2ae", "#d5e8e4", "#e6d8c3")


@dataclass(frozen=True)
class Picture:
    """Text in a terminal, coloured cells in a notebook."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        from rich.console import Console  # only who looks pays for the import
        from rich.table import Table

        table = Table(show_lines=True)
        for c in self.columns:
            table.add_column(c)
        for r in self.rows:
            table.add_row(*r)
        out = io.StringIO()
        Console(file=out, width=120).print(table)
        return f"{self.title}\n{out.getvalue().rstrip()}"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(c)}</th>" for c in self.columns)
        holders = list(dict.fromkeys(cell for r in self.rows for cell in r[1:]))
        colour = {h: _COLOURS[i % len(_COLOURS)] for i, h in enumerate(holders)}
        body = "".join(
            f"<tr><th>{html.escape(r[0])}</th>"
            + "".join(f'<td style="background:{colour[c]};color:#222">{html.escape(c)}</td>' for c in r[1:])
            + "</tr>"
            for r in self.rows
        )
        return f"<table><caption>{html.escape(self.title)}</caption><tr>{head}</tr>{body}</table>"


def visualize(x: Array | Layout) -> Picture:
    """Which ranks hold which part of an Array (or of a layout).

    >>> from vescale_fn.sharding.layout import Layout, Shard
    >>> from vescale_fn.sharding.mesh import MeshShape
    >>> print(visualize(Layout.of(MeshShape(("dp", "tp"), (2, 2)), (4, 6), {"dp": Shard(0), "tp": Shard(1)})))
    [4, 6] 'a/dp b/tp' on dp=2,tp=2
    ┏━━━━━┳━━━━━━━━┳━━━━━━━━┓
    ┃     ┃ 0:3    ┃ 3:6    ┃
    ┡━━━━━╇━━━━━━━━╇━━━━━━━━┩
    │ 0:2 │ rank 0 │ rank 1 │
    ├─────┼────────┼────────┤
    │ 2:4 │ rank 2 │ rank 3 │
    └─────┴────────┴────────┘
    """
    layout = x.layout if isinstance(x, Array) else x
    title = f"{list(layout.shape)} '{spec_of(layout)}' on {layout.mesh}"
    return _grid(layout, title) if 1 <= layout.ndim <= 2 else _table(layout, title)


def _holders(layout: Layout) -> list[tuple[tuple[tuple[int, int], ...], ...]]:
    """Per rank: the runs it holds of each dim."""
    return [tuple(layout.intervals(d, c) for d in range(layout.ndim)) for c in layout.mesh.all_coords()]


def _grid(layout: Layout, title: str) -> Picture:
    held = _holders(layout)
    cuts = [sorted({e for h in held for r in h[d] for e in r} | {0, n}) for d, n in enumerate(layout.shape)]
    spans = [list(itertools.pairwise(c)) or [(0, 0)] for c in cuts]
    columns = spans[1] if layout.ndim == 2 else [None]

    def cell(row: tuple[int, int], column: tuple[int, int] | None) -> str:
        spot = (row,) if column is None else (row, column)
        ranks = [i for i, h in enumerate(held) if all(_inside(s, runs) for s, runs in zip(spot, h))]
        return ("rank " if len(ranks) == 1 else "ranks ") + _ranges(ranks)

    rows = tuple((f"{a}:{b}", *(cell((a, b), c) for c in columns)) for a, b in spans[0])
    return Picture(title, ("", *(f"{c[0]}:{c[1]}" if c else "held by" for c in columns)), rows)


def _inside(span: tuple[int, int], runs: Sequence[tuple[int, int]]) -> bool:
    return any(a <= span[0] and span[1] <= b for a, b in runs)


def _ranges(ranks: Sequence[int]) -> str:
    """`0-3, 8` for [0, 1, 2, 3, 8]."""
    out: list[list[int]] = []
    for r in ranks:
        if out and r == out[-1][1] + 1:
            out[-1][1] = r
        else:
            out.append([r, r])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def _table(layout: Layout, title: str) -> Picture:
    def runs(rs: Any) -> str:
        return "+".join(f"{a}:{b}" for a, b in rs) or "nothing"

    rows = tuple(
        (f"rank {i}", ", ".join(f"{a}={k}" for a, k in c.items()), *(runs(r) for r in h))
        for i, (c, h) in enumerate(zip(layout.mesh.all_coords(), _holders(layout)))
    )
    return Picture(title, ("", "coordinates", *(f"dim {d}" for d in range(layout.ndim))), rows)
