"""A pipeline's gradients are those of its stages one after the other, on any schedule and mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vescale_fn as vf
from vescale_fn.schedules import accumulate, pipeline, sequential
from vescale_fn.schedules.pipelines import Table

F64 = torch.float64
WIDTH = 6

SCHEDULES = {  # by name: chunks on a rank
    "gpipe": 1,
    "1f1b": 1,
    "zb_h1": 1,
    "zb_h2": 1,
    "interleaved": 2,
    "looped_bfs": 3,
    "zbv": 2,
    "dualpipev": 2,
    "auto": 1,
}


def stage(w: Any, x: Any) -> Any:
    return torch.tanh(x @ w["a"]) @ w["b"] + x


def mse(y: Any, t: Any) -> Any:
    return (y - t).square().mean()


def weights(n: int) -> list[Any]:
    draw = torch.Generator().manual_seed(n)
    return [{k: torch.randn(WIDTH, WIDTH, dtype=F64, generator=draw) / 3 for k in "ab"} for _ in range(n)]


def batch(rows: int) -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(rows)
    x, t = torch.randn(2, rows, WIDTH, dtype=F64, generator=draw)
    return x, t


def home(placement: tuple[int, ...]) -> list[str]:
    return [f"... {{at: pp@{r}}}" for r in placement]


def flat(tree: Any) -> list[Any]:
    return [x.full() if isinstance(x, vf.Array) else x for x in vf.tree.flatten(tree)[0]]


def assert_close(found: Any, want: Any) -> None:
    for a, b in zip(flat(found), flat(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def assert_same(found: Any, want: Any) -> None:
    for a, b in zip(flat(found), flat(want), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_give_the_gradients_of_the_sequence(schedule: str, ranks: int) -> None:
    """Up to rounding those of the whole batch, bit for bit those of the loop over microbatches."""
    m, n = 2 * ranks, ranks * SCHEDULES[schedule]
    stages, params, data = [stage] * n, weights(n), batch(4 * ranks)
    grad_fn = pipeline(stages, mse, microbatches=m, schedule=schedule)
    mesh = vf.make_mesh(pp=ranks)
    placed = vf.device_put(params, home(grad_fn.table(ranks).placement), mesh)
    grads, value = vf.pjit(grad_fn)(placed, *data)
    assert all(g.sharding == p.sharding for g, p in zip(vf.tree.flatten(grads)[0], vf.tree.flatten(placed)[0]))
    whole = vf.grad_and_value(sequential(stages, mse))
    assert_close((grads, value), whole(params, *data))
    assert_same((grads, value), accumulate(whole, m)(params, *data))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_with_data_parallel_ranks(schedule: str) -> None:
    n = 2 * SCHEDULES[schedule]
    stages, params, data = [stage] * n, weights(n), batch(8)
    grad_fn = pipeline(stages, mse, microbatches=4, schedule=schedule)
    mesh = vf.make_mesh(pp=2, dp=2)
    placed = vf.device_put(params, home(grad_fn.table(2).placement), mesh)
    step = vf.pjit(grad_fn)
    args = (placed, *vf.device_put(data, "b/dp d", mesh))
    assert_close(step(*args), vf.grad_and_value(sequential(stages, mse))(params, *data))
    reduced = [(r.kind, r.axes, r.count) for r in step.lower(*args).collectives if r.axes == ("dp",)]
    assert {count for _, _, count in reduced} == {1}  # once, after the loop


def test_with_tensor_parallel_ranks() -> None:
    params, data = weights(2), batch(8)
    mesh = vf.make_mesh(pp=2, tp=2)
    specs = [{"a": f"d f/tp {{at: pp@{r}}}", "b": f"f/tp d {{at: pp@{r}}}"} for r in range(2)]
    placed = vf.device_put(params, specs, mesh)
    grads, value = vf.pjit(pipeline([stage] * 2, mse, microbatches=4))(placed, *data)
    assert_close((grads, value), vf.grad_and_value(sequential([stage] * 2, mse))(params, *data))
    assert grads[1]["a"].sharding == placed[1]["a"].sharding


def tied(mesh: Any = None) -> tuple[list[Any], Any, Any]:
    """An embedding that the last stage uses again, a skip from the first stage to the last, and ints on the way."""

    def first(p: Any, tokens: Any) -> Any:
        h = p["wte"][tokens]
        return {"h": torch.tanh(h @ p["w0"]), "skip": h, "tokens": tokens, "name": "text"}

    def middle(p: Any, x: Any) -> Any:
        return {**x, "h": torch.tanh(x["h"] @ p["w1"])}

    def last(p: Any, x: Any) -> Any:
        assert x["name"] == "text"
        return (x["h"] + x["skip"]) @ p["wte"].T * (x["tokens"] > 1).unsqueeze(-1)

    draw = torch.Generator().manual_seed(0)
    params = {"wte": torch.randn(9, WIDTH, dtype=F64, generator=draw), "unused": torch.ones(2, dtype=F64)}
    params |= {k: torch.randn(WIDTH, WIDTH, dtype=F64, generator=draw) for k in ("w0", "w1")}
    tokens = torch.randint(9, (8, 5), generator=draw)
    return [first, middle, last], params, (tokens, torch.randint(9, (8, 5), generator=draw))


def cross_entropy(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("wte", ["v d", "v d {at: pp@0}"])
def test_tied_parameters_skips_and_ints(wte: str, schedule: str) -> None:
    """A parameter that two stages read has one gradient, the sum; any pytree passes, also past a stage."""
    stages, params, data = tied()
    mesh = vf.make_mesh(pp=3)
    specs = {"wte": wte, "w0": "a b {at: pp@0}", "w1": "a b {at: pp@1}", "unused": "..."}
    placed = vf.device_put(params, specs, mesh)
    found = vf.pjit(pipeline(stages, cross_entropy, microbatches=4, schedule=schedule))(placed, *data)
    assert_close(found, vf.grad_and_value(sequential(stages, cross_entropy))(params, *data))


def test_one_rank_accumulates() -> None:
    stages, params, data = tied()
    mesh = vf.make_mesh(pp=1, dp=2)
    step = vf.pjit(pipeline(stages, cross_entropy, microbatches=4), mesh=mesh)
    whole = vf.grad_and_value(sequential(stages, cross_entropy))
    assert_close(step(params, *data), whole(params, *data))
    loop = vf.pjit(accumulate(whole, 4), mesh=mesh)
    assert step.lower(params, *data).as_text() == loop.lower(params, *data).as_text()


def test_a_table_of_your_own() -> None:
    """Also from a CSV file, as torch.distributed.pipelining writes them."""
    params, data = weights(2), batch(6)
    table = Table.of([["0F0", "0F1", "0F2", "0B1", "0B0", "0B2"], ["1F0", "1F1", "1B1", "1B0", "1F2", "1B2"]])
    grad_fn = pipeline([stage] * 2, mse, microbatches=3, schedule=table)
    placed = vf.device_put(params, home((0, 1)), vf.make_mesh(pp=2))
    assert_close(vf.pjit(grad_fn)(placed, *data), vf.grad_and_value(sequential([stage] * 2, mse))(params, *data))


def test_training_moves_the_weights_as_on_one_device() -> None:
    params, data = weights(4), batch(8)
    opt = vf.optim.adamw(lr=0.1)
    chain = sequential([stage] * 4, mse)

    def step_of(grad_fn: Any) -> Any:
        def step(state: Any, *data: Any) -> Any:
            grads, value = grad_fn(state[0], *data)
            return opt.step(grads, state[1], state[0]), value

        return step

    grad_fn = pipeline([stage] * 4, mse, microbatches=4, schedule="zbv")
    mesh = vf.make_mesh(pp=2)
    placed = vf.device_put(params, home(grad_fn.table(2).placement), mesh)
    found, want = (placed, opt.init(placed)), (params, opt.init(params))
    step, plain = vf.pjit(step_of(grad_fn), donate_argnums=0), step_of(vf.grad_and_value(chain))
    for _ in range(3):
        found, _ = step(found, *data)
        want, _ = plain(want, *data)
    assert_close(found[0], want[0])
    assert (flat(found[0])[0] - flat(params)[0]).abs().max() > 0.1


def lowered(schedule: str = "1f1b", m: int = 4, rows: int = 8) -> Any:
    n = 2 * SCHEDULES[schedule]
    grad_fn = pipeline([stage] * n, mse, microbatches=m, schedule=schedule)
    placed = vf.device_put(weights(n), home(grad_fn.table(2).placement), vf.make_mesh(pp=2))
    return vf.pjit(grad_fn).lower(placed, *batch(rows))


def test_messages_are_counted() -> None:
    """An activation forward and its gradient backward, for every microbatch; none where both stages are on a rank."""
    sends = [(r.reduction, r.phase, r.shape, r.nbytes, r.count) for r in lowered("zbv").collectives if r.kind == "send"]
    rows, nbytes = (2, WIDTH), 2 * WIDTH * 8
    assert sends == [
        ("0->1", "forward", rows, nbytes, 4),
        ("2->3", "forward", rows, nbytes, 4),
        ("3->2", "backward", rows, nbytes, 4),
        ("1->0", "backward", rows, nbytes, 4),
    ]
    assert lowered("1f1b").cost_analysis().bytes_sent == {("pp",): 4 * nbytes + 2 * 8}


def test_every_rank_holds_its_stages_only() -> None:
    stats = [lowered("1f1b", m=8, rows=1024).memory_analysis(pp=r) for r in range(2)]
    assert [s.argument for s in stats] == [2 * WIDTH * WIDTH * 8 + 2 * 1024 * WIDTH * 8] * 2
    kept = 128 * WIDTH * 8  # of a microbatch between forward and backward: there are 2 of them in flight, and 8
    assert 5 * kept < lowered("gpipe", m=8, rows=1024).memory_analysis().temp - stats[0].temp <= 6 * kept


def test_a_stage_is_traced_once_whatever_the_number_of_microbatches() -> None:
    few, many = (len(lowered(m=m, rows=16).as_text().splitlines()) for m in (2, 16))
    assert few == many
