"""An exported file runs with nothing but torch and gives the same bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import manual_tasks
import process_tasks as tasks
import pytest
import torch
from hand import Hand, aten

from vescale_fn.engines.virtual import VirtualEngine
from vescale_fn.export import export, export_text
from vescale_fn.inline import Inliner
from vescale_fn.program import Program
from vescale_fn.sharding.mesh import Mesh, MeshShape

RUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
GUARD = "import sys; sys.modules['vescale_fn'] = None\n"  # an import of the package fails


def run_exported(program: Program, inputs: Sequence[Any], folder: Path) -> list[list[torch.Tensor]]:
    """Results [rank][leaf] of an exported program under torchrun, for inputs [rank][leaf]."""
    file = folder / "step_rank.py"
    export(program, file)
    text = file.read_text()
    file.write_text(
        text.replace("from __future__ import annotations\n", f"from __future__ import annotations\n{GUARD}", 1)
    )
    for rank, leaves in enumerate(inputs):
        torch.save(leaves, folder / f"in-{rank}.pt")
    names = [str(folder / f"{kind}-{{rank}}.pt") for kind in ("in", "out")]
    port = ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run([*RUN, *port, str(file), *names], capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"out-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ["every_collective", "looped"])
def test_an_exported_file_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    program = tasks.PROGRAMS[name](MeshShape(("x", "y"), (2, 1)))
    expected = VirtualEngine(Mesh(program.mesh)).load(program)(tasks.inputs(program))
    for rank, (got, want) in enumerate(zip(run_exported(program, tasks.inputs(program), tmp_path), expected)):
        assert all(map(torch.equal, got, want)), f"rank {rank}"


def test_an_exported_file_moves_blocks_of_the_ranks_own(tmp_path: Path) -> None:
    """Which collectives of programs made by hand do, on values that differ from rank to rank."""
    program = manual_tasks.every_local(MeshShape(("x", "y"), (2, 1)), torch.bfloat16)
    values = manual_tasks.inputs(program)
    got = run_exported(program, values, tmp_path)
    manual_tasks.assert_equal(got, manual_tasks.expected(program, values), program)


def test_the_file_reads_like_a_program() -> None:
    text = export_text(tasks.looped(MeshShape(("x",), (2,))))
    assert text.startswith('"""One rank\'s part of a step on mesh x=2, with explicit collectives;')
    assert '    torchrun --nproc-per-node 2 step_rank.py "inputs-{rank}.pt" "outputs-{rank}.pt"' in text
    assert "    ws : f32[3, 4/x, 4]\n" in text
    assert "    full, = yield all_gather_0, (w,); del w\n" in text
    assert "aten_mm = torch.ops.aten.mm.default\n" in text
    assert "vescale_fn" not in text


def test_an_operation_without_source_is_refused() -> None:
    hand = Hand(MeshShape(("x",), (2,)))
    x = hand.input("x", (4,))
    program = hand.program(hand.op(_made_inside(), (x,), hand.like(x, "y")))
    with pytest.raises(ValueError, match="made inside another function, so it cannot be written into a file"):
        export_text(program)


def _made_inside() -> object:
    def double(x: torch.Tensor) -> torch.Tensor:
        return aten.mul.Tensor(x, 2)

    double.__module__ = "vescale_fn.local"
    return double


def test_the_inliner_follows_names() -> None:
    from vescale_fn.engines import kernels

    inliner = Inliner()
    assert inliner.add(kernels.reduce) == "reduce"
    assert list(inliner.definitions) == ["_COMBINE", "reduce"]
    assert inliner.imports == {"torch": "import torch"}
    assert ">>>" not in "".join(inliner.definitions.values())
