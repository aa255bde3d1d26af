"""The one file that says what a checkpoint holds and where. A checkpoint exists from the moment its manifest does.

Two lines of JSON: the format with its version and a checksum of the second line, and the contents. Nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vescale_fn.checkpoint import messages
from vescale_fn.checkpoint.messages import CheckpointError

NAME = "checkpoint.json"
FORMAT, VERSION = "vescale_fn checkpoint", 1
DATA = re.compile(r"data-[0-9a-f]{8}-\d{5}\.bin")
OURS = re.compile(DATA.pattern + r"|checkpoint\.json\.[0-9a-f]{8}")  # but for the manifest itself

Value = bool | int | float | str | bytes | None


@dataclass(frozen=True)
class Part:
    """A box in a data file, in tiles; `crcs`: CRC-32 of each tile, packed by `pack`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    crcs: str


@dataclass(frozen=True)
class Stored:
    """A tensor: torch's name of its dtype, global shape, and parts that tile it."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint. save: a name that differs between saves. leaves: by path, in the order of the tree. files:
    sizes in bytes."""

    save: str
    leaves: Mapping[str, Stored | Value]
    files: Mapping[str, int]

    @property
    def tensors(self) -> dict[str, Stored]:
        return {path: x for path, x in self.leaves.items() if isinstance(x, Stored)}

    def text(self) -> str:
        leaves = {path: _coded(x) for path, x in self.leaves.items()}
        body = json.dumps({"save": self.save, "leaves": leaves, "files": dict(self.files)})
        head = {"format": FORMAT, "version": VERSION, "crc": zlib.crc32(body.encode())}
        return f"{json.dumps(head)}\n{body}\n"


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError where there is none, or none that can be understood."""
    try:
        data = (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        unfinished = folder.is_dir() and any(DATA.fullmatch(p.name) for p in folder.iterdir())
        raise CheckpointError(messages.no_checkpoint(folder, folder.exists(), unfinished)) from None
    except OSError as e:
        raise CheckpointError(messages.cannot_read(folder / NAME, e)) from None
    first, _, rest = data.partition(b"\n")
    try:
        head = json.loads(first)
        version = head["version"] if head["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError):
        version = None
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(messages.newer_format(folder, version, VERSION))
    if not isinstance(version, int) or zlib.crc32(rest.removesuffix(b"\n")) != head.get("crc"):
        raise CheckpointError(messages.corrupt_manifest(folder / NAME))
    body = json.loads(rest)
    return Manifest(body["save"], {path: _decoded(x) for path, x in body["leaves"].items()}, body["files"])


# ---- leaves as JSON: every kind has its own key, and numbers come back bit for bit


def _coded(x: Stored | Value) -> Any:
    if isinstance(x, Stored):
        return {"tensor": asdict(x)}
    if isinstance(x, float):
        return {"float": x.hex()}
    if isinstance(x, bytes):
        return {"bytes": base64.b64encode(x).decode()}
    return {"value": x}  # bool, int, str and None are what they are in JSON


def _decoded(x: Any) -> Stored | Value:
    ((kind, value),) = x.items()
    if kind == "tensor":
        parts = tuple(
            Part(tuple(p["start"]), tuple(p["shape"]), p["file"], p["offset"], p["crcs"]) for p in value["parts"]
        )
        return Stored(value["dtype"], tuple(value["shape"]), parts)
    if kind == "float":
        return float.fromhex(value)
    found: Value = base64.b64decode(value) if kind == "bytes" else value
    return found


def pack(crcs: Sequence[int]) -> str:
    """Checksums as text.

    >>> unpack(pack([1, 2**32 - 1]))
    (1, 4294967295)
    """
    return base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode()


def unpack(text: str) -> tuple[int, ...]:
    data = base64.b64decode(text)
    return struct.unpack(f"<{len(data) // 4}I", data)


# ---- the moment of a save


def commit(folder: Path, manifest: Manifest) -> None:
    """Make this the checkpoint: all at once, and for good when this returns. Then remove the files of earlier ones."""
    fresh = folder / f"{NAME}.{manifest.save}"
    with fresh.open("w") as f:
        f.write(manifest.text())
        f.flush()
        os.fsync(f.fileno())
    sync_folder(folder)  # the names of the data files, before the manifest that names them
    fresh.replace(folder / NAME)
    sync_folder(folder)
    sweep(folder, manifest.files)


def clear_up(folder: Path) -> None:
    """Remove what killed saves left, so that the next one has room."""
    try:
        keep = read(folder).files if (folder / NAME).exists() else {}
    except CheckpointError:
        return  # damaged: whoever looks for the fault finds everything in its place
    sweep(folder, keep)


def sweep(folder: Path, keep: Mapping[str, int]) -> None:
    """Remove data files and fresh manifests but those to keep."""
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and path.name not in keep:
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
