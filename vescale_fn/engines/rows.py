"""Rows that travel in numbers known at run time only: the kernel of `RaggedAllToAll`.

Each member says where the rows it sends begin, how many they are, and where they land; before the rows travel, every
receiver hears how many come, and where to. Who lands on the rows of another overwrites them, in the order of members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

VECTORS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@dataclass(frozen=True)
class Traffic:
    """What one member of a RaggedAllToAll says, one number for each member. See `RaggedAllToAll`."""

    member: int
    input_offsets: list[int]
    send_sizes: list[int]
    output_offsets: list[int]
    recv_sizes: list[int]

    def sent(self, operand: Tensor) -> list[Tensor]:
        """The rows that go to each member."""
        return [operand.narrow(0, a, k) for a, k in zip(self.input_offsets, self.send_sizes)]

    def told(self, device: torch.device) -> list[Tensor]:
        """What each member must know before its rows arrive: how many they are, and where they land."""
        return list(torch.tensor([self.send_sizes, self.output_offsets], device=device).T.contiguous())


def traffic(operands: Sequence[Tensor], member: int, n: int) -> Traffic:
    """What the operands of a member of a group of n say.

    Raises ValueError when a vector does not have one int for each member, or names rows that the operand has not.
    """
    operand, output, *vectors = operands
    if not operand.ndim or operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:] or not output.ndim:
        raise ValueError(
            "ragged_all_to_all moves rows (of dim 0) from operands into outputs of the same dtype and row shape, not "
            f"from {operand.dtype} of shape {list(operand.shape)} into {output.dtype} of shape {list(output.shape)}."
        )
    for name, x in zip(VECTORS, vectors):
        if x.shape != (n,) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise ValueError(
                f"ragged_all_to_all needs {name} to be a vector of {n} integers, one for each rank, not a tensor of "
                f"shape {list(x.shape)} and {x.dtype}."
            )
    said = Traffic(member, *(x.tolist() for x in vectors))
    for i, (start, size) in enumerate(zip(said.input_offsets, said.send_sizes)):
        if start < 0 or size < 0 or start + size > len(operand):
            raise ValueError(
                f"ragged_all_to_all on the rank at index {member}: input_offsets[{i}] = {start} and send_sizes[{i}] = "
                f"{size} name rows that an operand of {len(operand)} rows does not have."
            )
    return said


def land(out: Tensor, places: Sequence[tuple[int, int]], rows: Sequence[Tensor]) -> Tensor:
    """Write the rows from each member where its (size, offset) says. Returns `out`."""
    for (size, start), piece in zip(places, rows):
        out.narrow(0, start, size).copy_(piece)
    return out


def check_arrival(output: Tensor, said: Traffic, places: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError when a member is told of rows that it does not expect, or has no place for."""
    for i, ((size, start), expected) in enumerate(zip(places, said.recv_sizes)):
        if size != expected:
            raise ValueError(
                f"ragged_all_to_all on the rank at index {said.member}: recv_sizes[{i}] is {expected}, but the rank at "
                f"index {i} sends {size} rows here. recv_sizes must be what the others' send_sizes say: exchange "
                "them with an all_to_all."
            )
        if start < 0 or start + size > len(output):
            raise ValueError(
                f"ragged_all_to_all on the rank at index {said.member}: the rank at index {i} sends {size} rows to "
                f"row {start}, but the output has {len(output)} rows. output_offsets are positions in the receiver's "
                "output."
            )


def ragged_all_to_all(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What each member gets, for operands [member][operand]."""
    everyone = range(len(rows))
    said = [traffic(row, m, len(rows)) for m, row in enumerate(rows)]
    sent = [s.sent(row[0]) for s, row in zip(said, rows)]
    results = []
    for j in everyone:
        output, places = rows[j][1], [(said[i].send_sizes[j], said[i].output_offsets[j]) for i in everyone]
        check_arrival(output, said[j], places)
        out = output.clone(memory_format=torch.contiguous_format)
        results.append(land(out, places, [sent[i][j] for i in everyone]))
    return results
