"""Tensor parallel on two gloo processes, one core each: Megatron's plan in vescale_fn against DTensor.

python benchmarks/bench_tp.py
"""

from __future__ import annotations

import rivals
from memory import peaks
from models import TENSOR_PARALLEL, Config, batch, functional, train_step
from race import Step, publish, race, ratio, report

import vescale_fn as vf


def vescale_tp(c: Config, rank: int, world: int) -> Step:
    loss, params = functional(c)
    mesh, opt = vf.make_mesh(tp=world), vf.optim.adamw()
    placed = vf.device_put(params, vf.rules(TENSOR_PARALLEL, h=c.heads), mesh)
    x, y = vf.device_put(batch(c), "b t", mesh)
    step, state = train_step(loss, opt), {"params": placed, "opt": opt.init(placed)}

    def run() -> object:
        nonlocal state
        state, value = step(state, x, y)
        return value

    return run


CONTESTANTS = {"vescale_fn": vescale_tp, "DTensor": rivals.dtensor_tp}


def main() -> None:
    times, cpu = race(CONTESTANTS, Config(), rounds=30)
    memory = peaks(CONTESTANTS, Config())
    against = ratio(times, "vescale_fn", "DTensor")
    report("tp", times, {"vescale_fn / DTensor": against}, {"vescale_fn / DTensor": 0.7}, cpu, memory)
    row = "Megatron's tensor parallel", "DTensor"
    publish({row: against}, {row: (memory["vescale_fn"], memory["DTensor"])})


if __name__ == "__main__":
    main()
