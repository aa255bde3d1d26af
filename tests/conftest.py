"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worker_pool import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="also run what is marked deep: whole matrices, long runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not config.getoption("--deep") and item.get_closest_marker("deep"):
            item.add_marker(pytest.mark.skip(reason="runs with --deep"))
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("processes"))  # one pool for all, on one of xdist's workers


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for torch.distributed, started when the first test uses them."""
    workers = Pool()
    yield workers
    workers.stop()
