"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worker_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for torch.distributed, started when the first test uses them."""
    workers = Pool()
    yield workers
    workers.stop()
