"""A small GPT as pure functions, for the tests that count collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch.func import grad_and_value

import vescale_fn as vf


@dataclass(frozen=True)
class Sizes:
    layers: int = 2
    width: int = 64
    heads: int = 4
    vocab: int = 128
    seq: int = 16
    batch: int = 8
    fused: bool = False
    tied: bool = False


def init(s: Sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Parameters; every leaf a tensor."""
    g = torch.Generator().manual_seed(seed)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=dtype) * 0.05

    d, one = s.width, torch.ones(s.width, dtype=dtype)
    qkv = {"wqkv": w(d, 3 * d)} if s.fused else {"wq": w(d, d), "wk": w(d, d), "wv": w(d, d)}
    blocks = [_block(w, {k: x.clone() for k, x in qkv.items()}, one) for _ in range(s.layers)]
    params = {"wte": w(s.vocab, d), "wpe": w(s.seq, d), "blocks": blocks, "lnf": one.clone()}
    return params if s.tied else {**params, "head": w(d, s.vocab)}


def _block(w: Callable[..., torch.Tensor], qkv: dict[str, torch.Tensor], one: torch.Tensor) -> dict[str, torch.Tensor]:
    d = one.numel()
    mlp = {"up": w(d, 4 * d), "down": w(4 * d, d)}
    return {"ln1": one.clone(), **qkv, "wo": w(d, d), "ln2": one.clone(), **mlp}


def forward(
    p: dict[str, Any], x: torch.Tensor, s: Sizes, between: Callable[[torch.Tensor], torch.Tensor] = lambda h: h
) -> torch.Tensor:
    """Logits [b, s, v]. `between` is applied to the residual stream between blocks."""
    h = F.embedding(x, p["wte"]) + p["wpe"][: x.shape[1]]
    for b in p["blocks"]:
        h = between(h)
        a = F.layer_norm(h, (s.width,), b["ln1"])
        q, k, v = (a @ b["wqkv"]).chunk(3, -1) if s.fused else (a @ b["wq"], a @ b["wk"], a @ b["wv"])
        q, k, v = (rearrange(t, "b s (h k) -> b h s k", h=s.heads) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = between(h + rearrange(o, "b h s k -> b s (h k)") @ b["wo"])
        h = h + F.gelu(F.layer_norm(h, (s.width,), b["ln2"]) @ b["up"]) @ b["down"]
    h = F.layer_norm(between(h), (s.width,), p["lnf"])
    return h @ (p["wte"].t() if s.tied else p["head"])


def make_step(
    s: Sizes, opt: Any = None, between: Callable[[torch.Tensor], torch.Tensor] = lambda h: h
) -> Callable[..., Any]:
    """A train step (state, x, y) -> (state, loss)."""
    opt = opt or vf.optim.adamw(lr=1e-3)

    def loss(params: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = forward(params, x, s, between)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def step(state: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
        grads, value = grad_and_value(loss)(state["params"], x, y)
        params, opt_state = opt.step(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, value

    return step


MEGATRON = {
    "wte": "v/tp d",
    "head": "d v/tp",
    "*.w[qkv]": "d (h/tp k)",
    "*.wqkv": "d (qkv h/tp k)",
    "*.wo": "(h/tp k) d",
    "*.up": "d f/tp",
    "*.down": "f/tp d",
    "*": "...",
}
FSDP = {"*.ln*": "d/dp", "lnf": "d/dp", "wpe": "t/dp d", "*": "d/dp ..."}


def rules_for(table: dict[str, str], params: dict[str, Any], s: Sizes) -> Any:
    """vf.rules without the lines that match nothing in `params`."""
    fused = {"*.w[qkv]"} if s.fused else {"*.wqkv"}
    skip = fused | ({"head"} if s.tied else set())
    return vf.rules({k: v for k, v in table.items() if k not in skip}, h=s.heads, qkv=3)


def on_mesh(s: Sizes, mesh: Any, table: dict[str, str], batch: str = "b s", dtype: torch.dtype = torch.float32) -> Any:
    """(state, x, y) as Arrays."""
    params = vf.device_put(init(s, dtype), rules_for(table, init(s), s), mesh)
    x, y = data(s)
    state = {"params": params, "opt": vf.optim.adamw(lr=1e-3).init(params)}
    return state, vf.device_put(x, batch, mesh), vf.device_put(y, batch, mesh)


def data(s: Sizes, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(s.vocab, (s.batch, s.seq), generator=g),
        torch.randint(s.vocab, (s.batch, s.seq), generator=g),
    )
