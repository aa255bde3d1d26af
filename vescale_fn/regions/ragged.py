"""`ragged_all_to_all` and its derivative: rows go where data says, and their cotangents come back the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fn.regions import moves, ops, texts

Sizes = tuple[Tensor, Tensor, Tensor, Tensor]  # input offsets, send sizes, output offsets, recv sizes


def exchange_rows(axes: str, operand: Tensor, output: Tensor, sizes: Sizes) -> Tensor:
    """Rows of `operand` to all ranks, into a copy of `output`, under any transform."""
    result: Tensor = RaggedAllToAll.apply(operand, output, *sizes, axes)  # type: ignore[no-untyped-call]
    return result


class RaggedAllToAll(torch.autograd.Function):
    """Linear in operand and output together."""

    @staticmethod
    def forward(
        operand: Tensor, output: Tensor, starts: Tensor, sends: Tensor, lands: Tensor, receives: Tensor, axes: str
    ) -> Tensor:
        result: Tensor = ops.RAGGED_ALL_TO_ALL(operand, output, starts, sends, lands, receives, axes)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        operand, landing, *sizes, axes = inputs
        ctx.axes, ctx.rows, ctx.landing_rows = axes, operand.shape[0], landing.shape[0]
        ctx.set_materialize_grads(False)  # zeros that autograd makes belong to no rank
        ctx.save_for_backward(*sizes)
        ctx.save_for_forward(*sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 7
        starts, sends, lands, receives = ctx.saved_tensors
        swap = moves.AllToAll(ctx.axes, 0, 0, "V->V")  # what the others said about this rank
        landed, started = swap(lands), swap(starts)
        zeros = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        of_operand = exchange_rows(ctx.axes, grad, zeros, (landed, receives, started, sends))
        return of_operand, _outside(grad, landed, receives), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, operand: Tensor | None, output: Tensor | None, *_: None) -> Any:
        if operand is None:
            assert output is not None
            operand = output.new_zeros((ctx.rows, *output.shape[1:]))
        if output is None:
            output = operand.new_zeros((ctx.landing_rows, *operand.shape[1:]))
        return exchange_rows(ctx.axes, operand, output, ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        if any(d is not None for d in in_dims[2:6]):
            raise NotImplementedError(texts.batched_sizes())
        rows = [
            x.unsqueeze(-1).expand(*x.shape, info.batch_size) if d is None else x.movedim(d, -1)
            for x, d in zip(args[:2], in_dims)
        ]
        return exchange_rows(args[6], rows[0], rows[1], args[2:6]), rows[0].ndim - 1


def _outside(grad: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """grad, with zeros in the rows that came from others."""
    row = torch.arange(grad.shape[0], device=grad.device)[:, None]
    written = ((row >= starts) & (row < starts + sizes)).any(1)
    return torch.where(written.reshape(-1, *[1] * (grad.ndim - 1)), 0.0, grad)
