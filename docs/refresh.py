"""Run the programs in the README and the docs, and put what they print under them.

    python docs/refresh.py           write the files
    python docs/refresh.py --check   fail if a file is not what a run would write

Blocks of one file share their variables. The table of ratios comes from `benchmarks/results.json`.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = "checkpoints huggingface porting random regions specs"
FILES = ("README.md", *(f"docs/{page}.md" for page in PAGES.split()))
PROGRAM = re.compile(
    r"```python\n(?P<code>.*?)```\n(?P<marker><!-- output of the program above -->\n)"
    r"```\n(?P<output>.*?)```\n<!-- end -->",
    re.DOTALL,
)
RATIOS = re.compile(r"(<!-- measured by make bench -->\n).*?(<!-- end -->)", re.DOTALL)


def run(code: str, space: dict[str, Any], filename: str) -> str:
    """What a program prints."""
    import torch

    torch.manual_seed(0)
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, filename, "exec"), space)
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())


def refreshed(text: str, name: str) -> str:
    """The text of a file with fresh outputs."""
    space: dict[str, Any] = {"__name__": name}

    def program(m: re.Match[str]) -> str:
        output = run(m["code"], space, "step.py")
        return f"```python\n{m['code']}```\n{m['marker']}```\n{output}\n```\n<!-- end -->"

    return RATIOS.sub(lambda m: m[1] + ratios() + m[2], PROGRAM.sub(program, text))


def ratios() -> str:
    """The table of measured ratios; empty before the first `make bench`."""
    path = ROOT / "benchmarks" / "results.json"
    if not path.exists():
        return ""
    results = json.loads(path.read_text())
    rows = "\n".join(
        f"| {r['what']} | {r['against']} | {r['ratio']:.2f} | {' / '.join(map(str, r.get('memory', [])))} |"
        for r in results["ratios"]
    )
    head = f"step time, {results['where']} | against | ratio, below 1 is faster | peak memory, MiB, ours / theirs"
    return f"| {head} |\n|---|---|---|---|\n{rows}\n"


def main() -> int:
    stale = []
    for name in FILES:
        path = ROOT / name
        old = path.read_text()
        new = refreshed(old, name)
        if new != old:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new)
    if stale and "--check" in sys.argv:
        print(f"not what a run prints: {', '.join(stale)}; run python docs/refresh.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
