"""Which line of the user's code an operation comes from, and whether it belongs to forward or backward.

A backward operation runs while autograd evaluates a node; the node's sequence number leads back to the line of the
forward operation that made it.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, TracebackType

import optree
import torch
from torch._C._autograd import _get_sequence_nr

from vescale_fn.sharding.graph import Source

_LIBRARIES = tuple(str(Path(f).parent) + "/" for f in (torch.__file__, optree.__file__, __file__))
_GENERATED = ("<eval_with_key>", "<frozen ")


def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, *_GENERATED)) or "/einops/" in file or file.endswith("/contextlib.py")


def _is_wrapper(code: CodeType) -> bool:
    """Whether this is the function that torch.fx makes around what it traces."""
    return code.co_filename == "<string>" and code.co_name == "<lambda>"


def user_source() -> Source:
    """The innermost line under way that is not inside torch, optree, einops or this package."""
    frame = sys._getframe(1)
    while frame is not None and (_is_library(frame.f_code.co_filename) or _is_wrapper(frame.f_code)):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return Source()
    return source_at(frame.f_code.co_filename, frame.f_lineno)


def source_of_traceback(traceback: TracebackType | None) -> Source:
    """The innermost line of the user's in a traceback."""
    found = Source()
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not _is_library(file):
            found = source_at(file, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def source_at(file: str, line: int) -> Source:
    return Source(file, line, linecache.getline(file, line).strip())


class Lines:
    """The lines of the autograd nodes made so far, by sequence number."""

    def __init__(self) -> None:
        self._first = self._next = _get_sequence_nr()
        self._lines: list[Source] = []
        self._held: tuple[Source, bool] | None = None

    @contextlib.contextmanager
    def held_at(self, source: Source, backward: bool) -> Iterator[None]:
        """Inside, every operation comes from this line: a graph traced before is being replayed."""
        before, self._held = self._held, (source, backward)
        try:
            yield
        finally:
            self._held = before

    def locate(self) -> tuple[Source, bool]:
        """The source of the operation being dispatched, and whether it is part of a backward pass."""
        if self._held is not None:
            return self._held
        here = user_source()
        node = torch._C._current_autograd_node()
        if node is None:
            self._fill(here)
            return here, False
        index = node._sequence_nr() - self._first
        found = self._lines[index] if 0 <= index < len(self._lines) else here
        self._fill(found)  # a backward operation may itself be differentiated
        return found, True

    def _fill(self, source: Source) -> None:
        """The nodes made since the last operation belong to this one: an operation makes one for each level of grad,
        before it is dispatched."""
        now = _get_sequence_nr()
        self._lines += [source] * (now - self._next)
        self._next = now
