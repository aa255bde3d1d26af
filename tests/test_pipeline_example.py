"""The example of pipeline schedules: each simulated bubble is the one that its formula says."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "pipeline_schedules.py"


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *args])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_formulas_and_simulation_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "all.svg"
    lines = run(monkeypatch, capsys, "--ranks", "3", "--microbatches", "7", "--picture", str(picture))
    rows = [re.findall(r"(\w+) +\S+ +(\S+%) +(\S+%)", line) for line in lines]
    shown = [row[0] for row in rows if row]
    names = "gpipe 1f1b interleaved looped_bfs zb_h1 zb_h2 zbv dualpipev forward_only"
    assert [name for name, _, _ in shown] == names.split()
    assert all(formula == simulated for _, formula, simulated in shown)
    assert [line.split()[1] for line in lines if line.startswith("auto")] == ["shortest,", "shortest,"]
    assert picture.read_text().count("rank 2") == len(shown) + 2


def test_other_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Formulas of schedules with one direction hold for any times; the search is no longer than any of them."""
    picture = tmp_path / "all.png"
    lines = run(
        monkeypatch, capsys, "--ranks", "2", "--microbatches", "4", "--times", "2", "3", "1", "--picture", str(picture)
    )
    spans = {line.split()[0]: float(line.split()[-3]) for line in lines[2:-2]}
    assert spans["1f1b"] == spans["gpipe"] == 6 * (4 + 2 - 1)
    assert spans["zb_h1"] == 24 + (2 + 3 - 1)
    assert spans["auto"] <= min(spans[name] for name in ("1f1b", "zb_h1", "zbv"))
    assert picture.read_bytes().startswith(b"\x89PNG")
