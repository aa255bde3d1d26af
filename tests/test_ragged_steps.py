"""Ragged Arrays in steps: units, owners and merged dims through conversions, operations, gradients and updates.

The reference is the plain function on one device, and for conversions the parts that `device_put` gives each rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import ragged_tasks as tasks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import FROM_SCHEMA, SAMPLES, Sample
from pairwise import pairwise
from rule_machine import _flat_tensors, _map_tensors, _results, _same
from test_memory import measured
from torch.func import grad, vjp
from worker_pool import Pool

import vescale_fn as vf
from vescale_fn import optim
from vescale_fn.memory import peak_bytes
from vescale_fn.sharding.spec import SpecError

F64 = torch.float64
UNITS = "[0 1 5 2 0 0 0 0]"


def grid(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=dtype).reshape(shape)


def shards(x: vf.Array) -> list[torch.Tensor]:
    return [s.data for s in x.addressable_shards]


def same_shards(a: vf.Array, b: vf.Array) -> bool:
    return a.sharding.layout(a.shape) == b.sharding.layout(b.shape) and all(map(torch.equal, shards(a), shards(b)))


def kinds(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [c.kind for c in vf.pjit(fn).lower(*args).collectives]


# ---- every operation


def specs_of(t: torch.Tensor) -> list[str]:
    """Rows in units, all dims merged in units, an owner."""
    if not t.dim() or t.numel() < 2:
        return ["..."] * 3
    names, n = " ".join("abcdefgh"[: t.dim()]), t.numel()
    rows = f"a~[1 0 {t.shape[0] - 1}]/dp ..." if t.shape[0] > 1 else "..."
    return [rows, f"({names})~[0 1 {n - 1}]/dp", "a~@1/dp ..."]


def check_sample(sample: Sample, which: int) -> None:
    """The operation of a sample where all its tensors are ragged, against itself on whole ones."""
    mesh, (args, kwargs) = vf.make_mesh(dp=3), sample.tensors()
    tensors = _flat_tensors(args, kwargs)

    def call(*given: torch.Tensor) -> Any:
        parts = iter(given)
        a, k = _map_tensors((args, kwargs), lambda t: next(parts))
        return sample.op(*a, **k)

    arrays = [vf.device_put(t, specs_of(t)[which], mesh) for t in tensors]
    got = vf.pjit(call, mesh=mesh)(*arrays)
    for x, want in zip([got] if isinstance(got, vf.Array) else got, _results(sample.op(*args, **kwargs)), strict=True):
        assert _same(x.full() if isinstance(x, vf.Array) else x, want)


CALLS = [(s, i) for s in (*SAMPLES, *filter(None, FROM_SCHEMA)) for i in range(3)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(3))
def test_operations_on_ragged_arrays_are_right(part: int, deep: bool) -> None:
    for sample, which in CALLS[part :: 3 if deep else 21]:
        check_sample(sample, which)


CUTS = [
    ((32, 128), f"a~{UNITS}/x b"),
    ((32, 128), f"(a b)~{UNITS}/x"),
    ((32, 128), "a~@1/x b"),
    ((32, 128), "(a b)~[455 1000 2000 641 0 0 0 0]/x"),
    ((16, 4, 64), f"a~{UNITS}/x b c"),
    ((16, 4, 64), f"(a b)~{UNITS}/x c"),
    ((16, 4, 64), "(a b c)~@1/x"),
]


@pytest.mark.parametrize(("shape", "spec"), CUTS)
def test_elementwise_operations_run_where_the_shards_are(shape: tuple[int, ...], spec: str) -> None:
    x = torch.zeros(shape, dtype=torch.int64)
    a = vf.device_put(x, spec, vf.make_mesh(x=8))
    numbers = grid(*shape, dtype=torch.int64)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, torch.arange(math.prod(shape)).reshape(shape)) + 1

    assert kinds(step, a) == []
    assert same_shards(vf.pjit(step)(a), vf.device_put(numbers + 1, spec, vf.make_mesh(x=8)))


def test_constants_that_a_step_captures_are_cut_without_communication() -> None:
    rows = grid(32, 128)
    a = vf.device_put(rows, f"(a b)~{UNITS}/x", vf.make_mesh(x=8))
    assert kinds(lambda x: x * rows, a) == []
    assert same_shards(vf.pjit(lambda x: x * rows)(a), vf.device_put(rows * rows, f"(a b)~{UNITS}/x", a.mesh))


@pytest.mark.parametrize(("shape", "spec"), CUTS)
def test_norms(shape: tuple[int, ...], spec: str) -> None:
    x = grid(*shape)
    a = vf.device_put(x, spec, vf.make_mesh(x=8))
    for dim in (None, *range(len(shape))):
        got = vf.pjit(lambda x, dim=dim: torch.linalg.vector_norm(x, dim=dim))(a).full()
        assert torch.allclose(got, torch.linalg.vector_norm(x, dim=dim), rtol=1e-14, atol=0)
    assert kinds(torch.linalg.vector_norm, a) == ["all_reduce"]
    assert kinds(torch.mean, a) == ["all_reduce"]


def test_means_count_what_is_there() -> None:
    """With units [1 4 2 1] and [0 4 3 1] a mean of means would be 25.0 and nan."""
    for units in ("[1 4 2 1]", "[0 4 3 1]"):
        a = vf.device_put(grid(48), f"a~{units}/x", vf.make_mesh(x=4))
        assert float(vf.pjit(torch.mean)(a)) == 23.5


def test_two_groups_of_merged_dims() -> None:
    x = grid(4, 3, 2, 6)
    spec = "(a b)~[1 3]/x (c d)~[0 5 1]/y"
    a = vf.device_put(x, spec, vf.make_mesh(x=2, y=3))
    assert [s.shape for s in shards(a)] == [(3 * i, 2 * j) for i in (1, 3) for j in (0, 5, 1)]
    assert kinds(torch.exp, a) == []
    assert same_shards(vf.pjit(lambda x: x * x)(a), vf.device_put(x * x, spec, a.mesh))
    assert float(vf.pjit(torch.sum)(a)) == x.sum()


def test_views_of_merged_dims_are_free() -> None:
    a = vf.device_put(grid(6, 4), "(a b)~[1 5 0 6]/x", vf.make_mesh(x=4))
    assert kinds(lambda x: x.reshape(-1), a) == []
    assert same_shards(a.reshape(-1), vf.device_put(grid(24), "a~[1 5 0 6]/x", a.mesh))
    back = vf.pjit(lambda x: x.reshape(-1).cos().reshape(6, 4))
    assert [c.kind for c in back.lower(a).collectives] == []
    assert same_shards(back(a), vf.device_put(grid(6, 4).cos(), "(a b)~[1 5 0 6]/x", a.mesh))


def test_layers_of_a_loop_are_ragged() -> None:
    """What is iterated over loses a dim: merged dims move with it."""
    ws, h = grid(3, 4, 6) / 50, grid(4, 6) / 10
    mesh = vf.make_mesh(x=3)

    def step(ws: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return vf.scan(lambda h, w: (h * w + w, h.sum()), h, ws)

    a, b = vf.device_put((ws, h), ("l (a b)~[1 0 2]/x", "(a b)~[1 0 2]/x"), mesh)
    got, want = vf.pjit(step)(a, b), step(ws, h)
    assert same_shards(got[0], vf.device_put(want[0], "(a b)~[1 0 2]/x", mesh))
    assert torch.allclose(got[1].full(), want[1], rtol=1e-14)
    assert {c.kind for c in vf.pjit(step).lower(a, b).collectives} == {"all_reduce"}


# ---- conversions


def test_a_pending_sum_becomes_ragged_in_one_reduce_scatter() -> None:
    x, w = grid(8, 5), grid(5, 6)
    rows, columns = vf.device_put((x.t().contiguous(), w), ("k/dp m", "k/dp n"), vf.make_mesh(dp=5))
    for spec in ("m~[1 0 2 3 2]/dp n", "(m n)~[5 6 7 30 0]/dp", "m~@3/dp n"):
        fn = vf.pjit(lambda x, w, spec=spec: vf.reshard(x.t() @ w, spec))
        (found,) = fn.lower(rows, columns).collectives
        assert (found.kind, found.axes) == ("reduce_scatter", ("dp",))
        assert same_shards(fn(rows, columns), vf.device_put(x @ w, spec, rows.mesh))


@pytest.mark.parametrize("shape", [(24, 3), (25, 3), (26, 3), (3, 24), (3, 25), (3, 26)])
def test_gathering_has_a_gradient_without_communication(shape: tuple[int, ...]) -> None:
    """The cotangent of what was gathered is there on every rank, which takes its own part of it; empty parts too."""
    n = math.prod(shape)
    cuts = sorted(torch.randint(n + 1, (7,), generator=torch.Generator().manual_seed(n)).tolist())
    units = [b - a for a, b in itertools.pairwise([0, *cuts[:5], cuts[4], cuts[4], n])]
    assert 0 in units
    spec, mesh = f"(a b)~[{' '.join(map(str, units))}]/x", vf.make_mesh(x=8)
    a, ct = vf.device_put((grid(*shape), torch.ones(shape, dtype=F64)), (spec, "a b"), mesh)

    def step(x: torch.Tensor, ct: torch.Tensor) -> Any:
        y, pull = vjp(lambda x: vf.reshard(x, "a b"), x)
        return y, vf.reshard(pull(ct)[0], spec)

    assert [(c.kind, c.phase) for c in vf.pjit(step).lower(a, ct).collectives] == [("all_gather", "forward")]
    y, g = vf.pjit(step)(a, ct)
    assert torch.equal(y.full(), grid(*shape))
    assert same_shards(g, vf.device_put(torch.ones(shape, dtype=F64), spec, mesh))


@st.composite
def ways(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, int], list[str]]:
    """A shape, a mesh, and specs: in units, owned, merged, sharded evenly or like chunks, whole; another axis may
    shard another dim."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3)))
    mesh = draw(st.sampled_from([{"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}, {"y": 2, "x": 3}]))
    n = mesh["x"]

    def units(size: int) -> str:
        if draw(st.integers(0, 3)) == 0:
            return f"@{draw(st.integers(0, n - 1))}"
        cuts = [0, *sorted(draw(st.lists(st.integers(0, size), min_size=n - 1, max_size=n - 1))), size]
        return f"[{' '.join(str(b - a) for a, b in itertools.pairwise(cuts))}]"

    def spec() -> str:
        first = draw(st.integers(0, len(shape) - 1))
        last = draw(st.integers(first, len(shape) - 1))
        names = [*"abc"[: len(shape)]]
        others = [d for d in range(len(shape)) if not first <= d <= last and shape[d] % mesh.get("y", 5) == 0]
        if others and draw(st.booleans()):
            names[draw(st.sampled_from(others))] += "/y"
        group = " ".join(names[first : last + 1])
        cut = draw(st.sampled_from(["", "~/x", "~", "~"]))
        cut = f"~{units(math.prod(shape[first : last + 1]))}/x" if cut == "~" else cut
        names[first : last + 1] = [f"({group}){cut}" if last > first and cut else f"{group}{cut}"]
        return " ".join(names)

    return shape, mesh, [spec() for _ in range(4)]


@settings(max_examples=60)
@given(ways())
def test_chains_lose_nothing(way: tuple[tuple[int, ...], dict[str, int], list[str]]) -> None:
    """Any layout to any other, and back: each rank holds what `device_put` gives it."""
    shape, sizes, specs = way
    mesh, x = vf.make_mesh(**sizes), grid(*shape)
    a = vf.device_put(x, specs[0], mesh)
    for spec in (*specs[1:], specs[0]):
        a = vf.reshard(a, spec)
        assert same_shards(a, vf.device_put(x, spec, mesh))


def test_units_change_in_one_exchange() -> None:
    a = vf.device_put(grid(12, 5), "a~[1 0 5]/x b", vf.make_mesh(x=3))
    for spec in ("a~[2 2 2]/x b", "a~[4 1 1]/x b", "a b", "a~@2/x b"):
        (found,) = vf.pjit(lambda x, spec=spec: vf.reshard(x, spec), out_shardings=spec).lower(a).collectives
        assert found.kind == ("all_gather" if spec == "a b" else "exchange")


@pytest.mark.parametrize("sizes", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_meshes_of_two_axes(sizes: tuple[int, int]) -> None:
    """Units on one axis, the other axis cuts a dim that is not merged; or a factor of the dim, as a dim of its own."""
    n, m = sizes
    mesh, units = vf.make_mesh(fsdp=n, ep=m), " ".join(map(str, (0, 1, 5, 2, 0, 3, 1, 0)[:n])).replace("0", "2", n == 1)
    total = sum(map(int, units.split()))
    x = grid(m, 4 * total, 2 * m, 3)
    for spec in (f"e/ep a~[{units}]/fsdp b c", f"e (a b)~[{units}]/fsdp c", f"e a~[{units}]/fsdp b/ep c"):
        a = vf.device_put(x, spec, mesh)
        assert kinds(lambda x: x * 2 - 1, a) == []
        assert torch.equal(vf.pjit(lambda x: x * 2 - 1)(a).full(), x * 2 - 1)
        assert same_shards(vf.reshard(vf.reshard(a, "e a b/ep c"), spec), a)


# ---- training


def loss(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"] - y).square().mean()


PARAMS = {k: grid(*s).sin() / 2 for k, s in {"up": (12, 10), "bias": (10,), "down": (10, 12)}.items()}
LAYOUTS = {
    "rows": {"up": "a~[0 3 1]/dp b", "bias": "a~[1 4 0]/dp", "down": "a~[1 1 3]/dp b"},
    "merged": {"up": "(a b)~[7 50 3]/dp", "bias": "a~[0 9 1]/dp", "down": "(a b)~[0 1 7]/dp"},
    "owners": {"up": "a~@2/dp b", "bias": "a~@0/dp", "down": "(a b)~@1/dp"},
}
OPTIMIZERS = {
    "adamw": optim.adamw(lr=0.02),
    "momentum": optim.sgd(lr=0.1, momentum=0.9),
    "clipped": optim.chain(optim.clip_norm(0.1), optim.adamw(lr=0.02)),
    "adafactor": optim.adafactor(lr=0.02),
    "rmsprop": optim.rmsprop(lr=0.01),
}


@pytest.mark.parametrize("case", pairwise({"at": [*LAYOUTS], "optimizer": [*OPTIMIZERS]}), ids=str)
def test_training_with_ragged_parameters_equals_one_device(case: dict[str, str]) -> None:
    opt, mesh, specs = OPTIMIZERS[case["optimizer"]], vf.make_mesh(dp=3), LAYOUTS[case["at"]]
    batch = grid(24, 12).cos(), grid(24, 12).sin()

    def step(state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        grads = grad(loss)(state["params"], x, y)
        params, moments = opt.step(grads, state["opt"], state["params"])
        return {"params": params, "opt": moments}

    params = vf.device_put(PARAMS, specs, mesh)
    state, plain = {"params": params, "opt": opt.init(params)}, {"params": PARAMS, "opt": opt.init(PARAMS)}
    arrays, run = vf.device_put(batch, "b/dp _", mesh), vf.pjit(step, donate_argnums=0)
    if case["optimizer"] in ("adamw", "momentum"):
        found = [c for c in run.lower(state, *arrays).collectives if math.prod(c.shape) > 1]
        assert sorted(c.kind for c in found for _ in range(c.operands)) == ["all_gather"] * 3 + ["reduce_scatter"] * 3
    for _ in range(5):
        state, plain = run(state, *arrays), step(plain, *batch)
    for k in PARAMS:
        assert (state["params"][k].full() - plain["params"][k]).abs().max() < 1e-12
        assert (plain["params"][k] - PARAMS[k]).abs().max() > 1e-3  # it did train
    assert run.cache_info().misses == 1  # outputs live where inputs do


@pytest.mark.parametrize("at", LAYOUTS)
def test_updates_run_where_the_shards_are_with_the_same_bits(at: str) -> None:
    opt, mesh, grads = optim.adamw(lr=0.1), vf.make_mesh(dp=3), {k: w.cos() for k, w in PARAMS.items()}
    p, g = vf.device_put((PARAMS, grads), (LAYOUTS[at], LAYOUTS[at]), mesh)
    state = opt.init(p)
    assert str(state["exp_avg"]["up"].sharding.spec) == LAYOUTS[at]["up"]
    assert kinds(opt.step, g, state, p) == []
    got, want = opt.step(g, state, p), opt.step(grads, opt.init(PARAMS), PARAMS)
    for k in PARAMS:
        assert torch.equal(got[0][k].full(), want[0][k])
        assert torch.equal(got[1]["exp_avg_sq"][k].full(), want[1]["exp_avg_sq"][k])


@pytest.mark.parametrize("at", LAYOUTS)
def test_memory_of_each_rank_is_what_it_holds(at: str) -> None:
    """No two ranks hold as much: the analysis of each equals the virtual engine's count."""
    opt, mesh = optim.adamw(lr=0.1), vf.make_mesh(dp=3)
    p, g = vf.device_put((PARAMS, PARAMS), (LAYOUTS[at], LAYOUTS[at]), mesh)
    program = vf.pjit(opt.step, donate_argnums=(1, 2)).lower(g, opt.init(p), p).program
    assert measured(program) == [peak_bytes(program, c) for c in program.mesh.all_coords()]


# ---- several processes


@pytest.mark.parametrize(("processes", "ranks"), [(2, 4), (3, 3), (4, 4)])
def test_processes_equal_virtual_ranks_bitwise(pool: Pool, processes: int, ranks: int) -> None:
    expected = tasks.ragged(-1, 1, ranks)
    got = [rank for process in pool.run(tasks.ragged, ranks, processes=processes) for rank in process]
    for here, there in zip(expected, got, strict=True):
        assert all(map(torch.equal, here, there))


# ---- messages


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("a~[-1 2 1]/x b", "Unexpected '-': a spec is made of names, sizes and ( ) / ~ { }."),
        ("a~[0 0 0]/x b", "Units must not all be 0."),
        ("a~[1 2]/x b", "~[1 2] has 2 units, but x=3 needs one for each rank."),
        (
            "a~[1 2 2]/x b",
            "'a' has 12 rows, which is not a multiple of the 5 units of ~[1 2 2]. Choose units whose sum divides it.",
        ),
        ("a~@3/x b", "There is no coordinate 3 on axis 'x': use 0 to 2."),
    ],
)
def test_messages(spec: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        vf.device_put(grid(12, 5), spec, vf.make_mesh(x=3))
    assert message in str(caught.value)
