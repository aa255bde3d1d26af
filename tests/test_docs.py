"""The README and the docs print what they say, and their links lead somewhere."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


def test_programs_print_what_the_pages_say() -> None:
    run = subprocess.run(
        [sys.executable, "docs/refresh.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_first_program_is_short() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    assert len(code.splitlines()) <= 30


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str) -> None:
    for name in re.findall(r"\bvf\.(\w+(?:\.\w+)*)", (ROOT / page).read_text()):
        pkgutil.resolve_name(f"vescale_fn.{name}")
