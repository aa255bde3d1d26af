"""A pool of living worker processes for tests that need torch.distributed: started once, used by all.

Each task runs in a world of its own (gloo, `processes` of the workers), so that a test that breaks its process groups
breaks nobody else's.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SIZE = 4


@dataclass(frozen=True)
class Failure:
    """What a worker raised: type, message with notes, and the traceback as text."""

    kind: str
    message: str
    trace: str
    joined: bool  # the world; who did not can join no other: torch counts the groups it tried to make


@dataclass
class Pool:
    """Workers and the pipes to them."""

    workers: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    tasks: int = 0

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(SIZE):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(there,), daemon=True)
            worker.start()
            self.workers.append(worker)
            self.pipes.append(here)

    def outcomes(self, fn: Callable[..., Any], *args: Any, processes: int = 2, timeout: float = 120) -> list[Any]:
        """fn(process, processes, *args) in each of `processes` workers: what they return, or a Failure, by process.
        `fn` must be a function of a module in this folder."""
        if not all(w.is_alive() for w in self.workers):  # one died of what it ran: its test has failed, others go on
            self.stop()
        if not self.workers:
            self.start()
        self.tasks += 1
        store = f"file://{self.folder.name}/store{self.tasks}"
        for process, pipe in enumerate(self.pipes[:processes]):
            pipe.send((fn.__module__, fn.__qualname__, store, process, processes, args))
        results = [self._receive(pipe, timeout) for pipe in self.pipes[:processes]]
        if any(isinstance(r, Failure) and not r.joined for r in results):
            self.stop()
        return results

    def run(self, fn: Callable[..., Any], *args: Any, processes: int = 2, timeout: float = 120) -> list[Any]:
        """Like `outcomes`, where nobody may fail."""
        results = self.outcomes(fn, *args, processes=processes, timeout=timeout)
        failures = [r for r in results if isinstance(r, Failure)]
        assert not failures, "\n".join(f.trace for f in failures)
        return results

    def _receive(self, pipe: Connection, timeout: float) -> Any:
        if not pipe.poll(timeout):
            self.stop()
            raise TimeoutError(f"a worker did not answer within {timeout} s")
        return pipe.recv()

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join()
        self.workers, self.pipes = [], []


def _serve(pipe: Connection) -> None:
    """The life of a worker."""
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            module, name, store, process, processes, args = pipe.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(process), WORLD_SIZE=str(processes), LOCAL_RANK=str(process))
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # a short task must not leave while others still connect
        try:
            dist.init_process_group(
                "gloo", init_method=store, rank=process, world_size=processes, timeout=timedelta(seconds=100)
            )
            pipe.send(getattr(importlib.import_module(module), name)(process, processes, *args))
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            pipe.send(Failure(type(error).__name__, text, traceback.format_exc(), dist.is_initialized()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
