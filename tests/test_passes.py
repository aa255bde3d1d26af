"""Passes: what each changes, and that none changes a value."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt import FSDP, MEGATRON, Sizes, init, make_step, on_mesh
from torch.func import grad, grad_and_value

import vescale_fn as vf
from vescale_fn.engines import engine_for
from vescale_fn.fused import IN_PLACE
from vescale_fn.liveness import waits
from vescale_fn.memory import peak_bytes
from vescale_fn.partition import partition
from vescale_fn.passes import (
    PASSES,
    bucket,
    drop_dead_equations,
    finish_last,
    gather_ahead,
    hide_waits,
    optimize,
    reduce_early,
    reduce_first,
    regather,
    share_common,
    update_apart,
    view_late,
)
from vescale_fn.passes.bucket import bucket_bytes
from vescale_fn.passes.overwrite import INTO
from vescale_fn.program import Program
from vescale_fn.sharding.comm import AllGather, AllReduce
from vescale_fn.sharding.work import is_heavy
from vescale_fn.tree import flatten

S = Sizes(layers=1)
CASES = {
    "dp": ({"*": "..."}, "b/dp s", {"dp": 2}),
    "tp": (MEGATRON, "b s", {"tp": 2}),
    "fsdp": (FSDP, "b/dp s", {"dp": 2}),
}


def raw(case: str, steps: Any = None) -> tuple[vf.Lowered, Program, list[Any]]:
    """A train step, its program before any pass, and its arguments."""

    table, batch, axes = CASES[case]
    args = on_mesh(S, vf.make_mesh(**axes), table, batch, torch.float64)
    low = vf.pjit(make_step(S), donate_argnums=0).lower(*args)
    return low, partition(low.plan), flatten(args)[0]


def outputs(low: vf.Lowered, program: Program, leaves: list[Any]) -> list[torch.Tensor]:
    run = engine_for(low.request.mesh).load(program)
    ranks = run([[a.shards[r].clone() for a in leaves] for r in range(low.request.mesh.size)])
    return [x for outs in ranks for x in outs]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("run", [*PASSES, regather, optimize], ids=lambda f: f.__name__)
def test_a_pass_changes_no_value(case: str, run: Any) -> None:
    low, program, leaves = raw(case)
    for a, b in zip(outputs(low, run(program), leaves), outputs(low, program, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_equal_equations_are_computed_once() -> None:
    mesh = vf.make_mesh(dp=2)
    x = vf.device_put(torch.ones(4, 4), "a/dp b", mesh)
    low = vf.pjit(lambda x: torch.sin(x) + torch.sin(x)).lower(x)
    assert Counter(str(e.op) for e in low.program.graph.eqns) == {"aten.sin.default": 1, "aten.add.Tensor": 1}


def test_equal_local_equations_of_different_layouts_stay_apart() -> None:
    """zeros [4/x, 2] and zeros [4, 2/x] of two tensors look alike on a rank; they are parts of different values."""
    mesh = vf.make_mesh(x=2)
    tall, wide = vf.device_put((torch.ones(4, 2), torch.ones(2, 4)), ("a/x b", "a b/x"), mesh)
    out = vf.pjit(lambda t, w: (torch.zeros_like(t), torch.zeros_like(w)))(tall, wide)
    assert [tuple(o.shape) for o in out] == [(4, 2), (2, 4)]


def test_dead_equations_are_dropped() -> None:
    _, program, _ = raw("dp")
    assert len(drop_dead_equations(program).graph.eqns) <= len(program.graph.eqns)
    x = vf.device_put(torch.ones(4), "a", vf.make_mesh(dp=2))
    assert vf.pjit(lambda x: (torch.sin(x), x + 1)[1]).lower(x).as_text().count("sin") == 0


def test_reductions_start_behind_their_operand() -> None:
    _, program, _ = raw("dp")
    eqns = reduce_early(program).graph.eqns
    made = {v: i for i, e in enumerate(eqns) for v in e.outs}
    for i, e in enumerate(eqns):
        if isinstance(e.op, AllReduce):
            between = eqns[made[e.operands[0]] + 1 : i]
            assert all(isinstance(b.op, AllReduce) for b in between)


@pytest.mark.parametrize("limit", [0, 2**12, 2**30])
def test_buckets_are_as_large_as_the_limit_allows(limit: int) -> None:
    _, program, _ = raw("dp")
    merged = bucket(reduce_early(share_common(program)), limit)
    sizes = [
        [program.layouts[v].max_local_numel * v.dtype.itemsize for v in e.operands]
        for e in merged.graph.eqns
        if isinstance(e.op, AllReduce) and e.phase == "backward"
    ]
    assert sum(map(len, sizes)) == len(flatten(init(S))[0])
    assert all(sum(s[:-1]) < max(limit, 1) for s in sizes)  # one more than fits closes a bucket
    assert len(sizes) == 1 if limit == 2**30 else len(sizes) > 1


def test_what_depends_on_data_alone_is_reduced_before_the_model_runs() -> None:
    """The number of targets, which cross entropy divides by. The sum of the losses stays where it is."""
    _, program, _ = raw("dp")
    program = reduce_early(share_common(program))
    heavy = [next(i for i, e in enumerate(p.graph.eqns) if is_heavy(e)) for p in (program, reduce_first(program))]
    counts = [sum(isinstance(e.op, AllReduce) for e in program.graph.eqns[: heavy[0]])]
    counts += [sum(isinstance(e.op, AllReduce) for e in reduce_first(program).graph.eqns[: heavy[1]])]
    assert counts == [0, 1]


@pytest.mark.parametrize(("rows", "moved"), [(8, True), (1024, False)])
def test_no_reduction_starts_first_at_the_cost_of_memory(rows: int, moved: bool) -> None:
    """What makes the operand is read again behind the product: [rows, 512] floats would live until then."""

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        size = x.abs()
        return (x @ w) * size / size.sum()

    mesh = vf.make_mesh(dp=2)
    low = vf.pjit(step).lower(
        vf.device_put(torch.ones(512, 512), "...", mesh), vf.device_put(torch.ones(2 * rows, 512), "b/dp d", mesh)
    )
    eqns = reduce_first(partition(low.plan)).graph.eqns
    first = next(e for e in eqns if isinstance(e.op, AllReduce) or is_heavy(e))
    assert isinstance(first.op, AllReduce) == moved


def test_a_count_that_is_needed_soon_does_not_travel_with_the_loss() -> None:
    _, program, _ = raw("dp")
    program = reduce_early(share_common(program))

    def operands(p: Program) -> list[int]:
        return [len(e.operands) for e in bucket(p).graph.eqns if isinstance(e.op, AllReduce) and e.phase == "forward"]

    assert operands(program) == [2]  # made one behind the other: nothing to gain
    assert operands(reduce_first(program)) == [1, 1]


def updates(program: Program) -> list[int]:
    """How many parameters each update of a program moves, in order."""
    return [len(e.args[0]) for e in program.graph.eqns if e.op in IN_PLACE]


def test_parameters_are_updated_as_their_gradients_arrive() -> None:
    _, program, _ = raw("dp")
    program = reduce_first(reduce_early(share_common(program)))
    for limit in (0, 2**12, 2**30):
        merged = bucket(program, limit)
        last = max(i for i, e in enumerate(merged.graph.eqns) if is_heavy(e))
        buckets = [e for e in merged.graph.eqns if isinstance(e.op, AllReduce) and e.phase == "backward"]
        done = view_late(finish_last(update_apart(merged)))
        assert updates(merged) == [len(flatten(init(S))[0])]
        assert updates(done) == [len(e.operands) for e in buckets]
        ends, eqns = waits(done.graph), done.graph.eqns
        assert all(ends[e] > last for e in eqns if isinstance(e.op, AllReduce) and e.phase == "backward")
        at = [i for i, e in enumerate(eqns) if e.op in IN_PLACE]
        waited = [ends[e] for e in eqns if isinstance(e.op, AllReduce) and e.phase == "backward"]
        assert all(before < end <= i for before, end, i in zip([0, *at], waited, at, strict=False))


@pytest.mark.parametrize("guard", ["clip", "skip"])
def test_updates_that_need_all_gradients_stay_together(guard: str) -> None:
    """The norm of all gradients needs them all, and so does the decision to leave everything as it is."""
    guards = {"clip": vf.optim.clip_norm(1.0), "skip": vf.optim.skip_nonfinite()}
    opt = vf.optim.chain(guards[guard], vf.optim.adamw())

    def step(state: Any, x: torch.Tensor) -> Any:
        grads = grad(lambda w: (x @ w["a"] @ w["b"]).square().sum())(state["w"])
        w, opt_state = opt.step(grads, state["opt"], state["w"])
        return {"w": w, "opt": opt_state}

    mesh = vf.make_mesh(dp=2)
    w = vf.device_put({"a": torch.ones(4, 4), "b": torch.ones(4, 4)}, "...", mesh)
    args = {"w": w, "opt": opt.init(w)}, vf.device_put(torch.ones(2, 4), "b/dp d", mesh)
    low = vf.pjit(step).lower(*args)
    program = bucket(reduce_early(share_common(partition(low.plan))), 0)
    assert sum(isinstance(e.op, AllReduce) for e in program.graph.eqns) == 2
    assert updates(update_apart(program)) == [2]


def test_a_step_written_by_hand_waits_for_each_transfer_when_it_is_due() -> None:
    """The gradient of the last layer arrives first. The loss is divided by its count when backward is done."""

    def step(w: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
        grads, loss = grad_and_value(lambda w: F.cross_entropy(x @ w[0] @ w[1], y))(w)
        return [p - 0.1 * g for p, g in zip(w, grads)], loss

    mesh = vf.make_mesh(dp=2)
    w, x, y = [torch.ones(4, 4), torch.ones(4, 4)], torch.ones(64, 4), torch.zeros(64, dtype=torch.int64)
    low = vf.pjit(step).lower(vf.device_put(w, "...", mesh), *vf.device_put((x, y), ("b/dp d", "b/dp"), mesh))
    program = bucket(reduce_first(reduce_early(share_common(partition(low.plan)))), 0)
    done = finish_last(program).graph
    last = max(i for i, e in enumerate(done.eqns) if is_heavy(e))
    sent = [e for e in done.eqns if isinstance(e.op, AllReduce)]
    first_read = {e: min(i for i, r in enumerate(done.eqns) if set(r.reads) & set(e.outs)) for e in sent}
    count, loss, *gradients = sent
    assert first_read[count] < last
    assert last < first_read[loss] < first_read[gradients[0]] < first_read[gradients[1]]
    assert gradients[0].outs[0] is not gradients[1].outs[0]
    assert all(done.eqns.index(g) < first_read[gradients[0]] for g in gradients)  # all start before one is waited for


def test_buckets_are_large_enough_to_pay_and_small_enough_to_overlap() -> None:
    mib = 2**20
    assert [bucket_bytes(n * mib) // mib for n in (0, 1, 8, 80, 200, 10_000)] == [1, 1, 2, 20, 25, 25]


def test_gradients_travel_while_backward_goes_on() -> None:
    """The gradient of a weight in F.linear is a transposed product, which nobody looks at before the update."""

    def step(w: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        grads = grad(lambda w: F.linear(F.linear(x, w[0]).relu(), w[1]).sum())(w)
        return [p - g for p, g in zip(w, grads)]

    mesh = vf.make_mesh(dp=2)
    w, x = [torch.ones(4, 4), torch.ones(4, 4)], torch.ones(2, 4)
    low = vf.pjit(step).lower(vf.device_put(w, "...", mesh), vf.device_put(x, "b/dp d", mesh))
    program = reduce_early(partition(low.plan))
    graph = view_late(program).graph
    last = max(i for i, e in enumerate(graph.eqns) if is_heavy(e))
    assert all(end < last for end in waits(program.graph).values())
    assert max(waits(graph).values()) > last


def test_gradients_of_weights_are_computed_while_those_of_activations_travel() -> None:
    """Megatron's backward: two reductions a layer, and the one behind the head."""
    _, program, _ = raw("tp")
    program = view_late(program)
    plain, hidden = (
        sum(e.phase == "backward" and len(e.outs[0].shape) > 1 for e in waits(p.graph))
        for p in (program, hide_waits(program))
    )
    assert plain == 0
    assert hidden == 2 * S.layers + 1


