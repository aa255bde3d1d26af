"""What a call of a pjit-ted step costs beyond running its program: a GPT of 2 layers and width 64 on one device.

python benchmarks/bench_overhead.py
"""

from __future__ import annotations

import time
from typing import Any

import torch
from models import Config, batch, functional, train_step
from race import Times, ratio, report

import vescale_fn as vf
from vescale_fn.tree import flatten


def main(rounds: int = 100) -> None:
    torch.set_num_threads(1)
    c = Config(layers=2, width=64, heads=4)
    loss, params = functional(c)
    step, opt, mesh = train_step(loss, vf.optim.adamw()), vf.optim.adamw(), vf.make_mesh(dp=1)
    placed = vf.device_put(params, vf.rules({"*": "..."}), mesh)
    state: Any = {"params": placed, "opt": opt.init(placed)}
    x, y = vf.device_put(batch(c), "b/dp t", mesh)

    # The loaded program itself, on a copy of the state. Its last output is the loss; the others are the new state.
    program = step.lower(state, x, y).compile()
    values = [a.full() for a in flatten(state)[0]]
    tokens = [x.full(), y.full()]

    times: Times = {"pjit": [], "program": []}
    for _ in range(rounds):
        start = time.perf_counter()
        state, _ = step(state, x, y)
        middle = time.perf_counter()
        ((*values, _),) = program([[*values, *tokens]])
        times["pjit"].append(middle - start)
        times["program"].append(time.perf_counter() - middle)
    report("overhead", times, {"pjit / program": ratio(times, "pjit", "program")}, {"pjit / program": 1.1})


if __name__ == "__main__":
    main()
