"""Saving a pytree: every process writes its own parts, then process 0 makes the checkpoint appear."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vescale_fn import errors
from vescale_fn.array import Array
from vescale_fn.checkpoint import messages
from vescale_fn.checkpoint.lane import Lane, lane
from vescale_fn.checkpoint.manifest import Stored, Value
from vescale_fn.checkpoint.messages import CheckpointError
from vescale_fn.checkpoint.parts import Parts, parts_of_shards, parts_of_tensor, without_pending
from vescale_fn.move import move_to
from vescale_fn.tree import flatten_with_paths


class Saving:
    """A save under way. Programs that end wait for it.

    >>> import tempfile, torch, vescale_fn as vf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = vf.save(folder, {"w": torch.ones(3)}, wait=False)
    ...     saving.result()
    ...     saving.done()
    True
    """

    def __init__(self, folder: Path, work: Callable[[], None]) -> None:
        self.folder = folder
        self._future: Future[None] = Future()
        self._asked = False
        threading.Thread(target=_run, args=(work, self._future), name=f"vf.save {folder}").start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Return when it has ended, well or not."""
        self._future.exception()

    def result(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is on the disk. Raises CheckpointError if the save failed, TimeoutError if it
        takes longer than `timeout` seconds."""
        try:
            self._future.result(timeout)
        finally:
            self._asked = self.done()

    def __del__(self) -> None:
        if self._error is not None and not self._asked and sys.stderr is not None:
            print(messages.lost_result(self.folder, self._error), file=sys.stderr)

    @property
    def _error(self) -> BaseException | None:
        return self._future.exception() if self.done() else None

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "under way"
        return f"Saving({str(self.folder)!r}, {state})"


def _run(work: Callable[[], None], future: Future[None]) -> None:
    try:
        work()
    except BaseException as e:
        future.set_exception(e)
    else:
        future.set_result(None)


def save(path: str | os.PathLike[str], tree: Any, *, wait: bool = True) -> Saving | None:
    """Save a pytree in folder `path`, in the place of the checkpoint that is there, if any.

    tree: leaves are Arrays, tensors, NumPy arrays, numbers, strings, bytes and None. Of an Array every process writes
        what it holds, replicas once; of other leaves process 0's values count. All processes must call it. `load` has
        them back bit for bit, on any mesh and any number of processes.
    wait: with False, return as soon as the tree may be donated or written to, and write in a thread; `.result()` of
        what is returned waits and raises. A save waits for the one before it. Array parts on the CPU are not copied
        unless a donating step wants their memory meanwhile, which makes that step copy them.
    A checkpoint appears at once or not at all: data files and then `checkpoint.json`, which replaces the old one by a
    rename, are forced to the disk. What a killed save leaves is removed by the next one. One job saves to a folder.
    Raises CheckpointError where writing fails (the old checkpoint is intact) or a leaf is of another type.

    >>> import tempfile, torch, vescale_fn as vf
    >>> w = vf.device_put(torch.arange(6.).reshape(2, 3), "d/dp f", vf.make_mesh(dp=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vf.save(folder, {"w": w, "step": 7})
    ...     vf.load(folder, like={"w": torch.empty(2, 3), "step": 0})
    {'w': tensor([[0., 1., 2.],
            [3., 4., 5.]]), 'step': 7}
    """
    folder = Path(path).absolute()
    leaves, parts = _described(tree)
    together = lane()
    together.clear()
    if wait:
        _write(folder, leaves, parts, together)
        return None
    arrays = {p for p, x in zip(*flatten_with_paths(tree)[:2]) if isinstance(x, Array)}
    parts = {p: x.snapshot(device_only=p in arrays) for p, x in parts.items()}
    saving = Saving(folder, lambda: _write(folder, leaves, parts, together))
    together.last = saving.wait
    return saving


def _described(tree: Any) -> tuple[dict[str, Stored | Value], dict[str, Parts]]:
    """Each leaf as the manifest has it, and the parts of those that have values in files."""
    leaves: dict[str, Stored | Value] = {}
    parts: dict[str, Parts] = {}
    for path, x in zip(*flatten_with_paths(tree)[:2]):
        if path in leaves:
            raise CheckpointError(messages.same_path(path))
        if isinstance(x, (bool, int, float, str, bytes, type(None))):
            leaves[path] = x
            continue
        held = _parts(path, x)
        leaves[path] = Stored(str(held.dtype).removeprefix("torch."), held.shape, ())
        if 0 not in held.shape:
            parts[path] = held
    return leaves, parts


def _parts(path: str, x: Any) -> Parts:
    if isinstance(x, Array):
        if x.mesh.kind == "abstract":
            raise CheckpointError(f"vf.save: {path or 'the tree'}: {errors.abstract_array(str(x.type))}")
        x = move_to(x, without_pending(x.layout))
        return parts_of_shards(x.layout, x.shards, x.mesh)
    if _is_dtensor(x):
        raise CheckpointError(messages.distributed_leaf(path))
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "biufc":
        x = torch.as_tensor(x)
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_meta or x.is_quantized:
        kind = type(x).__name__ if not isinstance(x, torch.Tensor) else f"{x.layout}, {x.dtype} tensor on {x.device}"
        raise CheckpointError(messages.unknown_leaf(path, kind))
    return parts_of_tensor(x.detach().resolve_conj().resolve_neg())


def _is_dtensor(x: Any) -> bool:
    if type(x) in (torch.Tensor, torch.nn.Parameter) or not isinstance(x, torch.Tensor):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def _write(folder: Path, leaves: dict[str, Stored | Value], parts: dict[str, Parts], together: Lane) -> None:
    from vescale_fn.checkpoint.exchange import write  # the first save loads torch.distributed.checkpoint

    write(folder, leaves, parts, together)
