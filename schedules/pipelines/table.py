"""A schedule of a pipeline as data: for every rank, the actions it runs, in order.

The model is a chain of stages 0 ... S-1. An action is one microbatch on one stage: F forward, B backward, or the two
halves of backward, I (gradient of the input, which the stage before waits for) and W (gradient of the weights, which
nobody waits for: Qi et al., "Zero Bubble Pipeline Parallelism", 2023). What goes from rank to rank follows from these,
and `with_transfers` writes it down.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from vescale_fn.schedules.pipelines import messages

COMPUTE = ("F", "B", "I", "W")
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

_ACTION = re.compile(rf"(\d+)({'|'.join(TRANSFERS + COMPUTE)})(\d+)")
_PAIR = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")  # torch.distributed.pipelining: run at once; in a table, in order
_SHOWN = 24  # actions of a rank in str(table)


class Action(NamedTuple):
    """What a rank does: `kind` for microbatch `microbatch` on stage `stage`. Written as in `2F7`.

    SEND_F sends the stage's output, RECV_F receives its input, SEND_B sends the gradient of its input, and RECV_B
    receives the gradient of its output.

    >>> str(Action("F", stage=2, microbatch=7)), Action.parse("1SEND_B0")
    ('2F7', Action(kind='SEND_B', stage=1, microbatch=0))
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of `str`. Raises ValueError for anything else."""
        if (found := _ACTION.fullmatch(text.strip())) is None:
            raise ValueError(messages.not_an_action(text.strip()))
        return Action(found[2], int(found[1]), int(found[3]))


@dataclass(frozen=True)
class Table:
    """For every rank its actions in order, e.g. read from a CSV, or from `schedule("1f1b", ranks=2, microbatches=3)`.

    A table may be wrong: `check` proves it. It says nothing of time: `simulate` does, for given costs.

    >>> print(Table.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], name="mine"))
    mine: 2 ranks, 2 stages, 2 microbatches
    rank 0  0F0 0F1 0B0 0B1
    rank 1  1F0 1B0 1F1 1B1
    """

    name: str
    placement: tuple[int, ...]  # the rank of every stage
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @staticmethod
    def of(rows: Iterable[Iterable[Action | str]], name: str = "table") -> Table:
        """The table with these actions; a stage lives on the rank that runs its first forward.

        Raises ValueError when a text is no action, or a stage between 0 and the last has no forward.
        """
        parsed = tuple(tuple(Action.parse(a) if isinstance(a, str) else a for a in row) for row in rows)
        homes: dict[int, int] = {}
        for rank, row in enumerate(parsed):
            for a in row:
                if a.kind == "F":
                    homes.setdefault(a.stage, rank)
        if not homes:
            raise ValueError(messages.no_forward(name))
        stages = 1 + max(a.stage for row in parsed for a in row)
        if missing := [s for s in range(stages) if s not in homes]:
            raise ValueError(messages.stage_without_forward(name, missing[0], stages))
        microbatches = 1 + max(a.microbatch for row in parsed for a in row)
        return Table(name, tuple(homes[s] for s in range(stages)), microbatches, parsed)

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def trains(self) -> bool:
        """Whether any stage runs backward."""
        return any(a.kind in "BIW" for row in self.rows for a in row)

    @property
    def has_transfers(self) -> bool:
        return any(len(a.kind) > 1 for row in self.rows for a in row)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank, rank after rank."""
        for rank, row in enumerate(self.rows):
            for a in row:
                yield rank, a

    def without_transfers(self) -> Table:
        """The same table, of what is computed only."""
        if not self.has_transfers:
            return self
        return replace(self, rows=tuple(tuple(a for a in row if len(a.kind) == 1) for row in self.rows))

    def to_csv(self, path: str | Path | None = None) -> str:
        """One line a rank, one action a cell: the text, which is also written to `path` if one is given."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([map(str, row) for row in self.rows])
        if path is not None:
            Path(path).write_text(out.getvalue())
        return out.getvalue()

    @staticmethod
    def from_csv(source: str | Path, name: str | None = None) -> Table:
        """The inverse of `to_csv`, from a path, or from a text of more than one line.

        Empty cells are skipped, so that a table which torch.distributed.pipelining wrote for its computations can be
        read; of its overlapped pairs the first is run first. Raises ValueError naming line and cell.

        >>> Table.from_csv("0F0,0F1,,0B0,0B1\\n1F0,1B0,1F1,1B1\\n").rows[0][2]
        Action(kind='B', stage=0, microbatch=0)
        """
        if isinstance(source, str) and "\n" in source:
            text, name = source, name or "table"
        else:
            text, name = Path(source).read_text(), name or Path(source).stem
        return Table.of(_read_cells(csv.reader(io.StringIO(text)), name), name)

    def __str__(self) -> str:
        sizes = ((self.ranks, "rank"), (self.stages, "stage"), (self.microbatches, "microbatch"))
        head = f"{self.name}: " + ", ".join(messages.count(n, what) for n, what in sizes)
        width = len(str(self.ranks - 1))
        return "\n".join([head, *(f"rank {r:<{width}}  {_shown(row)}" for r, row in enumerate(self.rows))])


def _read_cells(lines: Iterable[Sequence[str]], name: str) -> list[list[Action]]:
    rows: list[list[Action]] = []
    for line, cells in enumerate(lines, 1):
        rows.append([])
        for column, cell in enumerate(cells, 1):
            pair = _PAIR.fullmatch(cell.strip())
            try:
                rows[-1] += [Action.parse(text) for text in (pair.groups() if pair else [cell]) if text.strip()]
            except ValueError as e:
                raise ValueError(messages.bad_cell(name, line, column, str(e))) from None
    return rows


def _shown(row: Sequence[Action]) -> str:
    text = " ".join(map(str, row[:_SHOWN]))
    return text if len(row) <= _SHOWN else f"{text} ... {len(row) - _SHOWN:,} more"
