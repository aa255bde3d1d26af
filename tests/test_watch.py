"""Waiting for a collective: slow is not broken."""

from __future__ import annotations

from typing import Any

import pytest

from vescale_fn.engines.watch import PeerError, Watch


class Work:
    """The work of a collective that ends while somebody looks around, with or without an error."""

    def __init__(self, error: str = "") -> None:
        self.over, self.error = False, error

    def is_completed(self) -> bool:
        return self.over

    def wait(self, timeout: Any) -> None:
        if not self.over:
            self.over = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


class Quiet(Watch):
    """Nobody has failed."""

    def look(self) -> None: ...

    def compare(self) -> None: ...


def test_work_that_ends_just_after_a_wait_timed_out_is_done() -> None:
    Quiet(None, "Process 0", 0, 2).wait(Work())


def test_work_that_failed_is_a_lost_connection() -> None:
    with pytest.raises(PeerError, match=r"Process 0 lost the connection .* \(Connection closed by peer\)"):
        Quiet(None, "Process 0", 0, 2).wait(Work("Connection closed by peer"))
