"""Who holds what: a grid of the global tensor for one or two dims, a table of ranks for more."""

from __future__ import annotations

import html
import io
import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

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
    spec = x.spec if isinstance(x, Array) and x.spec is not None else spec_of(layout)
    title = f"{list(layout.shape)} '{spec}' on {layout.mesh}"
    return _grid(layout.flat, title) if 1 <= layout.flat.ndim <= 2 else _table(layout.flat, title)


Runs = tuple[tuple[int, int], ...]


def _held(layout: Layout) -> list[tuple[Runs, ...]]:
    """Per rank: the runs that it holds of each dim."""
    return [tuple(layout.intervals(d, c) for d in range(layout.ndim)) for c in layout.mesh.all_coords()]


def _grid(layout: Layout, title: str) -> Picture:
    """A cell for each stretch between two cuts."""
    held = _held(layout)
    cuts = [sorted({e for h in held for run in h[d] for e in run} | {0, n}) for d, n in enumerate(layout.shape)]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, dims in enumerate(held):
        for cell in itertools.product(*map(_cells, dims, cuts)):
            holders.setdefault(cell, []).append(rank)
    rows, *columns = [[f"{a}:{b}" for a, b in itertools.pairwise(c)] for c in cuts]
    below = [(j,) for j in range(len(columns[0]))] if columns else [()]
    cells = tuple((text, *(_ranks(holders[(i, *j)]) for j in below)) for i, text in enumerate(rows))
    return Picture(title, ("", *(columns[0] if columns else ["held by"])), cells)


def _cells(runs: Runs, cuts: Sequence[int]) -> list[int]:
    """Indices of the stretches that make up some runs."""
    return [i for a, b in runs for i in range(bisect_left(cuts, a), bisect_left(cuts, b))]


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> _ranks([0, 1, 2, 3, 8])
    'ranks 0-3, 8'
    """
    out: list[list[int]] = []
    for r in ranks:
        if out and r == out[-1][1] + 1:
            out[-1][1] = r
        else:
            out.append([r, r])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _table(layout: Layout, title: str) -> Picture:
    def text(runs: Runs) -> str:
        return "+".join(f"{a}:{b}" for a, b in runs if a < b) or "nothing"

    rows = tuple(
        (f"rank {i}", ", ".join(f"{a}={k}" for a, k in c.items()), *map(text, h))
        for i, (c, h) in enumerate(zip(layout.mesh.all_coords(), _held(layout)))
    )
    return Picture(title, ("", "coordinates", *(f"dim {d}" for d in range(layout.ndim))), rows)
