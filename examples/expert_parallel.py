"""A mixture of experts with the experts spread over ranks: each token is routed to its two best experts, wherever they
live, and its results come back. Once with a fixed capacity (dense buffers, two all_to_alls) and once dropless (as many
rows to each rank as the router says, two ragged_all_to_alls). Both equal the plain function on one device, with their
gradients and the loss that balances the load. Source of router, capacity and balance: Fedus et al., "Switch
Transformers" (2021).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

import vescale_fn as vf

RANKS, EXPERTS, TOP, WIDTH, HIDDEN, TOKENS = 4, 8, 2, 16, 32, 24  # TOKENS: of a rank
SPECS = {"router": "d e", "up": "e/ep d f", "down": "e/ep f d"}


def route(router: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and experts of each token, [tokens, TOP], and the probabilities of all experts."""
    p = (x @ router).softmax(-1)
    weights, experts = p.topk(TOP)
    return weights / weights.sum(-1, keepdim=True), experts, p


def expert(up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
    """Each expert's network on its rows, [experts, rows, d]."""
    return F.gelu(rows @ up) @ down


def slots(experts: Tensor, capacity: int) -> Tensor:
    """Where each choice of a token goes, one-hot [tokens, TOP, experts, capacity]; zeros where the expert is full."""
    chosen = F.one_hot(experts, EXPERTS)
    place = (chosen.reshape(-1, EXPERTS).cumsum(0) - 1).reshape(chosen.shape)
    hit = place[..., None] == torch.arange(capacity)
    return (chosen[..., None] * hit).to(torch.float64)


def balance(experts: Tensor, p: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Smallest when every expert gets the same share of tokens. mean: over all tokens of all ranks."""
    share = F.one_hot(experts[:, 0], EXPERTS).to(p.dtype)
    return EXPERTS * (mean(share) * mean(p)).sum()


def plain(params: dict[str, Tensor], x: Tensor, capacity: int | None) -> Tensor:
    """The loss on one device: every expert on every token, weighted. Capacity counts in the tokens of one rank."""
    weights, experts, p = route(params["router"], x)
    kept = weights
    if capacity is not None:
        kept = torch.cat(
            [w * slots(e, capacity).sum((-1, -2)) for w, e in zip(weights.chunk(RANKS), experts.chunk(RANKS))]
        )
    gates = (F.one_hot(experts, EXPERTS) * kept[..., None]).sum(1)
    out = torch.einsum("te,etd->td", gates, expert(params["up"], params["down"], x.expand(EXPERTS, -1, -1)))
    return out.square().sum() + balance(experts, p, lambda t: t.mean(0))


# ---- on one rank


def with_capacity(params: dict[str, Tensor], x: Tensor, capacity: int) -> Tensor:
    weights, experts, p = route(params["router"], x)
    dispatch = slots(experts, capacity)
    sent = torch.einsum("tkec,td->ecd", dispatch, x)
    here = vf.all_to_all(sent, "ep", split_dim=0, concat_dim=1, tiled=True)  # [own experts, capacity of all ranks, d]
    back = vf.all_to_all(expert(params["up"], params["down"], here), "ep", split_dim=1, concat_dim=0, tiled=True)
    out = torch.einsum("tkec,tk,ecd->td", dispatch, weights, back)
    return vf.psum(out.square().sum(), "ep") + balance(experts, p, lambda t: vf.pmean(t.mean(0), "ep"))


def dropless(params: dict[str, Tensor], x: Tensor) -> Tensor:
    weights, experts, p = route(params["router"], x)
    order = experts.flatten().argsort(stable=True)  # choices, by expert
    rows = x[order // TOP]
    mine = vf.axis_index("ep")
    counts = vf.all_gather(F.one_hot(experts.flatten(), EXPERTS).sum(0), "ep")  # [rank, expert]
    sizes = counts.reshape(RANKS, RANKS, -1).sum(-1)  # [from, to]
    starts = sizes.cumsum(1) - sizes  # of the rows of each rank, where they come from
    lands = sizes.cumsum(0) - sizes  # and where they go to
    there = (starts[mine], sizes[mine], lands[mine], sizes[:, mine])
    home = (lands[:, mine], sizes[:, mine], starts[:, mine], sizes[mine])
    arrived = vf.ragged_all_to_all(rows, torch.zeros(RANKS * len(rows), WIDTH, dtype=x.dtype), *there, "ep")
    own = counts.reshape(RANKS, RANKS, -1)[:, mine]  # [from, own expert]: arrived rows, in this order
    segment = torch.searchsorted(own.flatten().cumsum(0), torch.arange(len(arrived)), right=True)
    is_for = segment % own.shape[1] == torch.arange(own.shape[1])[:, None]
    done = (expert(params["up"], params["down"], arrived.expand(own.shape[1], -1, -1)) * is_for[..., None]).sum(0)
    back = vf.ragged_all_to_all(done, torch.zeros_like(rows), *home, "ep")
    out = torch.zeros_like(x).index_add(0, order // TOP, back * weights.flatten()[order][:, None])
    return vf.psum(out.square().sum(), "ep") + balance(experts, p, lambda t: vf.pmean(t.mean(0), "ep"))


def main() -> None:
    mesh, draw = vf.make_mesh(ep=RANKS), torch.Generator().manual_seed(0)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    params = {k: torch.randn(s, dtype=torch.float64, generator=draw) * s[-2] ** -0.5 for k, s in shapes.items()}
    x = torch.randn(RANKS * TOKENS, WIDTH, dtype=torch.float64, generator=draw)
    print(f"mesh {mesh}: {len(x)} tokens, {EXPERTS} experts, {TOP} for each token")
    ways: dict[str, tuple[Any, int | None]] = {
        f"capacity {c} of a rank's {TOKENS} tokens": (partial(with_capacity, capacity=c), c) for c in (6, TOKENS)
    }
    for name, (local, capacity) in {**ways, "dropless": (dropless, None)}.items():
        step = vf.pjit(grad_and_value(vf.shard_map(local, in_specs=(SPECS, "t/ep d"), out_specs="")), mesh=mesh)
        (grads, loss), (expected, value) = step(params, x), grad_and_value(plain)(params, x, capacity)
        apart = max(
            float((a.full() - b).abs().max()) for a, b in zip((loss, *grads.values()), (value, *expected.values()))
        )
        print(f"{name}: loss {value:.4f}, largest difference from one device, gradients too {apart:.0e}")
        moves = Counter(f"{c.kind} {c.phase}" for c in step.lower(params, x).collectives)
        print("  " + ", ".join(f"{count} {kind}" for kind, count in moves.items()))


if __name__ == "__main__":
    main()
