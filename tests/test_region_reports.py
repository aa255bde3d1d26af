"""What can be read, checked and written of a step with a region: text, reports, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from region_calls import LINE, both, draw, equal, mapped
from test_export import run_exported
from torch import Tensor
from torch.func import grad

import vescale_fn as vf
from vescale_fn.placement import cut
from vescale_fn.sharding.mesh import Mesh

PAIR = vf.make_mesh(x=2)


def step(mesh: Mesh = PAIR, **options: Any) -> Any:
    """The gradient of a loss through a column-then-row product, by hand."""

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return vf.psum((x @ up).sin() @ down, "x")

    f = mapped(mlp, ("b k", "k h/x", "h/x k"), "b k", mesh)
    return vf.pjit(grad(lambda ws, x: (f(x, *ws) ** 2).sum()), mesh=mesh, **options)


def arguments(mesh: Mesh = PAIR) -> Any:
    up, down = draw(4, 8), draw(8, 4, seed=1)
    return (vf.device_put(up, "k h/x", mesh), vf.device_put(down, "h/x k", mesh)), draw(3, 4, seed=2)


def test_the_text_shows_the_collective_of_the_region() -> None:
    text = step().lower(*arguments()).as_text()
    (line,) = (line for line in text.splitlines() if line.lstrip().startswith(">>"))
    assert "f64[3, 4] = all_reduce" in " ".join(line.split())


def test_reports_count_what_a_rank_does() -> None:
    lowered, whole = (step(mesh).lower(*arguments(mesh)) for mesh in (PAIR, vf.make_mesh(x=1)))
    assert lowered.cost_analysis().bytes_sent == {("x",): 3 * 4 * 8}
    assert 2 * lowered.memory_analysis().output == whole.memory_analysis().output == 2 * 4 * 8 * 8
    assert lowered.explain("ws.0").startswith("ws_0: f64[4, 8], x shard 1\n  x: shard 1: the layout it comes in\n")


def test_verify_and_audit_run_the_region() -> None:
    verified = step().verify(*arguments())
    assert verified, str(verified)
    audited = step(LINE, audit=1)(*arguments(LINE))
    equal(audited[0], step()(*arguments())[0])


def test_a_plan_with_a_region_is_read_from_its_file(tmp_path: Path) -> None:
    first, second = (step(cache_dir=tmp_path).lower(*arguments()) for _ in range(2))
    assert list(tmp_path.iterdir())
    assert first.diff(second) == ""


def test_an_exported_file_runs_the_region(tmp_path: Path) -> None:
    lowered = step().lower(*arguments())
    ws, x = arguments()
    program = lowered.program
    values = [*(w.full() for w in ws), x]
    coords = program.mesh.all_coords()
    parts = [[cut(v, program.layouts[i], c) for i, v in zip(program.graph.inputs, values)] for c in coords]
    expected = lowered.compile()([list(row) for row in parts])
    for got, want in zip(run_exported(program, parts, tmp_path), expected, strict=True):
        assert all(map(torch.equal, got, want))


def test_prints_show_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def body(t: Tensor) -> Tensor:
        vf.debug_print("{:.0f}", t.sum())
        return t

    both(mapped(body, "d/x", "d/x", PAIR), torch.ones(4), mesh=PAIR)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[:2] == lines[2:]  # at once, and in a program
    assert all(line.endswith("2") for line in lines)


@pytest.mark.parametrize("remat", [False, True])
def test_a_region_in_the_body_of_a_loop(remat: bool) -> None:
    """A stack of layers, each of them a region, and its gradient: one collective in the body of each half."""
    layer = mapped(lambda h, w: vf.psum((h @ w).sin(), "x"), ("b k/x", "k/x d"), "b d", LINE)

    def body(h: Tensor, w: Tensor) -> tuple[Tensor, None]:
        return h + layer(h, w), None

    def loss(ws: Tensor, x: Tensor) -> Tensor:
        return (vf.scan(vf.call(body, remat=True) if remat else body, x, ws)[0] ** 2).sum()

    def plain(ws: Tensor, x: Tensor) -> Tensor:
        for w in ws:
            x = x + sum((x[:, i : i + 1] @ w[i : i + 1]).sin() for i in range(4))
        return (x**2).sum()

    ws, x = draw(3, 4, 4), draw(2, 4, seed=1)
    for a, b in zip(both(grad(loss, (0, 1)), ws, x, mesh=LINE), grad(plain, (0, 1))(ws, x), strict=True):
        equal(a, b)
