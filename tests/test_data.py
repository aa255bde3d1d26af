"""examples/own_rows.py: each process reads its own rows, and stopping changes nothing."""

from __future__ import annotations

from pathlib import Path

import data_tasks as tasks
from worker_pool import Pool


def test_the_same_losses_for_any_number_of_processes(pool: Pool, tmp_path: Path) -> None:
    """To the bit: alone, on four processes, and when two stop in the second epoch and one goes on."""
    losses, read = tasks.train(0, 1, 12)
    assert len(read) == 12 * 32
    assert float.fromhex(losses[-1]) < float.fromhex(losses[0])

    four = pool.run(tasks.train, 12, processes=4, timeout=120)
    assert [found for found, _ in four] == [losses] * 4
    assert {len(own) for _, own in four} == {12 * 8}
    assert sorted(i for _, own in four for i in own) == sorted(read)

    two = pool.run(tasks.train, 10, str(tmp_path), processes=2)
    assert [found for found, _ in two] == [losses[:10]] * 2
    rest, again = tasks.train(0, 1, 2, str(tmp_path), True)
    assert rest == losses[10:]
    assert again == read[10 * 32 :]  # no row is read that was seen before
