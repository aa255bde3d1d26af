"""One process on one core against JAX on the CPU: the same GPT, the same weights, the same AdamW. Needs jax.

    python benchmarks/bench_jax.py

Beside it stands the time of the step's matrix products alone: what no program can beat that takes them from the library
that torch takes them from.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from memory import peaks
from models import Config, batch, functional, train_step
from race import Step, Times, publish, ratio, report

import vescale_fn as vf

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None


def vescale(c: Config, rank: int = 0, world: int = 1) -> Step:
    loss, params = functional(c)
    mesh, opt = vf.make_mesh(dp=1), vf.optim.adamw()
    placed = vf.device_put(params, "...", mesh)
    x, y = vf.device_put(batch(c), "b t", mesh)
    step, state = train_step(loss, opt), {"params": placed, "opt": opt.init(placed)}

    def run() -> float:
        nonlocal state
        state, value = step(state, x, y)
        return float(value)

    return run


def products(c: Config) -> Step:
    """The matrix products of a step, on operands that are there already."""
    loss, params = functional(c)
    opt, (x, y) = vf.optim.adamw(), batch(c)
    state = {"params": params, "opt": opt.init(params)}
    graph = train_step(loss, opt).trace(state, x, y).graph
    of = [e.operands for e in graph.eqns if e.op is torch.ops.aten.mm.default]
    pairs = [(torch.randn(a.shape), torch.randn(b.shape)) for a, b in of]
    return lambda: [torch.mm(a, b) for a, b in pairs]


def jax_step(c: Config, rank: int = 0, world: int = 1) -> Step:
    """The model of models.py in jax.numpy, with torch's AdamW defaults, state donated."""

    def norm(x: Any, weight: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * weight

    def block(p: dict[str, Any], h: Any) -> Any:
        def heads(w: Any) -> Any:
            return (a @ w.T).reshape(*a.shape[:2], c.heads, -1)

        a = norm(h, p["norm1.weight"])
        o = jax.nn.dot_product_attention(*(heads(p[f"w{n}.weight"]) for n in "qkv"), is_causal=True)
        h = h + o.reshape(h.shape) @ p["wo.weight"].T
        return h + jax.nn.gelu(norm(h, p["norm2.weight"]) @ p["up.weight"].T, approximate=False) @ p["down.weight"].T

    def loss(p: dict[str, Any], x: Any, y: Any) -> Any:
        h = p["wte.weight"][x] + p["wpe.weight"][: x.shape[1]]
        for i in range(c.layers):
            start = f"blocks.{i}."
            h = block({k.removeprefix(start): w for k, w in p.items() if k.startswith(start)}, h)
        logs = jax.nn.log_softmax(norm(h, p["norm.weight"]) @ p["head.weight"].T)
        return -jnp.take_along_axis(logs, y[..., None], -1).mean()

    def update(state: Any, x: Any, y: Any) -> Any:
        p, m, v, n = state
        value, g = jax.value_and_grad(loss)(p, x, y)
        n = n + 1
        m = {k: 0.9 * m[k] + 0.1 * g[k] for k in p}
        v = {k: 0.999 * v[k] + 0.001 * g[k] ** 2 for k in p}
        rate, scale = 1e-3 / (1 - 0.9**n), 1 - 0.999**n
        p = {k: p[k] * (1 - 1e-5) - rate * m[k] / (jnp.sqrt(v[k] / scale) + 1e-8) for k in p}
        return (p, m, v, n), value

    step = jax.jit(update, donate_argnums=0)
    params = {k: jnp.array(w.numpy()) for k, w in functional(c)[1].items()}
    zeros = [{k: jnp.zeros_like(w) for k, w in params.items()} for _ in range(2)]
    state, (x, y) = (params, *zeros, jnp.zeros(())), (jnp.array(t.numpy()) for t in batch(c))

    def run() -> float:
        nonlocal state
        state, value = step(state, x, y)
        return float(value)

    return run


CONTESTANTS = {"vescale_fn": vescale, "JAX": jax_step}


def main(rounds: int = 20) -> None:
    if jax is None:
        print("jax: not installed, skipped")
        return
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    memory = peaks(CONTESTANTS, Config(), world=1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    steps = {name: make(Config()) for name, make in CONTESTANTS.items()}
    for _ in range(3):  # compile, warm up, and see that both train the same model
        a, b = (step() for step in steps.values())
        assert abs(a - b) < 1e-3, (a, b)
    steps["products alone"] = products(Config())
    clock: Times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            clock[name].append(time.perf_counter() - start)
    ratios = {f"{name} / JAX": ratio(clock, name, "JAX") for name in ("vescale_fn", "products alone")}
    report("one process", clock, ratios, {"vescale_fn / JAX": 0.5}, memory=memory)
    row = "one process", "JAX"
    publish({row: ratios["vescale_fn / JAX"]}, {row: (memory["vescale_fn"], memory["JAX"])})


if __name__ == "__main__":
    main()
