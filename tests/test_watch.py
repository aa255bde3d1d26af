"""Waiting for a collective: slow is not broken."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist

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


def test_who_connects_waits_for_all_or_hears_of_a_failure() -> None:
    store = dist.HashStore()
    first, second = (Watch(store, f"Process {p}", p, 2) for p in range(2))
    waiting = Thread(target=first.meet, args=("connected",), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    second.meet("connected")
    waiting.join()
    second.tell(ValueError("no"))
    with pytest.raises(PeerError, match=r"Process 1 failed with ValueError: no\. Process 0 stopped with it\."):
        first.meet("elsewhere")
