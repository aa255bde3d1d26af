"""Fixtures shared by all tests, and what `--deep` adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from programs import Coverage
from worker_pool import Pool

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for torch.distributed, started when the first test uses them."""
    workers = Pool()
    yield workers
    workers.stop()


@pytest.fixture
def deep(request: pytest.FixtureRequest) -> bool:
    """Whether this is a deep run."""
    return bool(request.config.getoption("--deep"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="whole test matrices, and 20,000 random programs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not config.getoption("--deep") and item.get_closest_marker("deep"):
            item.add_marker(pytest.mark.skip(reason="runs with --deep"))
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("processes"))  # one pool for all, on one of xdist's workers


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """In a deep run: what the random programs covered."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.getreports(outcome)]
    found = [text for r in reports for name, text in r.user_properties if name == "coverage" and r.when == "call"]
    if config.getoption("--deep") and found:
        total = Coverage()
        for text in found:
            total.merge(Coverage.of_json(text))
        terminalreporter.section("random programs")
        terminalreporter.write_line(str(total))
