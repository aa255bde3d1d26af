"""Each process reads its own rows, with torch's DataLoader and DistributedSampler, and may stop and go on anywhere.

    python examples/own_rows.py                                              # one process reads for four ranks
    torchrun --nproc-per-node 4 examples/own_rows.py                         # each reads for one: the same losses
    torchrun --nproc-per-node 2 examples/own_rows.py --save run --steps 20
    python examples/own_rows.py --save run --resume                          # goes on with the next row of the epoch

Four data-parallel ranks, on 1, 2 or 4 processes. Every rank has a sampler of its own, so which rows it gets does not
depend on who reads them; the position in the data is two numbers in the checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import vescale_fn as vf

RANKS, ROWS = 4, 8  # data-parallel ranks; rows of each in a batch


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Row i is made when it is read: 16 points, and what to learn of them."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(16.0) * (i + 1))
        return x, x.cumsum(0).tanh()


class Own(DistributedSampler[Any]):
    """The rows of one rank in an epoch, from number `first` on: what came before is not read again."""

    first = 0

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), self.first, None)


def batches(data: Waves, mesh: vf.Mesh, position: dict[str, int]) -> Iterator[tuple[Any, dict[str, int]]]:
    """Batches without end from a position on, and the position after each."""
    start = mesh.axis_rank("dp")
    own = [Own(data, RANKS, rank, drop_last=True) for rank in range(start, start + RANKS // vf.process_count())]
    loaders = [DataLoader(data, ROWS, sampler=sampler, drop_last=True) for sampler in own]
    batch = position["batch"]
    for epoch in itertools.count(position["epoch"]):
        for sampler in own:
            sampler.set_epoch(epoch)
            sampler.first = batch * ROWS
        for parts in zip(*loaders, strict=True):
            batch += 1
            rows = tuple(torch.cat(ranks) for ranks in zip(*parts, strict=True))
            yield vf.local_put(rows, "b/dp d", mesh), {"epoch": epoch, "batch": batch}
        batch = 0


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(torch.relu(x @ params["up"]) @ params["down"], y)


def train(steps: int, folder: Path | None = None, resume: bool = False, data: Waves | None = None) -> list[float]:
    """The losses of these steps; at the end a checkpoint."""
    mesh = vf.make_mesh(dp=RANKS, processes=vf.process_count() if vf.process_count() > 1 else None)
    opt = vf.optim.adamw(lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) / 4 for name, shape in (("up", (16, 64)), ("down", (64, 16)))
    }
    params = vf.device_put(weights, "...", mesh)
    saved: dict[str, Any] = {"state": (params, opt.init(params)), "position": {"epoch": 0, "batch": 0}}
    if resume and folder is not None:
        saved = vf.load(folder, saved)

    @vf.pjit(donate_argnums=0, deterministic=True)
    def step(state: Any, x: Tensor, y: Tensor) -> Any:
        params, moments = state
        grads, value = grad_and_value(loss)(params, x, y)
        return opt.step(grads, moments, params), value

    losses = []
    state = saved["state"]
    for rows, position in itertools.islice(batches(data or Waves(), mesh, saved["position"]), steps):
        state, value = step(state, *rows)
        losses.append(float(value))
        saved = {"state": state, "position": position}
    if folder is not None:
        vf.save(folder, saved)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save", type=Path, metavar="DIR", help="leave a checkpoint in this folder")
    parser.add_argument("--resume", action="store_true", help="go on from it")
    args = parser.parse_args()
    for i, value in enumerate(train(args.steps, args.save, args.resume), 1):
        vf.print0(f"{i:3}  loss {value:.6f}")


if __name__ == "__main__":
    main()
