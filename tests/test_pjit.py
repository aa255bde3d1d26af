"""pjit: equal to the plain function, lowered once, donation, shardings, and what may be passed."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import array_tasks as tasks
import pytest
import torch
from torch.func import grad, grad_and_value
from worker_pool import Pool

import vescale_fn as vf
from vescale_fn.array import Array
from vescale_fn.sharding import solve
from vescale_fn.tree import flatten

MESH = vf.make_mesh(dp=2, tp=2)


def put(x: Any, spec: Any = "b/dp d", mesh: Any = MESH) -> Any:
    return vf.device_put(x, spec, mesh)


def grid(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got.full() if isinstance(got, Array) else got, want, equal_nan=True)


def sgd(state: dict[str, Any], x: torch.Tensor, lr: float) -> tuple[dict[str, Any], torch.Tensor]:
    def loss(w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).square().mean()

    g, value = grad_and_value(loss)(state["w"])
    return {"w": state["w"] - lr * g, "n": state["n"] + 1}, value


def start() -> dict[str, Any]:
    return {"w": grid(4, 6), "n": torch.zeros(())}


# ---- the same as the plain function, lowered once


def test_a_loop_equals_the_plain_loop_and_is_lowered_once() -> None:
    step, x = vf.pjit(sgd, donate_argnums=0), grid(8, 4)
    state, plain = put(start(), {"w": "d f/tp", "n": ""}), start()
    for i in range(4):
        state, value = step(state, put(x), 0.5 / (i + 1))
        plain, expected = sgd(plain, x, 0.5 / (i + 1))
        assert float(value) == pytest.approx(float(expected), rel=1e-12)
    close(state["w"], plain["w"])
    assert str(state["w"].sharding) == "NamedSharding(dp=2,tp=2: 'd f/tp')"
    assert step.cache_info() == (3, 1)


def test_builtins_say_nothing_about_their_parameters() -> None:
    close(vf.pjit(torch.sin, donate_argnums=0)(put(grid(4, 2))), grid(4, 2).sin())


def test_decorator_factory_and_call() -> None:
    @vf.pjit
    def a(x: torch.Tensor) -> torch.Tensor:
        """Doubles."""
        return 2 * x

    @vf.pjit(donate_argnums=0)
    def b(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    c = vf.pjit(lambda x: 2 * x)
    for f in (a, b, c):
        close(f(put(grid(4, 2))), 2 * grid(4, 2))
    assert (a.__name__, a.__doc__, repr(a)) == ("a", "Doubles.", "pjit(a)")
    close(a.fn(grid(2)), 2 * grid(2))


def test_new_types_are_lowered_anew_and_old_ones_found() -> None:
    f = vf.pjit(lambda x: x.sum())
    xs = [put(grid(4, 2)), put(grid(4, 2).float()), put(grid(2, 2)), put(grid(4, 2), "b d"), grid(4, 2)]
    with pytest.raises(ValueError, match="no mesh"):
        f(xs[-1])
    for x in (*xs[:-1], *xs[:-1]):
        f(x)
    assert f.cache_info() == (4, 4)


def test_floats_vary_freely_and_ints_make_programs() -> None:
    f = vf.pjit(lambda x, k: x * k)
    for k in (0.5, 1.0, float("inf")):
        close(f(put(grid(2, 2)), k), grid(2, 2) * k)
    assert f.cache_info().misses == 1
    for k in (2, True):
        close(f(put(grid(2, 2)), k), grid(2, 2) * k)
    assert f.cache_info().misses == 3


def test_number_promotion_is_that_of_torch() -> None:
    f = vf.pjit(lambda x, k: x * k)
    for dtype in (torch.int32, torch.float16, torch.float64):
        x = torch.ones(2, dtype=dtype)
        for k in (2, 2.5, True):
            assert f(put(x, "b/dp"), k).dtype == (x * k).dtype


def test_a_float_that_decides_is_static_with_one_warning() -> None:
    f = vf.pjit(lambda x, k: x * k if k > 1 else x)
    with pytest.warns(UserWarning, match="takes a decision that depends on the value of k"):
        close(f(put(grid(2, 2)), 2.0), grid(2, 2) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(f(put(grid(2, 2)), 0.5), grid(2, 2))
        close(f(put(grid(2, 2)), 2.0), grid(2, 2) * 2)
    assert f.cache_info() == (1, 2)


def test_an_int_with_many_values_warns_once() -> None:
    f = vf.pjit(lambda x, k: x + k)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(11):
            f(put(grid(2, 2)), k)
    assert [str(w.message) for w in caught] == [
        "<lambda>: k has taken 9 different values, and a new program is made for each. "
        "Pass a tensor or a float if the value varies from call to call."
    ]
    assert caught[0].filename == __file__


def test_keywords_defaults_and_star_arguments() -> None:
    def f(x: Any, *rest: Any, scale: float = 2.0, **more: Any) -> Any:
        return x * scale + sum(rest) + more.get("bias", 0.0)

    x, y = grid(4, 2), grid(4, 2) + 1
    jitted = vf.pjit(f, donate_argnums=2)
    close(jitted(put(x)), f(x))
    close(jitted(put(x), scale=3.0), f(x, scale=3.0))
    z = put(y)
    close(jitted(put(x), put(y), z, bias=put(y)), f(x, y, y, bias=y))
    assert z.is_deleted


def test_static_arguments_are_constants() -> None:
    def f(x: torch.Tensor, how: Any, times: int = 1) -> torch.Tensor:
        return how(x) * times

    jitted = vf.pjit(f, static_argnums=1, static_argnames="times")
    close(jitted(put(grid(4, 2)), torch.sin), grid(4, 2).sin())
    close(jitted(put(grid(4, 2)), torch.cos, times=3), grid(4, 2).cos() * 3)
    close(jitted(put(grid(4, 2)), torch.sin), grid(4, 2).sin())
    assert jitted.cache_info() == (1, 2)


def test_pytrees_of_every_kind() -> None:
    @dataclass(frozen=True)
    class Block:
        w: Any
        b: Any

    vf.pytree(Block)

    def f(tree: Any) -> Any:
        block, rest, flag = tree["block"], tree["rest"], tree["flag"]
        return {"block": Block(block.w * 2, None), "rest": [*rest, {}, ()], "flag": not flag, "name": "x", "n": None}

    tree = {"block": Block(put(grid(4, 2)), None), "rest": [put(grid(2, 2))], "flag": True}
    out = vf.pjit(f)(tree)
    close(out["block"].w, 2 * grid(4, 2))
    assert out["block"].b is None
    assert out["rest"][1:] == [{}, ()]
    assert (out["flag"], out["name"], out["n"]) == (False, "x", None)


def test_0d_zero_size_strided_and_nan() -> None:
    def f(a: Any, b: Any, c: Any, d: Any) -> Any:
        return a + 1, b.sum(0), c @ c.t(), d * 2

    xs = (torch.tensor(3.0), torch.zeros(0, 4), grid(4, 6).t(), torch.tensor([[1.0, float("nan")]] * 2))
    specs = ("", "b/dp d", "b/dp d/tp", "b/dp d")
    for got, want in zip(vf.pjit(f)(*(put(x, s) for x, s in zip(xs, specs))), f(*xs), strict=True):
        close(got, want)


def test_a_result_that_is_an_argument() -> None:
    x = put(grid(4, 2))
    a, b, c = vf.pjit(lambda x: (x, x, x.t()))(x)
    for got in (a, b, x):
        close(got, grid(4, 2))
    vf.pjit(lambda s: s + 1, donate_argnums=0)(a)
    close(x, grid(4, 2))
    close(c, grid(4, 2).t())


def test_plain_tensors_stand_next_to_arrays() -> None:
    f = vf.pjit(lambda x, y: x @ y)
    close(f(put(grid(4, 2)), grid(2, 3)), grid(4, 2) @ grid(2, 3))
    close(f(put(grid(4, 2)), torch.nn.Parameter(grid(2, 3))), grid(4, 2) @ grid(2, 3))
    assert f.cache_info() == (1, 1)


def test_only_plain_tensors_with_a_mesh() -> None:
    f = vf.pjit(lambda x: x.sum(0), mesh=MESH, in_shardings="b/dp d", out_shardings="d/tp")
    out = f(grid(4, 2))
    close(out, grid(4, 2).sum(0))
    assert str(out.sharding.spec) == "a/tp"
    named = vf.pjit(lambda x: x.sum(0), in_shardings=vf.NamedSharding(MESH, "b/dp d"))
    close(named(grid(4, 2)), grid(4, 2).sum(0))


def test_results_that_are_constants_or_numbers() -> None:
    assert vf.pjit(lambda x: 3)(put(grid(2, 2))) == 3
    assert vf.pjit(lambda x, k: (k * 2, None, "s"))(put(grid(2, 2)), 1.5) == (3.0, None, "s")


# ---- ambient modes


def test_no_grad_around_and_inside() -> None:
    def f(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
        return grad(lambda x: (x * y).sum())(x)

    close(vf.pjit(f)(put(grid(4, 2))), f(grid(4, 2)))
    with torch.no_grad():
        close(vf.pjit(f)(put(grid(4, 2))), f(grid(4, 2)))
        close(vf.pjit(sgd)(put(start(), None), put(grid(8, 4)), 0.1)[0]["w"], sgd(start(), grid(8, 4), 0.1)[0]["w"])


def test_autocast_around_and_inside() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return f(x)

    x, jitted = grid(4, 2).float(), vf.pjit(f)
    assert vf.pjit(inside)(put(x)).dtype == torch.bfloat16
    assert jitted(put(x)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert jitted(put(x)).dtype == torch.bfloat16
    assert jitted(put(x)).dtype == torch.float32
    assert jitted.cache_info() == (1, 2)


def test_size_one_axes() -> None:
    mesh = vf.make_mesh(dp=1, tp=1)
    out = vf.pjit(sgd)(put(start(), {"w": "d/dp f/tp", "n": ""}, mesh), put(grid(8, 4), "b/dp d", mesh), 0.1)
    close(out[0]["w"], sgd(start(), grid(8, 4), 0.1)[0]["w"])


# ---- captured values, nesting, plain runs


def test_captured_values_are_read_on_each_call() -> None:
    table, weight = torch.ones(2), put(grid(2, 2), "a b/tp")
    f = vf.pjit(lambda x: x @ weight + table)
    close(f(put(grid(4, 2))), grid(4, 2) @ grid(2, 2) + 1)
    table.fill_(5)
    close(f(put(grid(4, 2))), grid(4, 2) @ grid(2, 2) + 5)
    assert f.cache_info() == (1, 1)


def test_a_function_of_nothing_but_captured_arrays() -> None:
    x = put(grid(4, 2))
    close(vf.pjit(lambda: x.sum(0) + x[0])(), grid(4, 2).sum(0) + grid(4, 2)[0])


def test_nested_steps_are_one_program() -> None:
    inner = vf.pjit(lambda x, k: x * k, static_argnums=1)
    outer = vf.pjit(lambda x: inner(x, 2) + 1)
    close(outer(put(grid(4, 2))), 2 * grid(4, 2) + 1)
    assert inner.cache_info() == (0, 0)
    assert len(outer.lower(put(grid(4, 2))).program.graph.eqns) == 2


def test_disabled_steps_run_the_plain_function() -> None:
    seen: list[type] = []

    @vf.pjit
    def f(x: Any) -> Any:
        seen.append(type(x))
        return x + 1

    with vf.disable_pjit():
        close(f(grid(2)), grid(2) + 1)
        close(f(put(grid(4, 2))), grid(4, 2) + 1)
    assert seen == [torch.Tensor, Array]
    assert f.cache_info() == (0, 0)


def test_trace_gives_the_global_graph() -> None:
    graph = vf.pjit(lambda x: x.sin().sum()).trace(put(grid(4, 2))).graph
    assert [v.shape for v in graph.inputs] == [(4, 2)]
    assert [e.op for e in graph.eqns] == [torch.ops.aten.sin.default, torch.ops.aten.sum.default]


# ---- continuing arguments


def test_outputs_keep_the_layouts_of_what_they_continue() -> None:
    f = vf.pjit(lambda a, b: ({"y": b["y"] * 1, "x": b["x"] * 1}, a * 1, a * 2))
    a, b = put(grid(4, 2), "b/tp d"), put({"x": grid(4, 2), "y": grid(2, 2)}, {"x": "b/dp d", "y": "b d/tp"})
    first, second, third = f(a, b)
    assert (first["x"].type, first["y"].type) == (b["x"].type, b["y"].type)
    assert second.type == third.type == a.type  # several may continue one argument
    assert list(first) == ["y", "x"]


def test_dict_order_of_a_state_is_its_own_after_one_more_lowering() -> None:
    """Key order is part of what a function can see, so states of two orders are lowered apart: the loop settles."""
    f = vf.pjit(lambda s: {"b": s["b"] + 1, "a": s["a"] + 1}, donate_argnums=0)
    s = put({"a": grid(4, 2), "b": grid(2, 2)}, {"a": "b/dp d", "b": "b d/tp"})
    types = {k: x.type for k, x in s.items()}
    for _ in range(4):
        s = f(s)
        assert {k: x.type for k, x in s.items()} == types
    assert f.cache_info() == (2, 2)


def test_out_shardings_win_over_continuing() -> None:
    f = vf.pjit(lambda s: {"a": s["a"] + 1, "b": s["b"]}, out_shardings={"a": "b d/tp", "b": None})
    out = f(put({"a": grid(4, 2), "b": grid(4, 2)}, "b/dp d"))
    assert str(out["a"].sharding.spec) == "a b/tp"
    assert str(out["b"].sharding.spec) == "b/dp d"
    close(out["a"], grid(4, 2) + 1)


def test_in_shardings_by_position_by_name_and_by_rules() -> None:
    def f(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return x @ p["w"]

    specs = [
        ({"w": "d f/tp"}, "b/dp d"),
        {"p": {"w": "d f/tp"}, "x": "b/dp d"},
        vf.rules({"p.w": "d f/tp", "x": "b/dp d"}),
    ]
    texts = set()
    for given in specs:
        jitted = vf.pjit(f, mesh=MESH, in_shardings=given)
        close(jitted({"w": grid(2, 4)}, grid(4, 2)), grid(4, 2) @ grid(2, 4))
        texts.add(jitted.lower({"w": grid(2, 4)}, grid(4, 2)).as_text())
    assert len(texts) == 1
    assert "p_w : f64[2, 4/tp]\n   x   : f64[4/dp, 2]" in texts.pop()


def test_data_decides_before_state() -> None:
    x, y = put(grid(4, 2), "b/dp d"), put(grid(4, 2), "b d/dp")
    by_second = vf.pjit(lambda x, y: (x * y).t().sin())(x, y)
    by_first = vf.pjit(lambda x, y: (x * y).t().sin(), data_argnums=0)(x, y)
    assert [str(a.sharding.spec) for a in (by_second, by_first)] == ["a/dp b", "a b/dp"]


# ---- donation


def test_donated_arrays_are_dead_and_their_storage_is_reused() -> None:
    opt = vf.optim.sgd(lr=0.5, momentum=0.9)

    @vf.pjit(donate_argnums=0)
    def step(state: Any, g: Any) -> Any:
        params, moments = opt.step(g, state["opt"], state["params"])
        return {"params": params, "opt": moments}

    params = put({"w": grid(4, 2)}, "b/dp d")
    state, g = {"params": params, "opt": opt.init(params)}, put({"w": grid(4, 2)}, "b/dp d")
    del params
    where = [s.data_ptr() for s in state["params"]["w"].shards]
    new = step(state, g)
    assert all(x.is_deleted for x in flatten(state)[0])
    assert not g["w"].is_deleted
    assert [s.data_ptr() for s in new["params"]["w"].shards] == where


def test_memory_of_donated_arrays_is_free_when_the_step_is_done_with_it() -> None:
    x = put(grid(4, 2))
    gone = [weakref.ref(s.untyped_storage()) for s in x.shards]
    vf.pjit(lambda x: x.sum(), donate_argnums=0)(x)
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_others_that_see_donated_storage_see_no_change() -> None:
    opt = vf.optim.adamw(lr=0.5)
    step = vf.pjit(lambda p, s, g: opt.step(g, s, p), donate_argnums=(0, 1))
    p = put({"w": grid(4, 2)}, "b/dp d")
    view, s, g = p["w"].shards[0].view(-1), opt.init(p), put({"w": grid(4, 2)}, "b/dp d")
    before = view.clone()
    step(p, s, g)
    assert torch.equal(view, before)


def test_a_step_that_raises_loses_its_donated_arguments_and_says_so() -> None:
    table = put(grid(4, 2))

    def f(state: Any, index: Any) -> Any:
        return {"w": state["w"] + 1, "v": table[index]}

    bad = put(torch.tensor([9]), "i")
    state = put({"w": grid(4, 2)}, "b/dp d")
    with pytest.raises(RuntimeError) as e:
        vf.pjit(f, donate_argnums=0)(state, bad)
    assert e.value.__notes__[-1] == (
        "f raised while it ran, so its donated arguments are lost: state.w. "
        'pjit(donate="safe") keeps them until a call has succeeded, at the price of memory for a second copy.'
    )
    assert repr(state["w"]) == ("Array(f64[4, 2] 'b/dp d' on dp=2,tp=2; donated to f, which raised RuntimeError)")


def test_safe_donation_keeps_arguments_of_a_step_that_raises() -> None:
    table = put(grid(4, 2))
    step = vf.pjit(lambda s, i: {"w": s["w"] + 1, "v": table[i]}, donate_argnums=0, donate="safe")
    state = put({"w": grid(4, 2)}, "b/dp d")
    with pytest.raises(RuntimeError) as e:
        step(state, put(torch.tensor([9]), "i"))
    assert not any("donated" in note for note in e.value.__notes__)
    close(state["w"], grid(4, 2))
    close(step(state, put(torch.tensor([1]), "i"))["w"], grid(4, 2) + 1)
    assert state["w"].is_deleted


def test_nothing_is_taken_from_a_call_with_one_dead_argument() -> None:
    step = vf.pjit(lambda s: {k: x + 1 for k, x in s.items()}, donate_argnums=0)
    s = put({"a": grid(4, 2), "b": grid(4, 2)}, "b/dp d")
    vf.pjit(lambda x: x + 1, donate_argnums=0)(s["b"])
    with pytest.raises(RuntimeError, match=r"argument s\.b is an Array"):
        step(s)
    close(s["a"], grid(4, 2))


# ---- abstract meshes


def test_a_step_on_an_abstract_mesh_allocates_nothing() -> None:
    """A 70B-shaped block on 4096 ranks."""
    mesh, opt = vf.abstract_mesh(dp=512, tp=8), vf.optim.adamw(lr=1e-4)
    d, f = 8192, 28672
    shapes = {"qkv": (d, 3 * d), "o": (d, d), "up": (d, f), "down": (f, d)}
    params = vf.device_put(
        {k: vf.ShapeDtype(s, torch.bfloat16) for k, s in shapes.items()},
        vf.rules({"qkv": "d (qkv h/tp k)", "o": "f/tp d", "up": "d f/tp", "down": "f/tp d"}, qkv=3, h=64),
        mesh,
    )
    x = vf.device_put(vf.ShapeDtype((4096, d), torch.bfloat16), "b/dp d", mesh)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ p["qkv"]).chunk(3, -1)
        h = x + (q * k * v) @ p["o"]
        return (h + torch.relu(h @ p["up"]) @ p["down"]).float().square().mean()

    @vf.pjit(donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        grads, value = grad_and_value(loss)(state["params"], x)
        new, moments = opt.step(grads, state["opt"], state["params"])
        return {"params": new, "opt": moments}, value

    state = {"params": params, "opt": opt.init(params)}
    assert state["opt"]["exp_avg"]["up"].layout == params["up"].layout
    lowered = step.lower(state, x)
    assert {r.axes for r in lowered.collectives} == {("dp",), ("tp",)}
    assert lowered.memory_analysis().argument > 2**20
    new, value = step(state, x)
    assert repr(new["params"]["o"]) == "Array(bf16[8192, 8192] 'f/tp d' on dp=512,tp=8; no values)"
    assert tuple(value.shape) == ()


def test_shapes_alone_can_be_lowered() -> None:
    f = vf.pjit(lambda x: x.sum(), mesh=vf.abstract_mesh(dp=4), in_shardings="b/dp d")
    assert "all_reduce" in f.lower(vf.ShapeDtype((8, 2))).as_text()


# ---- options


def test_plans_are_kept_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh(**options: Any) -> Any:
        return vf.pjit(sgd, cache_dir=tmp_path / "plans", **options)

    args = (put(start(), {"w": "d f/tp", "n": ""}), put(grid(8, 4)), 0.1)
    first = fresh().lower(*args)
    (path,) = (tmp_path / "plans").iterdir()
    assert path.name.startswith("sgd-")

    with monkeypatch.context() as m:
        m.setattr(solve, "solve", lambda *_, **__: pytest.fail("a kept plan must not be solved again"))
        again = fresh().lower(*args)
        assert again.as_text() == first.as_text()
        close(fresh()(*args)[0]["w"], sgd(start(), grid(8, 4), 0.1)[0]["w"])

    others = [
        (put(start(), {"w": "d f/dp", "n": ""}), *args[1:]),
        (args[0], put(grid(8, 4), "b/tp d"), 0.1),
        (args[0], put(grid(4, 4)), 0.1),
    ]
    for other in others:
        fresh().lower(*other)
    fresh(data_argnums=0).lower(*args)
    fresh(rules={torch.ops.aten.tanh.default: "a b -> a b"}).lower(*args)
    assert len(list((tmp_path / "plans").iterdir())) == 6

    path.write_text("damaged")
    assert fresh().lower(*args).as_text() == first.as_text()
    assert path.read_text() != "damaged"


def test_inductor_compiles_programs_without_collectives() -> None:
    script = Path(__file__).parent / "inductor_step.py"  # on its own: inductor changes the state of a process
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "equal"


def test_deterministic_is_an_option() -> None:
    close(vf.pjit(lambda x: x.sum(), deterministic=True)(put(grid(4, 2))), grid(4, 2).sum())


def test_audit_finds_ranks_that_differ() -> None:
    step = vf.pjit(lambda s: {"w": s["w"] + 1, "v": s["v"].sum(0)}, audit=2)
    s = put({"w": grid(4, 2), "v": grid(4, 2)}, {"w": "b/dp d", "v": "b/dp d"})
    for _ in range(4):
        step(s)
    s["w"].shards[3][0, 0] += 1e-9
    step(s)
    with pytest.raises(vf.AuditError, match=r"^<lambda>: the replicas of w \(.*\) differ: rank 3 against rank 2\. "):
        step(s)


def test_verify_finds_nothing_wrong() -> None:
    state = put(start(), {"w": "d f/tp", "n": ""})
    found = vf.pjit(sgd, donate_argnums=0).verify(state, put(grid(8, 4)), 0.1)
    assert found, str(found)
    assert not state["w"].is_deleted


# ---- several processes


def test_two_processes_give_the_bits_of_two_virtual_ranks(pool: Pool) -> None:
    losses, weight, misses, text = tasks.train(vf.make_mesh(dp=2))
    assert (misses, text) == (1, "Array(f32[4, 3] 'd/dp f' on dp=2; rank 0")
    for got in pool.run(tasks.train_on_processes):
        assert got == (losses, weight, 1, "Array(f32[4, 3] 'd/dp f' on dp=2; this p")


def test_audit_across_processes(pool: Pool) -> None:
    said = pool.run(tasks.audit_a_broken_replica)
    assert all(s.startswith("<lambda>: the replicas of w (f32[4, 2] 'b d' on dp=2) differ: rank 1 ") for s in said)


def test_a_failure_on_one_process_loses_donated_arguments_on_all(pool: Pool) -> None:
    for note, is_deleted in pool.run(tasks.fail_in_a_step):
        assert is_deleted
        assert note.startswith("<lambda> raised while it ran, so its donated arguments are lost: w. ")
