"""`make setup` where the package index serves a torch that does not import. Python is a script that says what
it was asked for: a real installation takes minutes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = """#!/bin/bash
echo "$*" >> "$STORY"
case "$*" in
  "-m venv "*) [ "$CASE" = no-venv ] && exit 1; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-c import torch") grep -q -- --force-reinstall "$STORY" && [ "$CASE" = mended ] ;;
  *--force-reinstall*) [ "$CASE" = mended ] ;;
esac
"""


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("mended", 0, "taking the CPU build from https://download.pytorch.org/whl/cpu"),
        ("hopeless", 2, "let pip see PyTorch's CPU wheels"),
        ("no-venv", 2, "apt install python3-venv"),
    ],
)
def test_a_torch_that_does_not_import(tmp_path: Path, case: str, code: int, message: str) -> None:
    python, story = tmp_path / "python", tmp_path / "story"
    python.write_text(PYTHON)
    python.chmod(0o755)
    venv = tmp_path / "venv"
    done = subprocess.run(
        ["make", "--no-print-directory", "setup", f"VENV={venv}", f"PYTHON={python}"],
        cwd=ROOT,
        env=os.environ | {"STORY": str(story), "CASE": case},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stdout
    assert venv.exists() == (case == "mended")
    reinstall = [line for line in story.read_text().splitlines() if "--force-reinstall" in line]
    assert len(reinstall) == (case != "no-venv")
    locked = next(x for x in (ROOT / "requirements/cpu.lock").read_text().splitlines() if "torch==" in x[:7])
    assert all(line.endswith(locked) and "--no-deps" in line for line in reinstall)