@pytest.mark.parametrize("limit", [0, 2**12, 2**30])
def test_parameters_are_gathered_one_group_ahead(limit: int) -> None:
    _, program, _ = raw("fsdp")
    eqns = gather_ahead(share_common(program), limit).graph.eqns
    groups = [e for e in eqns if isinstance(e.op, AllGather)]
    assert sum(len(e.operands) for e in groups) == len(flatten(init(S))[0])
    assert len(groups) == 1 if limit == 2**30 else len(groups) > 1
    needed = [next(i for i, e in enumerate(eqns) if set(e.reads) & set(g.outs)) for g in groups]
    assert all(eqns.index(group) < before for group, before in zip(groups[1:], needed))


def elementwise(fn: Any, *shapes: tuple[int, ...]) -> list[str]:
    """The elementwise operations of the program of fn, by name."""
    mesh = vf.make_mesh(dp=1)
    args = [vf.device_put(torch.ones(s), "...", mesh) for s in shapes]
    eqns = vf.pjit(fn).lower(*args).program.graph.eqns
    return [str(e.op) for e in eqns if e.op in INTO or any(e.op is into for into, _ in INTO.values())]


def test_elementwise_operations_write_over_what_dies() -> None:
    assert elementwise(lambda x, w: (x @ w).exp().neg(), (2, 3), (3, 4)) == ["aten.exp.out", "aten.neg.out"]


