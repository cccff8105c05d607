"""All benchmarks, one after another: `python -m benchmarks`. Each prints its own table and runs alone too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    worst = 0
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        print(f"== {path.stem}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{path.stem}"]
        worst = max(worst, subprocess.run(command, cwd=path.parent.parent, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
