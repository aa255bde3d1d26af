"""Data files of checkpoints: the storage of torch.distributed.checkpoint, with tiles, checksums and a count of bytes.

Each process writes one file, `data-<save>-<process>.bin`: boxes one after the other, each in the tiles of
`tiles.tiling`, as raw bytes in the order of this machine.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from vescale_fn.checkpoint import manifest, messages
from vescale_fn.checkpoint.buffer import Buffer, fill, in_buffer, put, region
from vescale_fn.checkpoint.manifest import Manifest, Part, Stored
from vescale_fn.checkpoint.messages import CheckpointError
from vescale_fn.checkpoint.tiles import tiling

# ---- writing


@dataclass(eq=False)
class Writer(StorageWriter):
    """Writes the boxes of this process, and, on the process that coordinates, the manifest.

    leaves: what the manifest says of each leaf; tensors still without parts.
    """

    folder: Path
    leaves: Mapping[str, Any]
    own: Path | None = None  # the file of this process
    buffer: Buffer = field(default_factory=Buffer)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.folder.mkdir(parents=True, exist_ok=True)
            manifest.clear_up(self.folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.save = secrets.token_hex(4)
        return [replace(p, storage_data=f"data-{self.save}-{i:05}.bin") for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.own = self.folder / plan.storage_data
        results = []
        with self.own.open("xb", buffering=0) as f:
            for item in plan.items:
                x = planner.resolve_data(item)
                assert isinstance(x, Tensor)
                offset, crcs = f.tell(), self._write(f.fileno(), x)
                part = Part(tuple(item.index.offset or ()), tuple(x.shape), self.own.name, offset, manifest.pack(crcs))
                results.append(WriteResult(item.index, x.nbytes, part))
            os.fsync(f.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, fd: int, x: Tensor) -> list[int]:
        """Append a box; the checksums of its tiles."""
        t, crcs = tiling(tuple(x.shape), x.itemsize), []
        for run in t.runs((0,) * x.ndim, t.shape, in_buffer(t.tile_numel * x.itemsize)):
            y, data = self.buffer.take(run.shape, x.dtype)
            y.copy_(x[region(run.start, run.shape)])
            nbytes = len(data) // run.count
            crcs += [zlib.crc32(data[i * nbytes : (i + 1) * nbytes]) for i in range(run.count)]
            put(fd, data)
        return crcs

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts: dict[str, list[Part]] = {}
        files: dict[str, int] = {}
        for r in (r for process in results for r in process):
            part: Part = r.storage_data
            parts.setdefault(r.index.fqn, []).append(part)
            files[part.file] = files.get(part.file, 0) + r.size_in_bytes
        leaves = {
            path: replace(x, parts=tuple(parts.get(path, ()))) if isinstance(x, Stored) else x
            for path, x in self.leaves.items()
        }
        manifest.commit(self.folder, Manifest(self.save, leaves, files))

    def give_up(self) -> None:
        """Remove what this process has written of a save that failed."""
        if self.own is not None:
            self.own.unlink(missing_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


# ---- reading


class Gone(CheckpointError):
    """A data file that is not there: of a checkpoint that is damaged, or that another has replaced meanwhile."""


@dataclass(eq=False)
class Reader(StorageReader):
    """Reads the tiles that hold wanted parts, and checks them. read: bytes of data so far."""

    folder: Path
    manifest: Manifest
    read: int = 0
    buffer: Buffer = field(default_factory=Buffer)
    files: dict[str, int] = field(default_factory=dict)  # open files

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({path: _described(x) for path, x in self.manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.parts = {(path, p.start): p for path, x in self.manifest.tensors.items() for p in x.parts}

    def _part(self, item: ReadItem) -> Part:
        return self.parts[item.storage_index.fqn, tuple(item.storage_index.offset or ())]

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Open all that will be read: open files stay readable when a newer checkpoint replaces this one."""
        for name in dict.fromkeys(self._part(item).file for item in plan.items):
            self.files[name] = self._open(name)
        return plan

    def _held_by(self, name: str) -> list[str]:
        return [path for path, x in self.manifest.tensors.items() if any(part.file == name for part in x.parts)]

    def _open(self, name: str) -> int:
        file, expected = self.folder / name, self.manifest.files[name]
        try:
            fd = os.open(file, os.O_RDONLY)
        except FileNotFoundError:
            raise Gone(messages.missing_file(file, self._held_by(name))) from None
        except OSError as e:
            raise CheckpointError(messages.cannot_read(file, e)) from None
        if (size := os.fstat(fd).st_size) != expected:
            os.close(fd)
            raise CheckpointError(messages.wrong_size(file, size, expected, self._held_by(name)))
        return fd

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in sorted(plan.items, key=lambda i: (self._part(i).file, self._part(i).offset)):
            self._read(item, planner.resolve_tensor(item))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, out: Tensor) -> None:
        """Fill `out` with a part of a box: the piece of each run of tiles that lies in it."""
        part, leaf = self._part(item), item.storage_index.fqn
        t = tiling(part.shape, out.itemsize)
        nbytes, crcs = t.tile_numel * out.itemsize, manifest.unpack(part.crcs)
        start, shape = tuple(item.storage_offsets), tuple(item.lengths)
        for run in t.runs(start, shape, in_buffer(nbytes)):
            x, data = self.buffer.take(run.shape, out.dtype)
            at = part.offset + run.first * nbytes
            self._fill(part.file, at, data)
            for i in range(run.count):
                if zlib.crc32(data[i * nbytes : (i + 1) * nbytes]) != crcs[run.first + i]:
                    row = (run.start[0] + i * t.tile[0], *run.start[1:]) if run.start else ()
                    index = ", ".join(f"{s + a}:{s + a + n}" for s, a, n in zip(part.start, row, t.tile))
                    where = self.folder / part.file
                    raise CheckpointError(
                        messages.corrupt_data(where, at + i * nbytes, at + (i + 1) * nbytes, leaf, index)
                    )
            low = tuple(max(a, b) for a, b in zip(start, run.start))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, shape, run.start, run.shape))
            size = tuple(b - a for a, b in zip(low, high))
            there = tuple(a - b for a, b in zip(low, start))
            here = tuple(a - b for a, b in zip(low, run.start))
            out[region(there, size)].copy_(x[region(here, size)])

    def _fill(self, name: str, at: int, data: memoryview) -> None:
        self.read += len(data)
        if (count := fill(self.files[name], data, at)) < len(data):
            raise CheckpointError(
                messages.wrong_size(self.folder / name, at + count, self.manifest.files[name], self._held_by(name))
            )

    def close(self) -> None:
        for fd in self.files.values():
            os.close(fd)
        self.files.clear()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


def _described(x: Stored) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.start), torch.Size(p.shape)) for p in x.parts]
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, x.dtype)), torch.Size(x.shape), chunks)
