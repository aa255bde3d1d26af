"""The porting guide keeps its promises. tests/test_docs.py runs its programs, each of which compares itself with the
loop before it."""

from __future__ import annotations

from difflib import SequenceMatcher

import porting_page as page
import pytest
from worker_pool import Pool


def edits(old: str, new: str) -> tuple[list[str], list[str]]:
    """Lines that a reader writes, and lines that go without one in their place; the comparison is the page's own."""
    a, b = (code[: code.index("\ncompare(losses, ")].splitlines() for code in (old, new))
    changes = [c for c in SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if c[0] != "equal"]
    written = [line for _, _, _, start, end in changes for line in b[start:end]]
    deleted = [line for _, a0, a1, b0, b1 in changes for line in a[a0 + b1 - b0 : a1]]
    return written, deleted


STEPS = [edits(old, new) for old, new in zip(page.LOOPS, page.LOOPS[1:])]


def test_five_steps_write_fourteen_lines_and_delete_three() -> None:
    assert [(len(written), len(deleted)) for written, deleted in STEPS] == [(3, 0), (6, 3), (2, 0), (1, 0), (2, 0)]


def test_each_written_line_is_marked_with_its_step() -> None:
    for number, (written, _) in enumerate(STEPS, 1):
        assert written == [line for line in page.LOOPS[number].splitlines() if line.endswith(f"  # {number}")]


def test_another_learning_rate_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not close"):
        page.losses(page.LOOPS[0], page.LOOPS[2].replace("lr=3e-3", "lr=3.0000001e-3"))


def test_processes_train_as_plain_torch_does(pool: Pool) -> None:
    plain = page.losses(page.LOOPS[0])
    for losses in pool.run(page.last_loop):
        assert losses == pytest.approx(plain, rel=1e-12, abs=0)
