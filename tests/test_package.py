"""The package as it ships: what import costs, what the wheel holds."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import vescale_fn

ROOT = Path(__file__).parent.parent
FOLDERS = ("vescale_fn", "sharding", "schedules")


def sources() -> list[Path]:
    """Every module once, as vescale_fn/... paths (two folders are links)."""
    found = [p.relative_to(ROOT) for f in FOLDERS for p in (ROOT / f).rglob("*.py")]
    return sorted({p if p.parts[0] == "vescale_fn" else Path("vescale_fn") / p for p in found})


# What a bare import loads, as few modules as can make and hold Arrays: a new one costs every program, so that it is
# added here by hand. The trace, rules, solver and engines come with the first step; what else vf offers, when used.
AT_ONCE = """
    arguments array array_text audit cast debug debug_print effects engines engines.engine errors loaded lowered mesh
    module nonfinite pjit placement program sharding sharding.bind sharding.digits sharding.forms sharding.grammar
    sharding.graph sharding.layout sharding.mesh sharding.ragged sharding.sizes sharding.spec sharding.unbind shardings
    tracing tree variety visualize
"""


def modules() -> set[str]:
    return {".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in sources()}


def test_import_loads_nothing_that_can_wait() -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import vescale_fn; new = set(sys.modules) - before; "
        "print(*sorted(m for m in new if m.startswith('vescale_fn.') or '.' not in m)); "
        "print(*sorted(m for m in new if m.startswith('torch.')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded, of_torch = map(str.split, out.splitlines())
    assert loaded == sorted(["html", "optree", "vescale_fn", *(f"vescale_fn.{m}" for m in AT_ONCE.split())])
    assert of_torch == ["torch.utils._cxx_pytree"]


def test_names_that_wait_are_no_modules() -> None:
    """A module that is imported sets itself on its package: `vf.name` would be the module, not what is in it."""
    assert {n for n in vescale_fn._LATER if f"vescale_fn.{n}" in modules()} == {"optim", "random", "schedules"}


def test_what_waits_is_what_type_checkers_see() -> None:
    """No public name is lost on the way."""
    tree = ast.parse(Path(vescale_fn.__file__).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    named = {a.asname for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert named == set(vescale_fn._LATER)


def test_wheel_holds_each_module_once(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building in place would leave folders behind
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=leftovers)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), str(source)], check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")]
    assert sorted(names) == [str(p) for p in sources()]
