"""How the processes of a mesh notice that one of them failed, or runs another program, instead of waiting for ever.

Nothing is exchanged while all goes well. A process that raises writes why into the store that torch.distributed
started with; one that has waited for a second looks there, and compares what it runs with what the others run.
"""

from __future__ import annotations

import time
import warnings
import zlib
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

from vescale_fn.codegen import Code

_LOOK = timedelta(seconds=1)
_PATIENCE = 10.0  # seconds before a process says whom it waits for


class PeerError(RuntimeError):
    """Another process of the mesh stopped, or runs another program."""


@dataclass(eq=False)
class Watch:
    """What one process knows and tells. `who` names the process in messages."""

    store: Any  # a torch.distributed.Store
    who: str
    process: int
    processes: int
    calls: int = 0
    code: Code | None = None

    def begin(self, code: Code, first: bool) -> None:
        """A program starts; before its `first` call all processes meet and compare what they run."""
        self.calls, self.code = self.calls + 1, code
        if first and self.processes > 1:
            self.compare()
            self.meet("here")

    def compare(self) -> None:
        """Raise if another process runs another program as the same call. Whoever comes first sets the measure."""
        assert self.code is not None
        key, mine = f"call {self.calls}", f"{self.code.fingerprint} {self.who}"
        self.store.compare_set(f"{key} source", "", zlib.compress(self.code.source.encode()).hex())
        theirs = self.store.compare_set(key, "", mine).decode()
        if theirs.split()[0] != self.code.fingerprint:
            source = zlib.decompress(bytes.fromhex(self.store.get(f"{key} source").decode())).decode()
            raise PeerError(_mismatch(theirs.partition(" ")[2], source, self.who, self.code.source))

    def meet(self, what: str) -> None:
        """Wait until every process has come to this point of this call."""
        keys = [f"call {self.calls} {what} process {p}" for p in range(self.processes)]
        self.store.set(keys[self.process], "yes")
        started, pause, warned = time.monotonic(), 0.001, False
        while not self.store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            self.look()
            if not warned and time.monotonic() - started > _PATIENCE:
                warned = True
                missing = [p for p, key in enumerate(keys) if not self.store.check([key])]
                warnings.warn(f"{self.who} waits for processes {missing} to call the same step.", stacklevel=2)

    def look(self) -> None:
        """Raise if another process failed or runs another program."""
        if self.store.check(["failure"]):
            raise PeerError(f"{self.store.get('failure').decode()} {self.who} stopped with it.")

    def tell(self, error: BaseException) -> None:
        """Let the others know that this process stops because of `error`. The first failure counts."""
        if self.store is None:
            return
        text = f"{self.who} failed with {type(error).__name__}: {error}"
        self.store.compare_set("failure", "", text if text.endswith(".") else text + ".")

    def wait(self, work: Any) -> None:
        """Wait for a collective, looking around once a second. An error of work that is over is its own; before that,
        the wait may just have ended too early."""
        while True:
            over = work.is_completed()
            try:
                work.wait(_LOOK)
                return
            except RuntimeError as error:
                if over:
                    raise PeerError(
                        f"{self.who} lost the connection to another process, which ended without saying why. Look for "
                        f"its last output: it may have been killed, or have left its training loop early. ({error})"
                    ) from error
                self.look()
                self.compare()


def _mismatch(who: str, source: str, me: str, mine: str) -> str:
    pairs = enumerate(zip_longest(source.splitlines(), mine.splitlines(), fillvalue="(nothing)"), 1)
    line, a, b = next(((i, a, b) for i, (a, b) in pairs if a != b), (0, "the same text", "other layouts or shapes"))
    return (
        f"Processes of one mesh run different programs: at line {line}, {who} has `{a.strip()}` and {me} has "
        f"`{b.strip()}`. Every process must call the same steps in the same order, with arguments of the same shapes, "
        "dtypes and shardings; look for code that depends on the rank."
    )
