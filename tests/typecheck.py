"""mypy over the package as it is installed: `callbacks/` and `recipes/` lie under `ppo_lightning` there."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "ppo_lightning"
        package.mkdir()
        for path in (ROOT / "ppo_lightning").iterdir():
            (package / path.name).symlink_to(path)
        for name in ("callbacks", "recipes"):
            (package / name).symlink_to(ROOT / name)
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "-p",
            "ppo_lightning",
        ]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(run.stdout + run.stderr)
    checked = re.search(r"(?:in|checked) (\d+) source files", run.stdout)
    expected = sum(1 for z in ("ppo_lightning", "callbacks", "recipes") for _ in (ROOT / z).rglob("*.py"))
    if checked and int(checked[1]) != expected and "errors" not in run.stdout:
        print(f"mypy saw {checked[1]} of {expected} files")
        return 1
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
