"""Data parallel on two gloo processes, one core each: vescale_fn against DDP and FSDP2, and the floor.

    python benchmarks/bench_dp.py

The floor is what no data-parallel step can beat here: computing this rank's batch, the fused update, and the CPU time
of the all-reduce (on gloo the reduction itself runs on the CPU and hides behind nothing).
"""

from __future__ import annotations

import statistics

import rivals
from memory import peaks
from models import Config, batch, functional, train_step
from race import Step, publish, race, ratio, report

import vescale_fn as vf


def vescale_dp(c: Config, rank: int, world: int) -> Step:
    loss, params = functional(c)
    return _trainer(c, loss, vf.device_put(params, vf.rules({"*": "..."}), vf.make_mesh(dp=world)), rank)


def vescale_zero3(c: Config, rank: int, world: int) -> Step:
    """Every parameter sharded over dp along its first dim."""
    loss, params = functional(c)
    return _trainer(c, loss, vf.device_put(params, vf.rules({"*": "d/dp ..."}), vf.make_mesh(dp=world)), rank)


def _trainer(c: Config, loss: object, params: dict[str, vf.Array], rank: int) -> Step:
    opt = vf.optim.adamw()
    step = train_step(loss, opt)
    mesh = next(iter(params.values())).mesh
    x, y = (vf.local_put(t, "b/dp t", mesh) for t in batch(c, rank))
    state = {"params": params, "opt": opt.init(params)}

    def run() -> object:
        nonlocal state
        state, value = step(state, x, y)
        return value

    return run


CONTESTANTS = {
    "vescale_fn": vescale_dp,
    "DDP": rivals.ddp,
    "DDP, fused AdamW": rivals.ddp_fused,
    "vescale_fn, all sharded": vescale_zero3,
    "FSDP2": rivals.fsdp2,
    "one process": rivals.one_process,
    "compute alone": rivals.compute_alone,
    "update alone": rivals.update_alone,
    "all-reduce alone": rivals.reduction_alone,
}
BOUNDS = {
    "vescale_fn / the better DDP": 0.95,
    "vescale_fn / FSDP2": 0.75,
    "vescale_fn / floor": 1.08,
    "vescale_fn / one process": 1.18,
}


def main() -> None:
    times, cpu = race(CONTESTANTS, Config(), rounds=30)
    for clock in (times, cpu):
        parts = clock["compute alone"], clock["update alone"], cpu["all-reduce alone"]
        clock["floor"] = [sum(t) for t in zip(*parts)]
    better = min(("DDP", "DDP, fused AdamW"), key=lambda who: statistics.median(times[who]))
    ratios = {
        "vescale_fn / the better DDP": ratio(times, "vescale_fn", better),
        "vescale_fn / FSDP2": ratio(times, "vescale_fn", "FSDP2"),
        "vescale_fn, all sharded / FSDP2": ratio(times, "vescale_fn, all sharded", "FSDP2"),
        "vescale_fn / floor": ratio(times, "vescale_fn", "floor"),
        "vescale_fn / one process": ratio(times, "vescale_fn", "one process"),
        "CPU time: vescale_fn / the better DDP": ratio(cpu, "vescale_fn", better),
        "CPU time: vescale_fn / FSDP2": ratio(cpu, "vescale_fn", "FSDP2"),
        "CPU time: vescale_fn / floor": ratio(cpu, "vescale_fn", "floor"),
    }
    compared = "vescale_fn", better, "vescale_fn, all sharded", "FSDP2", "one process"
    memory = peaks({who: CONTESTANTS[who] for who in compared}, Config())
    report("dp", times, ratios, BOUNDS, cpu, memory)
    ours = memory["vescale_fn"]
    publish(
        {
            ("data parallel", better): ratios["vescale_fn / the better DDP"],
            ("data parallel", "FSDP2"): ratios["vescale_fn / FSDP2"],
            ("every parameter sharded", "FSDP2"): ratios["vescale_fn, all sharded / FSDP2"],
            ("data parallel", "compute + update + CPU time of the all-reduce"): ratios["vescale_fn / floor"],
        },
        {
            ("data parallel", better): (ours, memory[better]),
            ("data parallel", "FSDP2"): (ours, memory["FSDP2"]),
            ("every parameter sharded", "FSDP2"): (memory["vescale_fn, all sharded"], memory["FSDP2"]),
        },
    )


if __name__ == "__main__":
    main()
