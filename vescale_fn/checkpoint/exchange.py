"""Between the parts that processes hold and a folder, by torch.distributed.checkpoint: it plans who reads and writes
what, and tells all processes of a failure of one."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from vescale_fn.checkpoint import manifest, messages
from vescale_fn.checkpoint.files import Gone, Reader, Writer
from vescale_fn.checkpoint.lane import Lane
from vescale_fn.checkpoint.manifest import Manifest, Stored, Value
from vescale_fn.checkpoint.messages import CheckpointError
from vescale_fn.checkpoint.parts import Parts


class SavePlanner(DefaultSavePlanner):
    """Plans to save a flat dict of Parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return found


class LoadPlanner(DefaultLoadPlanner):
    """Plans to load into a flat dict of Parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return found


def write(folder: Path, leaves: Mapping[str, Stored | Value], parts: dict[str, Parts], together: Lane) -> None:
    """Save the parts, and the leaves in the manifest. Raises CheckpointError, on all processes."""
    writer, group = Writer(folder, leaves), together.group
    try:
        _save_state_dict(parts, writer, process_group=group, no_dist=group is None, planner=SavePlanner())
    except CheckpointException as e:
        writer.give_up()
        raise _failure(folder, together, *_cause(e)) from None


def read(folder: Path, found: Manifest, parts: dict[str, Parts], together: Lane) -> bool:
    """Fill the parts. False when another checkpoint has taken the place of the one that was found. Raises
    CheckpointError, on all processes."""
    reader, group = Reader(folder, found), together.group
    try:
        _load_state_dict(parts, reader, process_group=group, no_dist=group is None, planner=LoadPlanner())
    except CheckpointException as e:
        gone = any(isinstance(error, Gone) for error, _ in e.failures.values())
        if gone and together.agree(lambda: manifest.read(folder)).save != found.save:
            return False
        raise _cause(e)[1] from None
    finally:
        reader.close()
    return True


def _cause(failures: CheckpointException) -> tuple[int, BaseException]:
    """The first process that failed, and how."""
    process = min(failures.failures)
    return process, failures.failures[process][0]


def _failure(folder: Path, together: Lane, process: int, error: BaseException) -> BaseException:
    """What a failed save raises."""
    if not isinstance(error, Exception):
        return error  # KeyboardInterrupt
    on = "" if together.group is None else f" (process {process})"
    if isinstance(error, PermissionError):
        return CheckpointError(messages.no_permission(folder, on))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(messages.disk_full(folder, on))
    return CheckpointError(messages.cannot_write(folder, on, error))
