"""The examples of regions, as a user runs them: what they print is what they prove."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@functools.cache
def run(name: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def differences(out: str) -> list[float]:
    return [float(x) for line in out.splitlines() if "difference" in line for x in re.findall(r"\de-\d+", line)]


@pytest.mark.parametrize(
    ("name", "proven", "collectives"),
    [
        (
            "manual_tensor_parallel.py",
            5,
            [
                "  1 x all_reduce of (32, 16) forward\n  1 x all_reduce of (32, 16) backward\nsequence",
                "  1 x all_reduce of () forward\n  1 x all_gather of (8, 16) backward\n  1 x reduce_scatter",
                "accumulated: largest difference of loss and gradients",
            ],
        ),
        ("ring_attention.py", 12, ["  6 ppermute forward, 14 ppermute backward\n"] * 3),
        (
            "expert_parallel.py",
            3,
            [
                "  2 all_to_all forward, 1 all_reduce forward, 1 all_to_all backward, 1 all_reduce backward",
                "1 all_gather forward, 2 ragged_all_to_all forward, 1 all_reduce forward, 2 all_to_all backward, "
                "1 ragged_all_to_all backward, 1 all_reduce backward",
            ],
        ),
    ],
)
def test_examples_equal_the_plain_function(name: str, proven: int, collectives: list[str]) -> None:
    out = run(name)
    assert len(differences(out)) == proven, out
    assert max(differences(out)) < 1e-12, out
    for text in collectives:
        assert text in out, out


def test_memory_of_ring_attention_is_flat_in_the_number_of_ranks() -> None:
    out = run("ring_attention.py")
    peaks = dict(re.findall(r"(\d+) ranks +([\d.]+) KiB", out))
    assert peaks["4"] == peaks["8"] == peaks["16"]


@pytest.mark.parametrize("name", ["manual_tensor_parallel.py", "ring_attention.py", "expert_parallel.py"])
def test_examples_fit_on_a_page(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 120
