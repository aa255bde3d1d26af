"""Regions on real processes: the same values, and no rank that waits for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import region_tasks as tasks
import torch

if TYPE_CHECKING:
    from worker_pool import Pool


@pytest.mark.parametrize(("processes", "ranks"), [(2, 2), (2, 4), (4, 4)])
def test_processes_equal_virtual_ranks(pool: Pool, processes: int, ranks: int) -> None:
    expected = tasks.results(0, 1, ranks)
    half = len(expected) // 2
    assert all(map(torch.equal, expected[:half], expected[half:]))
    for found in pool.run(tasks.results, ranks, processes=processes):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", tasks.GROUPS)
def test_a_sample_of_every_group(pool: Pool, name: str, processes: int) -> None:
    """At once and as programs, as on virtual ranks."""
    expected = tasks.group(0, 1, name)
    for found in pool.run(tasks.group, name, processes=processes):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lowered", [False, True])
def test_a_collective_fewer_is_refused(pool: Pool, lowered: bool) -> None:
    said = pool.run(tasks.one_fewer, lowered, processes=2)
    assert all(s.startswith("PeerError: ") for s in said), said
    assert any("Processes of one mesh run different programs" in s for s in said)


def test_collectives_in_another_order_are_refused(pool: Pool) -> None:
    said = pool.run(tasks.other_order, processes=2)
    assert all(s.startswith("PeerError: ") for s in said), said
    assert any("Processes of one mesh run different programs" in s for s in said)


def test_a_body_that_raises_tells_the_others(pool: Pool) -> None:
    first, second = pool.run(tasks.one_raises, processes=2)
    assert second == "ValueError: no more data"
    assert first.startswith("PeerError: ")
    assert "failed with ValueError: no more data." in first
