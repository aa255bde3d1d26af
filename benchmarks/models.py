"""The GPT of all benchmarks: one nn.Module, which vescale_fn takes through `vf.functionalize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad_and_value

import vescale_fn as vf

Loss = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]

# Megatron's layout of the parameters; weights of nn.Linear are [out, in].
TENSOR_PARALLEL = {
    "wte.weight": "v/tp d",
    "*.w[qkv].weight": "(h/tp k) d",
    "*.wo.weight": "d (h/tp k)",
    "*.up.weight": "f/tp d",
    "*.down.weight": "d f/tp",
    "head.weight": "v/tp d",
    "*": "...",
}


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT; `batch` is the number of sequences that one rank computes on when alone."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    seq: int = 128
    batch: int = 4
    vocab: int = 256


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream x[b, t, width]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.width // c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.width, bias=False), nn.LayerNorm(c.width, bias=False)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(c.width, c.width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(c.width, 4 * c.width, bias=False), nn.Linear(4 * c.width, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (self.split(w(h)) for w in (self.wq, self.wk, self.wv))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def split(self, x: Tensor) -> Tensor:
        """[b, t, heads * k] -> [b, heads, t, k]; the number of heads is that of x, which may be a shard."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Gpt(nn.Module):
    """Token and position embeddings, blocks, norm, head: tokens [b, t] -> logits [b, t, vocab]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab, c.width), nn.Embedding(c.seq, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width, bias=False)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def make(c: Config) -> Gpt:
    """The model, the same on every process."""
    torch.manual_seed(0)
    return Gpt(c)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(c: Config, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and targets of one rank."""
    g = torch.Generator().manual_seed(rank)
    x, y = torch.randint(c.vocab, (2, c.batch, c.seq), generator=g)
    return x, y


def train_step(loss: Loss, opt: vf.optim.Optimizer) -> Any:
    """`step(state, x, y) -> (state, loss)` over {params, opt}, which is donated."""

    @vf.pjit(donate_argnums=0)
    def step(state: dict[str, Any], x: Tensor, y: Tensor) -> tuple[dict[str, Any], Tensor]:
        grads, value = grad_and_value(loss)(state["params"], x, y)
        params, opt_state = opt.step(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, value

    return step


def functional(c: Config) -> tuple[Loss, dict[str, Tensor]]:
    """Loss as a function of a flat dict of parameters."""
    apply, params, _ = vf.functionalize(make(c))

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(apply(params, {}, x), y)

    return loss, params


def scanned(c: Config) -> tuple[Loss, dict[str, Tensor]]:
    """The same with the layers stacked ("blocks.wq.weight" is [layers, out, in]) and run by vf.scan."""
    apply, block_params, _ = vf.functionalize(Block(c))
    params = {k: p.detach() for k, p in make(c).named_parameters()}
    for name in block_params:
        params[f"blocks.{name}"] = torch.stack([params.pop(f"blocks.{i}.{name}") for i in range(c.layers)])

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        stacked = {k: params[f"blocks.{k}"] for k in block_params}
        h = params["wte.weight"][x] + params["wpe.weight"][: x.shape[1]]
        h, _ = vf.scan(lambda h, w: (apply(w, {}, h), None), h, stacked)
        h = F.layer_norm(h, (c.width,), params["norm.weight"])
        return cross_entropy(h @ params["head.weight"].T, y)

    return loss, params
