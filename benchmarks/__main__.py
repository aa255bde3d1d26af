"""All benchmarks, one after the other, each in a process of its own: `python -m benchmarks`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

for script in sorted(Path(__file__).parent.glob("bench_*.py")):
    subprocess.run([sys.executable, str(script)], check=True)
