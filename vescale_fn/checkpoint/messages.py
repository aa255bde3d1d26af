"""The text of errors about checkpoints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from vescale_fn.errors import one_line


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or put where it was asked for; the text says which file or leaf."""


# ---- files


def no_checkpoint(folder: Path, exists: bool, unfinished: bool) -> str:
    if unfinished:
        return (
            f"There is no checkpoint in {folder}: a save began there and did not end, and nothing was there before. "
            "Load an earlier one, or start afresh."
        )
    found = "has no checkpoint.json" if exists else "does not exist"
    return f"There is no checkpoint in {folder}: it {found}. Give the path that was given to vf.save."


def newer_format(folder: Path, version: int, known: int) -> str:
    return (
        f"The checkpoint in {folder} has format version {version}, and this vescale_fn reads versions up to {known}. "
        "Load it with the newer vescale_fn that wrote it, or upgrade."
    )


def corrupt_manifest(file: Path) -> str:
    return f"{file} is corrupt: its checksum does not fit its contents. Load an earlier checkpoint."


def missing_file(file: Path, holds: Sequence[str]) -> str:
    return (
        f"{file} is missing. It holds parts of {some(holds)}. "
        "Copy all files of a checkpoint together, or load an earlier one."
    )


def wrong_size(file: Path, found: int, expected: int, holds: Sequence[str]) -> str:
    how = "is truncated" if found < expected else "is not the file that was saved"
    return f"{file} {how}: it has {found:,} bytes of {expected:,}. It holds parts of {some(holds)}. {EARLIER}"


def corrupt_data(file: Path, start: int, stop: int, leaf: str, index: str) -> str:
    return (
        f"{file} is corrupt: bytes {start:,} to {stop:,}, which hold {leaf}[{index}], do not fit their checksum. "
        f"{EARLIER}"
    )


EARLIER = "Load an earlier checkpoint, or another copy of this one."


def cannot_read(file: Path, error: OSError, what: str = "vf.load") -> str:
    if isinstance(error, PermissionError):
        return f"{what}: there is no permission to read {file}."
    return f"{what}: {file} cannot be read: {error.strerror}."


def disk_full(folder: Path, process: str) -> str:
    return (
        f"vf.save: the disk of {folder} is full{process}. What this save had written is removed, and the checkpoint "
        "that was there before, if any, is intact. Make room, or save elsewhere."
    )


def no_permission(folder: Path, process: str) -> str:
    return f"vf.save: there is no permission to write to {folder}{process}. Nothing there has changed."


def cannot_write(folder: Path, process: str, error: object) -> str:
    return (
        f"vf.save: saving to {folder} failed{process}: {error}. "
        "The checkpoint that was there before, if any, is intact."
    )


def lost_result(folder: Path, error: BaseException) -> str:
    return f"A save to {folder} failed, and nobody asked for its result: {error}"


# ---- trees


def unknown_leaf(path: str, kind: str) -> str:
    return (
        f"vf.save: {path or 'the tree'} is of type {kind}. Leaves must be Arrays, dense tensors, NumPy arrays, "
        "numbers, strings, bytes or None: convert it, or leave it out of the tree."
    )


def distributed_leaf(path: str) -> str:
    return (
        f"vf.save: {path or 'the tree'} is a DTensor. Make it an Array, which shares its memory: vf.Array.from_dtensor."
    )


def same_path(path: str) -> str:
    return (
        f"vf.save: two leaves of the tree have the path {path!r}, by which leaves are saved. "
        "Rename a key: dots in keys look like nesting."
    )


def other_tree(folder: object, differences: Sequence[str], partial: bool) -> str:
    first = differences[:5]
    many = f"the first {len(first)} of {len(differences)} differences" if len(differences) > 5 else "the differences"
    hint = "" if partial else " partial=True leaves out what like= does not have."
    lines = "".join(f"\n  {d}" for d in first)
    return (
        f"vf.load: {folder} does not hold the tree of like=; {many}:{lines}\n"
        f"Give like= the form of what was saved.{hint}"
    )


def not_in_checkpoint(path: str, names: Iterable[str]) -> str:
    return f"{path or 'the tree'} is in like= only{near(path, names)}"


def not_in_like(path: str, names: Iterable[str]) -> str:
    return f"{path or 'the tree'} is in the checkpoint only{near(path, names)}"


def other_type(path: str, wanted: str, found: str) -> str:
    return f"{path or 'the tree'} is {wanted} in like=, {found} in the checkpoint"


def no_mesh(what: str) -> str:
    return (
        f"{what}: shardings= are given, and nothing says on which mesh. Pass mesh=vf.make_mesh(...), a "
        "vf.NamedSharding in the place of a spec, or Arrays on a mesh in like=."
    )


def abstract_mesh(what: str, path: str, mesh: object) -> str:
    return (
        f"{what}: {path or 'like='} is an Array on the abstract mesh {mesh}, which holds nothing. "
        "Pass mesh=vf.make_mesh(...) to say where the values go."
    )


# ---- safetensors


def no_files(pattern: str) -> str:
    return f"vf.load_safetensors: no file matches {pattern}."


def not_safetensors(file: Path, why: str) -> str:
    return f"{file} is no safetensors file: {why}."


def missing_tensors(pattern: str, missing: Sequence[tuple[str, str]], names: Sequence[str]) -> str:
    first = missing[:5]
    lines = "".join(
        f"\n  {path}" + (f", looked for as {name}" if name != path else "") + near(name, names) for path, name in first
    )
    count = f"{len(missing)} tensors of like= are" if len(missing) > 1 else "a tensor of like= is"
    more = f"; the first {len(first)}" if len(missing) > 5 else ""
    return (
        f"vf.load_safetensors: {count} not in {pattern}{more}:{lines}\n"
        "rename= takes a path of like= to the name in the files."
    )


def twice(name: str, one: Path, other: Path) -> str:
    return f"vf.load_safetensors: {name} is in {one} and in {other}. Name the files of one model only."


def other_tensor(path: str, wanted: str, name: str, file: Path, there: str) -> str:
    return (
        f"vf.load_safetensors: {path} is {wanted} in like=, but {name} in {file} is {there}. "
        "Give like= the dtype and shape of the file, and convert afterwards."
    )


def cannot_write_file(file: Path, error: OSError) -> str:
    return f"vf.save_safetensors: {file} cannot be written: {error.strerror}. A file that was there before is intact."


def cannot_store(path: str, dtype: str) -> str:
    return f"vf.save_safetensors: {path} is {dtype}, which the format does not have. Convert it, or leave it out."


# ---- modules


def other_module(module: str, missing: Sequence[str], unknown: Sequence[str], names: Sequence[str]) -> str:
    lines = [f"\n  {name} is missing{near(name, unknown)}" for name in missing]
    lines += [f"\n  {name} is unknown{near(name, names)}" for name in unknown]
    return f"vf.state_dict: these are not the values of {module}:{''.join(lines[:5])}"


# ---- pieces


def near(path: str, names: Iterable[str]) -> str:
    """Names that resemble a path, if any."""
    found = difflib.get_close_matches(path, list(names), n=2, cutoff=0.7)
    return f" (near: {one_line(found)})" if found else ""


def some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return one_line(paths[:3]) + more