@pytest.mark.parametrize(
    ("why", "fn"),
    [
        ("an argument is the caller's", lambda x, y: x.exp()),
        ("read again", lambda x, y: (z := x @ y, z.exp())),
        ("read again through a view", lambda x, y: (z := x @ y, z.exp(), z.t())[1:]),
        ("of another shape", lambda x, y: torch.ones(2, 1, 1) * (x @ y)),
        ("not known to be contiguous", lambda x, y: (x @ y).t().exp()),
    ],
)
def test_what_others_read_is_not_written_over(why: str, fn: Any) -> None:
    assert not any(name.endswith("out") for name in elementwise(fn, (4, 4), (4, 4))), why


@pytest.mark.parametrize("op", INTO, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_writing_over_an_operand_gives_the_same_bits(op: Any, dtype: torch.dtype) -> None:
    into, name = INTO[op]
    tensors = [torch.rand(64, 1000).to(dtype) for a in op._schema.arguments if str(a.type) == "Tensor"]
    rest = [0.5] * (op is torch.ops.aten.threshold_backward.default)
    want = op(*tensors, *rest)
    for i in range(len(tensors)):
        copies = [t.clone() for t in tensors]
        got = into(*copies, *rest, **{name: copies[i]})
        assert got.data_ptr() == copies[i].data_ptr()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_donated_state_is_updated_in_place() -> None:
    args = on_mesh(S, vf.make_mesh(dp=2), {"*": "..."}, "b/dp s")
    in_place = set(IN_PLACE.values())
    kept, donated = (vf.pjit(make_step(S), donate_argnums=d).lower(*args) for d in ((), 0))
    assert not any(e.op in in_place for e in kept.program.graph.eqns)
    assert any(e.op in in_place for e in donated.program.graph.eqns)
    assert donated.memory_analysis().peak < kept.memory_analysis().peak


def test_gathering_again_trades_bytes_for_memory() -> None:
    low, program, _ = raw("fsdp")
    kept, again = optimize(program), optimize(program, keep=0)
    gathers = [sum(len(e.operands) for e in p.graph.eqns if isinstance(e.op, AllGather)) for p in (kept, again)]
    weights = sum(p.ndim == 2 for p in flatten(init(S))[0]) - 2  # the embeddings' backward does not read them
    assert gathers[1] >= gathers[0] + weights
    one = dict.fromkeys(low.program.mesh.names, 0)
    assert peak_bytes(again, one).peak < peak_bytes(kept, one).peak
