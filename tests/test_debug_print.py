"""`debug_print`: what is printed, how often, in which order, and that a step does not change by it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import debug_tasks as tasks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, grad_and_value, jvp, vmap
from worker_pool import Pool

import vescale_fn as vf
from vescale_fn.dead_code import without_effects
from vescale_fn.export import export_text
from vescale_fn.interpret import run_graph
from vescale_fn.sharding.graph import Call, Scan, equations, has_effect
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval

MESH = vf.make_mesh(dp=2, tp=2)


def printed(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The lines that fn(*args) prints as a pjit."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        vf.pjit(fn)(*args)
    return out.getvalue().splitlines()


def vector() -> vf.Array:
    return vf.device_put(torch.arange(4.0), "d/dp", MESH)


def matrix() -> vf.Array:
    return vf.device_put(torch.arange(6.0).reshape(3, 2), "a b/dp", MESH)


def square(x: Any) -> Any:
    vf.debug_print("sum {:.0f} of {}", x.sum(), x)
    vf.debug_print("then")
    return (x * x).sum()


LINES = ["sum 6 of tensor([0., 1., 2., 3.])", "then"]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        grad,
        lambda f: grad(lambda x: grad(f)(x).sum()),
        lambda f: lambda x: jvp(f, (x,), (x,)),
        lambda f: lambda x: jvp(grad(f), (x,), (x,)),
        lambda f: lambda x: vf.call(f, x),
        lambda f: grad(lambda x: vf.call(f, x)),
        lambda f: grad(lambda x: vf.call(f, x, remat=True)),
        lambda f: grad(lambda x: vf.call(lambda x: vf.call(f, x), x, remat=True)),
        lambda f: grad(lambda x: grad(lambda x: vf.call(f, x, remat=True))(x).square().sum()),
        lambda f: lambda x: jvp(lambda x: vf.call(f, x), (x,), (x,)),
        lambda f: lambda x: vf.call(lambda x: (f(x), None)[1], x),
    ],
)
def test_once_under_every_transform(transform: Any) -> None:
    assert printed(lambda x: (transform(square)(x), x)[1], vector()) == LINES


def test_for_each_element_of_a_batch() -> None:
    def pair(x: Any, y: Any) -> Any:
        vf.debug_print("{:.0f} and {:.0f}", x, y)
        return x * y

    rows, other = torch.tensor([1.0, 2.0]), torch.tensor(5.0)
    x = vf.device_put(rows, "d/dp", MESH)
    assert printed(lambda x: vmap(pair, (0, None))(x, other), x) == ["1 and 5", "2 and 5"]
    assert printed(lambda x: vmap(grad(lambda a: pair(a, other)))(x), x) == ["1 and 5", "2 and 5"]
    nested = vmap(lambda a: vmap(lambda b: pair(a, b))(rows * 1))
    assert printed(lambda x: nested(x), x) == ["1 and 1", "1 and 2", "2 and 1", "2 and 2"]


def total(rows: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        vf.debug_print("{:.0f} + {}", carry, row)
        return carry + row.sum(), None

    return vf.scan(body, rows.sum() * 0, rows)[0]


@pytest.mark.parametrize(
    "transform", [lambda f: f, grad, lambda f: lambda x: jvp(f, (x,), (x,)), lambda f: grad(lambda x: grad(f)(x).sum())]
)
def test_in_every_iteration_of_a_loop(transform: Any) -> None:
    lines = ["0 + tensor([0., 1.])", "1 + tensor([2., 3.])", "6 + tensor([4., 5.])"]
    assert printed(lambda x: transform(total)(x), matrix()) == lines


def test_a_loop_under_vmap() -> None:
    def body(carry: Any, x: Any) -> Any:
        return carry + x, vf.debug_print("{:.0f}", x)

    lines = printed(lambda m: vmap(lambda row: vf.scan(body, row.sum() * 0, row)[0])(m), matrix())
    assert lines == ["0", "2", "4", "1", "3", "5"]


def test_a_loop_that_only_prints() -> None:
    def body(carry: Any, x: Any) -> Any:
        return carry + 1, vf.debug_print("{:.0f} {}", carry, x)

    def step(m: Any) -> Any:
        vf.scan(body, m.sum() * 0, m)
        return m

    assert printed(step, matrix()) == ["0 tensor([0., 1.])", "1 tensor([2., 3.])", "2 tensor([4., 5.])"]


def test_every_rank_prints_its_part() -> None:
    def step(x: Any, m: Any) -> Any:
        vf.debug_print("{} {:.0f}", x, (m * 1).sum(), per_rank=True)
        return x

    lines = printed(step, vector(), matrix())
    parts = ["tensor([0., 1.])", "tensor([0., 1.])", "tensor([2., 3.])", "tensor([2., 3.])"]
    sums = [6, 6, 9, 9]  # pending: what this rank's column adds
    assert lines == [f"rank {r} (dp={r // 2}, tp={r % 2}): {part} {n}" for r, (part, n) in enumerate(zip(parts, sums))]


def test_looking_does_not_change_the_plan() -> None:
    """Parts are printed where they are, and what is gathered is gathered for the eye only."""

    def loss(w: Any, x: Any, look: bool) -> Any:
        h = torch.relu(x @ w["up"])
        if look:
            vf.debug_print("{}", h, per_rank=True)
            vf.debug_print("{}", h)
        return (h @ w["down"]).square().sum()

    w = {"up": torch.ones(4, 8), "down": torch.ones(8, 4)}
    w = vf.device_put(w, {"up": "d f/tp", "down": "f/tp d"}, MESH)
    x = vf.device_put(torch.ones(6, 4), "b/dp d", MESH)
    plain, looked = (vf.pjit(lambda w, x, look=look: grad(loss)(w, x, look)).lower(w, x) for look in (False, True))
    names = {v.name: x for v, x in plain.plan.values.items()}
    assert names == {v.name: x for v, x in looked.plan.values.items()}
    more = [(c.kind, c.axes, c.source.line) for c in looked.collectives]
    for c in plain.collectives:
        more.remove((c.kind, c.axes, c.source.line))
    assert [kind for kind, _, _ in more] == ["all_gather", "all_gather"]


def test_lines_come_in_the_order_of_the_program() -> None:
    """Reductions that go ahead, and work that goes behind them, leave the order of what is printed."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = x
            for i, k in enumerate(("a", "b", "c", "d")):
                h = torch.tanh(h @ w[k])
                vf.debug_print(f"layer {i} {{:.0f}}", h.sum() * 0)
            return h.sum()

        grads, value = grad_and_value(loss)(w)
        vf.debug_print("done {:.0f}", value * 0)
        return grads

    specs = {"a": "d f/tp", "b": "f/tp d", "c": "d f/tp", "d": "f/tp d"}
    w = vf.device_put({k: torch.ones(8, 8) / 8 for k in specs}, specs, MESH)
    x = vf.device_put(torch.ones(4, 8), "b/dp d", MESH)
    assert printed(step, w, x) == [*(f"layer {i} 0" for i in range(4)), "done 0"]


