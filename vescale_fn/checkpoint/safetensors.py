"""safetensors files: read by slices, written together by all processes.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a header in JSON, the header
with dtype, shape and byte range of each tensor, and the tensors row by row. A rank's part of a tensor is runs of bytes,
and only these are read.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vescale_fn.array import Array
from vescale_fn.checkpoint import messages
from vescale_fn.checkpoint.buffer import Buffer, fill, in_buffer, put, region
from vescale_fn.checkpoint.lane import lane
from vescale_fn.checkpoint.manifest import sync_folder
from vescale_fn.checkpoint.messages import CheckpointError
from vescale_fn.checkpoint.parts import parts_of_ranks, parts_of_tensor, without_pending
from vescale_fn.checkpoint.targets import described, kind_text, room, targets
from vescale_fn.move import move_to
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.tracing import ShapeDtype
from vescale_fn.tree import flatten_with_paths, unflatten

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SECTOR = 512  # bytes: gaps that are smaller are read with what is around them

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. at: byte where it begins."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    at: int


# ---- runs of bytes


@dataclass(frozen=True)
class Block:
    """A box of a tensor that consists of equal runs of bytes, `size` each, at these places after its beginning."""

    start: Shape
    shape: Shape
    at: tuple[int, ...]
    size: int


def blocks(whole: Shape, start: Shape, shape: Shape, itemsize: int, gap: int = 0) -> Iterator[Block]:
    """The box (start, shape) of a tensor of shape `whole` in blocks of bounded size. Where less than `gap` bytes lie
    between two runs, the blocks have these bytes, too.

    >>> list(blocks((4, 6), (0, 2), (2, 3), 1))
    [Block(start=(0, 2), shape=(2, 3), at=(2, 8), size=3)]
    """
    if not math.prod(shape):
        return
    whole, start, shape = (1, 1, *whole), (0, 0, *start), (1, 1, *shape)  # so that runs have rows, and rows a place
    strides = [itemsize * math.prod(whole[d + 1 :]) for d in range(len(whole))]
    cut = len(whole) - 1  # the last dim of which a run has a part only
    while cut > 1 and (shape[cut] == whole[cut] or (whole[cut] - shape[cut]) * strides[cut] < gap):
        start = (*start[:cut], 0, *start[cut + 1 :])
        shape = (*shape[:cut], whole[cut], *shape[cut + 1 :])
        cut -= 1
    length = min(shape[cut], in_buffer(strides[cut]))
    rows = min(shape[cut - 1], in_buffer(length * strides[cut]))
    outer = (range(a, a + n) for a, n in zip(start[: cut - 1], shape[: cut - 1]))
    steps = (range(start[cut - 1], start[cut - 1] + shape[cut - 1], rows),)
    for *above, row, a in itertools.product(*outer, *steps, range(start[cut], start[cut] + shape[cut], length)):
        count = min(rows, start[cut - 1] + shape[cut - 1] - row)
        n = min(length, start[cut] + shape[cut] - a)
        first = sum(i * s for i, s in zip((*above, row, a), strides))
        yield Block(
            (*above, row, a, *start[cut + 1 :])[2:],
            (*(1 for _ in above), count, n, *shape[cut + 1 :])[2:],
            tuple(first + i * strides[cut - 1] for i in range(count)),
            n * strides[cut],
        )


# ---- reading


def load_safetensors(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    like: Any = None,
    shardings: Any = None,
    *,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    mesh: Mesh | None = None,
    **sizes: int | Sequence[int],
) -> Any:
    """Tensors from safetensors files, each process reading only the slices that its ranks hold.

    files: a glob ("llama/*.safetensors"), or several.
    like, shardings, mesh, sizes: as for `load`; by default all tensors come whole, in a dict by name.
    rename: from the path of a leaf in `like` to its name in the files; a mapping leaves other paths as they are.
    Leaves of `like` that are no tensors are returned as they are. Raises CheckpointError when a file is none or is cut
    short, a tensor is missing, or has another dtype or shape.

    >>> import tempfile, torch, vescale_fn as vf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vf.save_safetensors(folder + "/w.safetensors", {"w": torch.arange(4.)})
    ...     vf.load_safetensors(folder + "/*.safetensors", shardings={"w": "d/tp"}, mesh=vf.make_mesh(tp=2))
    {'w': Array(f32[4] 'd/tp' on tp=2; rank 0 [0:2] [0, 1])}
    """
    patterns = [os.fspath(f) for f in ([files] if isinstance(files, (str, os.PathLike)) else files)]
    shown = ", ".join(patterns)
    entries = _entries(patterns)
    if like is None:
        like = {name: ShapeDtype(e.shape, e.dtype) for name, e in entries.items()}
    paths, leaves, treedef = flatten_with_paths(like)
    names = {p: _renamed(p, rename) for p, x in zip(paths, leaves) if described(x) is not None}
    missing = [(path, name) for path, name in names.items() if name not in entries]
    if missing:
        raise CheckpointError(messages.missing_tensors(shown, missing, list(entries)))
    for path, leaf in zip(paths, leaves):
        if path in names:
            _check(path, leaf, names[path], entries[names[path]])
    found = list(leaves)
    with _Files() as opened:
        for i, goal in enumerate(targets(like, shardings, mesh, "vf.load_safetensors", **sizes)):
            if goal is not None:
                place = room(goal)
                for start, view in place.parts.views.items():
                    opened.read(entries[names[paths[i]]], start, view)
                found[i] = place.value()
    return unflatten(treedef, found)


def _renamed(path: str, rename: Mapping[str, str] | Callable[[str], str] | None) -> str:
    if rename is None:
        return path
    return rename.get(path, path) if isinstance(rename, Mapping) else rename(path)


def _check(path: str, leaf: Any, name: str, e: Entry) -> None:
    wanted, there = kind_text(described(leaf)), kind_text((e.shape, e.dtype))
    if wanted != there:
        raise CheckpointError(messages.other_tensor(path, wanted, name, e.file, there))


def _entries(patterns: Sequence[str]) -> dict[str, Entry]:
    """The tensors of all files, by name."""
    found: dict[str, Entry] = {}
    for pattern in patterns:
        files = sorted(glob(pattern, recursive=True))
        if not files:
            raise CheckpointError(messages.no_files(pattern))
        for file in map(Path, files):
            for name, entry in _header(file).items():
                if name in found:
                    raise CheckpointError(messages.twice(name, found[name].file, file))
                found[name] = entry
    return found


def _header(file: Path) -> dict[str, Entry]:
    """The tensors of one file."""
    try:
        with file.open("rb", buffering=0) as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            text = f.read(length) if length < size else b""
    except OSError as e:
        raise CheckpointError(messages.cannot_read(file, e, "vf.load_safetensors")) from None
    try:
        header = json.loads(text)
        begin = 8 + length
        found = {
            name: Entry(file, DTYPES[x["dtype"]], tuple(x["shape"]), begin + x["data_offsets"][0])
            for name, x in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, AttributeError):
        raise CheckpointError(messages.not_safetensors(file, "it has no header")) from None
    except KeyError as e:
        raise CheckpointError(messages.not_safetensors(file, f"its header has {e}")) from None
    ends = [e.at + math.prod(e.shape) * e.dtype.itemsize for e in found.values()]
    if max(ends, default=0) > size:
        raise CheckpointError(messages.wrong_size(file, size, max(ends), list(found)))
    return found


class _Files:
    """Files that are open while tensors are read. read: bytes so far."""

    def __init__(self) -> None:
        self.files: dict[Path, int] = {}
        self.buffer = Buffer()
        self.read_bytes = 0

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: Any) -> None:
        for fd in self.files.values():
            os.close(fd)

    def read(self, entry: Entry, start: Shape, out: Tensor) -> None:
        """Fill `out` with the box of a tensor that begins at `start`."""
        if entry.file not in self.files:
            self.files[entry.file] = os.open(entry.file, os.O_RDONLY)
        fd, shape = self.files[entry.file], tuple(out.shape)
        for b in blocks(entry.shape, start, shape, entry.dtype.itemsize, SECTOR):
            x, data = self.buffer.take(b.shape, entry.dtype)
            for i, at in enumerate(b.at):
                count = fill(fd, data[i * b.size : (i + 1) * b.size], entry.at + at)
                if count < b.size:
                    raise CheckpointError(messages.not_safetensors(entry.file, "it ended while it was read"))
            # a block may reach further than the box
            low = tuple(map(max, start, b.start))
            high = tuple(min(s + n, t + m) for s, n, t, m in zip(start, shape, b.start, b.shape))
            n = tuple(h - a for a, h in zip(low, high))
            there, here = (tuple(a - c for a, c in zip(low, corner)) for corner in (start, b.start))
            out[region(there, n)].copy_(x[region(here, n)])


# ---- writing


def save_safetensors(path: str | os.PathLike[str], tree: Any, metadata: Mapping[str, str] | None = None) -> None:
    """Write a pytree of Arrays and tensors to one safetensors file, whole tensors by dotted path.

    Every process writes the slices that its ranks hold, into the same file, which appears under its name when it is
    complete; nothing is gathered. All processes must call it.
    metadata: texts for the header.
    Raises CheckpointError for a leaf that is no tensor, or of a dtype that the format does not have.

    >>> import tempfile, torch, vescale_fn as vf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vf.save_safetensors(folder + "/w.safetensors", {"layers": [torch.ones(2)]})
    ...     vf.load_safetensors(folder + "/w.safetensors")
    {'layers.0': tensor([1., 1.])}
    """
    file, together = Path(path).absolute(), lane()
    together.clear()
    values = dict(zip(*flatten_with_paths(tree)[:2]))
    header, places = _layout_of_file(values, metadata)
    values = {p: move_to(x, without_pending(x.layout)) if isinstance(x, Array) else x for p, x in values.items()}
    fresh = file.with_name(f".{file.name}.unfinished")
    try:
        together.agree(lambda: _begin(fresh, header))
        together.all(lambda: _write_own(fresh, values, places, together.process))
        together.agree(lambda: _end(fresh, file))
    except OSError as e:
        if together.process == 0:
            with suppress(OSError):
                fresh.unlink()
        raise CheckpointError(messages.cannot_write_file(file, e)) from None


def _layout_of_file(values: Mapping[str, Any], metadata: Mapping[str, str] | None) -> tuple[bytes, dict[str, int]]:
    """The beginning of the file, and the byte where each tensor begins."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets, end = {}, 0
    for path, x in values.items():
        kind = described(x)
        if kind is None or not isinstance(x, (Array, Tensor)):
            raise CheckpointError(messages.cannot_store(path, f"of type {type(x).__name__}"))
        shape, dtype = kind
        if dtype not in NAMES:
            raise CheckpointError(messages.cannot_store(path, f"of dtype {dtype}"))
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[path], offsets[path] = (
            {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]},
            begin,
        )
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {path: begin + at for path, at in offsets.items()}


def _begin(file: Path, header: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header)


def _end(fresh: Path, file: Path) -> None:
    fresh.replace(file)
    sync_folder(file.parent)


def _write_own(file: Path, values: Mapping[str, Any], places: Mapping[str, int], process: int) -> None:
    """Write what this process holds and no process before it does."""
    fd, buffer = os.open(file, os.O_WRONLY), Buffer()
    try:
        for path, x in values.items():
            if isinstance(x, Array):
                first = {group[0] for group in x.layout.replicas()}
                held = {r: s for r, s in zip(x.mesh.local_ranks, x.shards) if r in first}
                parts = parts_of_ranks(x.layout, held, x.dtype)
            elif process == 0:
                parts = parts_of_tensor(x.detach())
            else:
                continue
            for start, view in parts.views.items():
                for b in blocks(parts.shape, start, tuple(view.shape), x.dtype.itemsize):
                    y, data = buffer.take(b.shape, x.dtype)
                    y.copy_(view[region(tuple(a - c for a, c in zip(b.start, start)), b.shape)])
                    for i, at in enumerate(b.at):
                        put(fd, data[i * b.size : (i + 1) * b.size], places[path] + at)
        os.fsync(fd)
    finally:
        os.close(fd)
