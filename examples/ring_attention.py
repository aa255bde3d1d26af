"""Attention over a sequence that no rank holds whole: keys and values go around a ring of virtual devices.

Each rank holds one piece of queries, keys and values. In n steps it meets those of all ranks, which pass from neighbour
to neighbour (n - 1 permutes of k and of v), and merges softmaxes as it goes. Backward goes around again, the gradients
of k and v travelling along, so that nothing is kept per step. A causal mask leaves the first ranks idle where pieces
are in order; in balanced order rank i holds pieces i and 2n-1-i of 2n. Method: Liu et al., "Ring Attention" (2023).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

import vescale_fn as vf


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The plain function, on one device; q, k, v are [heads, sequence, features]."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def positions(rank: Tensor | int, length: int, n: int, balanced: bool) -> Tensor:
    """Where in the sequence the rows of a rank come from."""
    row, half = torch.arange(length), length // 2
    second = (2 * n - 1 - rank) * half + row - half
    return torch.where(row < half, rank * half + row, second) if balanced else rank * length + row


class Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all ranks along "sp"."""

    @staticmethod
    def scores(q: Tensor, k: Tensor, step: int, causal: bool, balanced: bool) -> Tensor:
        """Of the queries here for the keys that arrive in a step, which are those of the rank `step` places before."""
        n, here = vf.axis_size("sp"), vf.axis_index("sp")
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if not causal:
            return logits
        rows = positions(here, q.shape[1], n, balanced)
        columns = positions((here - step) % n, k.shape[1], n, balanced)
        return torch.where(rows[:, None] >= columns, logits, -torch.inf)

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, balanced: bool) -> tuple[Tensor, Tensor]:
        top = torch.full_like(q[..., :1], -1e30)  # largest score so far; not -inf, which would give NaN
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for step in range(vf.axis_size("sp")):
            if step:
                k, v = vf.ppermute((k, v), "sp", shift=1)
            s = Ring.scores(q, k, step, causal, balanced)
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            p, shrink = (s - new).exp(), (top - new).exp()
            total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v, new
        return out / total, top + total.log()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.causal, ctx.balanced = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        q, k, v, out, log_total = ctx.saved_tensors
        inner = (grad * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(vf.axis_size("sp")):
            if step:
                k, v = vf.ppermute((k, v), "sp", shift=1)
                dk, dv = vf.ppermute((dk, dv), "sp", shift=1)
            p = (Ring.scores(q, k, step, ctx.causal, ctx.balanced) - log_total).exp()
            ds = p * (grad @ v.mT - inner) * q.shape[-1] ** -0.5
            dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ grad
        dk, dv = vf.ppermute((dk, dv), "sp", shift=1)  # home
        return dq, dk, dv, None, None


def gradients(mesh: vf.Mesh, causal: bool, balanced: bool) -> Any:  # (q, k, v, cotangent) -> output and gradients
    specs = ("h s/sp d",) * 3
    ring = vf.shard_map(lambda *qkv: Ring.apply(*qkv, causal, balanced)[0], in_specs=specs, out_specs=specs[0])

    def both(q: Tensor, k: Tensor, v: Tensor, cotangent: Tensor) -> Any:
        out, pull = vjp(ring, q, k, v)
        return out, *pull(cotangent)

    return vf.pjit(both, mesh=mesh)


def main(n: int = 4, local: int = 32) -> None:
    mesh = vf.make_mesh(sp=n)
    q, k, v, cotangent = torch.randn(
        4, 2, n * local, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    print(f"mesh {mesh}: {n * local} tokens, {local} on each rank")
    for causal, balanced in ((False, False), (True, False), (True, True)):
        where = torch.cat([positions(i, local, n, balanced) for i in range(n)])
        shards = [vf.device_put(x[:, where], "h s/sp d", mesh) for x in (q, k, v, cotangent)]
        step, plain = gradients(mesh, causal, balanced), partial(attention, causal=causal)
        out, pull = vjp(plain, q, k, v)
        pairs = zip(step(*shards), (out, *pull(cotangent)))
        apart = ", ".join(f"{(a.full() - b[:, where]).abs().max():.0e}" for a, b in pairs)
        moves = Counter(f"{c.kind} {c.phase}" for c in step.lower(*shards).collectives)
        print(f"{'causal' if causal else 'full'}, {'balanced' if balanced else 'in order'}:")
        print(f"  largest difference of out, dq, dk, dv from plain attention: {apart}")
        print("  " + ", ".join(f"{count} {kind}" for kind, count in moves.items()))
    print(f"peak memory of a rank that holds {local} tokens:")
    for ranks in (2, 4, 8, 16):
        shape = vf.ShapeDtype((2, ranks * local, 16), torch.float64)
        tokens = vf.device_put(shape, "h s/sp d", vf.abstract_mesh(sp=ranks))
        lowered = gradients(tokens.mesh, True, False).lower(*[tokens] * 4)
        print(f"  {ranks:>2} ranks {lowered.memory_analysis().peak / 1024:8.1f} KiB")


if __name__ == "__main__":
    main()