def test_in_a_region() -> None:
    """Lowered and at once: for each rank along the axes of the region, and for every rank."""

    def region(x: Any) -> Any:
        vf.debug_print("{:.0f} of {}", vf.psum(x.sum(), "dp"), x.sum(0))
        vf.debug_print("{:.0f}", x.sum(), per_rank=True)
        return x * 2

    mapped = vf.shard_map(region, mesh=MESH, in_specs="a/dp b", out_specs="a/dp b", axis_names={"dp"})
    x = vf.device_put(torch.arange(8.0).reshape(4, 2), "a/dp b", MESH)
    once = ["dp=0: 28 of tensor([2., 4.])", "dp=1: 28 of tensor([10., 12.])"]
    parts = [f"rank {r} (dp={r // 2}, tp={r % 2}): {(6, 22)[r // 2]}" for r in range(4)]
    assert sorted(printed(mapped, x)) == sorted(once + parts)
    assert sorted(printed(lambda x: grad(lambda x: mapped(x).sum())(x), x)) == sorted(once + parts)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        mapped(x)
    assert out.getvalue().splitlines() == once + parts


def test_a_line_that_waits_for_a_transfer_holds_back_the_next() -> None:
    def step(x: Any) -> Any:
        vf.debug_print("whole {}", x)
        vf.debug_print("part {}", x, per_rank=True)
        vf.call(lambda x: vf.debug_print("inside {}", x, per_rank=True), x)
        return x.sum()

    words = [line.split(": ")[-1].split()[0] for line in printed(step, vector())]
    text = vf.pjit(step).lower(vector()).as_text()
    assert text.index("'whole") < text.index("'part") < text.index("'inside")
    assert words == ["whole", *["part", "inside"] * 4]


# ---- what is printed


@given(
    st.lists(
        st.sampled_from(["{}", "{:.3f}", "{!r:>9}", "{{", "}}", "a b", "\n", "{0:+.1e}", "{x}", "{x:8.2f}", "{n:03d}"]),
        max_size=6,
    ),
    st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=6),
    st.floats(-10, 10),
)
def test_formats_are_those_of_str_format(parts: list[str], numbers: list[float], x: float) -> None:
    numbered = any("{0" in p for p in parts)
    fmt = "".join(p for p in parts if not (numbered and p in ("{}", "{:.3f}", "{!r:>9}")))
    if "{!r" in fmt:
        fmt = fmt.replace("{!r:>9}", "{:>9}")
    expected = fmt.format(*numbers, x=x, n=7)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        tensors = [torch.tensor(v, dtype=torch.float64) for v in numbers]
        vf.debug_print(fmt, *tensors, x=torch.tensor(x, dtype=torch.float64), n=7)
    assert out.getvalue() == expected + "\n"


def test_trees_numbers_fields_and_anything_else() -> None:
    params = {"w": torch.tensor([1.0, 2.0]), "k": ("{", None)}

    def step(x: Any, lr: float) -> Any:
        vf.debug_print("{} {p[k]} {x.shape} {x[0]:.1f} {lr:.2f} {:>4}", {**params, "x": x}, "ab", p=params, x=x, lr=lr)
        return x

    text = "{'w': tensor([1., 2.]), 'k': ('{', None), 'x': tensor([0., 1., 2., 3.])}"
    assert printed(step, vector(), 0.125) == [f"{text} ('{{', None) torch.Size([4]) 0.0 0.12   ab"]


def test_outside_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    vf.debug_print("{} {:.1f}", torch.tensor([1.0]), torch.tensor(2.0))
    vf.debug_print("{}", vector())
    vf.debug_print("{}", vector(), per_rank=True)
    assert capsys.readouterr().out.splitlines() == [
        "tensor([1.]) 2.0",
        "tensor([0., 1., 2., 3.])",
        *(
            f"rank {r} (dp={r // 2}, tp={r % 2}): tensor({[[0.0, 1.0], [2.0, 3.0]][r // 2]})".replace(".0", ".")
            for r in range(4)
        ),
    ]


@pytest.mark.parametrize(
    ("fmt", "args", "kwargs", "message"),
    [
        ("{} {}", (1,), {}, "its 1 positional arguments: tuple index out of range"),
        ("{x}", (), {"y": 1}, "its 0 positional arguments and y: 'x'"),
        ("{", (), {}, "its 0 positional arguments: Single '{' encountered in format string"),
        (
            "{:.2f}",
            (torch.ones(2),),
            {},
            "its 1 positional arguments: unsupported format string passed to torch.Size.__format__",
        ),
        (
            "{:d}",
            (torch.tensor(1.0),),
            {},
            "its 1 positional arguments: Unknown format code 'd' for object of type 'float'",
        ),
    ],
)
def test_a_format_that_does_not_fit(fmt: str, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError) as e:
        vf.debug_print(fmt, *args, **kwargs)
    tail = "a tensor with dims takes {} only, a 0-d tensor what its number takes, as in {:.3f}."
    expected = f"vf.debug_print: the format {fmt!r} does not fit {message}. Formats are those of str.format; {tail}"
    assert str(e.value) == expected


# ---- what an effect is


def test_effects_can_be_taken_away() -> None:
    def step(x: Any) -> Any:
        vf.call(square, x)
        return [vf.scan(lambda c, r: (c, vf.debug_print("{}", r)), x.sum(), x)[0]]

    graph = trace_flat(step, [Aval((3,), torch.float32)]).graph
    assert sum(has_effect(e) and not isinstance(e.op, (Scan, Call)) for e in equations(graph)) == 3
    silent = without_effects(graph)
    assert not any(map(has_effect, equations(silent)))
    (a,), (b,) = (run_graph(g, [torch.arange(3.0)]) for g in (graph, silent))
    assert torch.equal(a, b)


def test_a_program_that_is_only_looked_at_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lowered = vf.pjit(square).lower(vector())
    assert lowered.memory_analysis().peak > 0
    assert lowered.cost_analysis() is not None
    assert "print_once" in lowered.as_text()
    assert vf.pjit(square).verify(vector())
    assert capsys.readouterr().out == ""


def test_an_exported_file_prints_too(tmp_path: Path) -> None:
    text = export_text(vf.pjit(square).lower(vector()).program)
    assert "def print_once(" in text
    assert "def show(" in text
    compile(text, "step_rank.py", "exec")


def test_plans_from_a_cache(tmp_path: Path) -> None:
    for _ in range(2):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            vf.pjit(square, cache_dir=tmp_path)(vector())
        assert out.getvalue().splitlines() == LINES


def test_on_real_processes(pool: Pool) -> None:
    first, second = pool.run(tasks.printed, processes=2)
    parts = [f"rank {r} (dp={r}): part tensor({values})\n" for r, values in enumerate(("[0., 1.]", "[2., 3.]"))]
    assert first == ("whole tensor([0., 1., 2., 3.])\n" + parts[0]) * 2
    assert second == parts[1] * 2
