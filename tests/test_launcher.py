"""Ranks start, fail and end together. Real processes, real gloo; the parent is this test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import os, sys, time
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from ppo_lightning.launchers.local import LocalLauncher

def say(line):
    os.write(1, (line + "\\n").encode())  # in one piece: the ranks share the pipe

def work(case):
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    say(f"pid {rank} {os.getpid()} threads {os.environ['OMP_NUM_THREADS']}")
    if case == f"raise{rank}":
        time.sleep(0.5)
        raise ValueError(f"boom on {rank}")
    if case in ("raise0", "raise1", "wait"):
        say("waiting")
        dist.recv(__import__("torch").zeros(1), src=1 - rank)
    if case == "sleep":
        say("waiting")
        time.sleep(60)
    dist.barrier()
    return rank

def main():
    launcher = LocalLauncher(LightningEnvironment(), 2)
    say(f"result {launcher.launch(work, sys.argv[1])} {sys.argv[2:]}")

if __name__ == "__main__":
    main()
"""

Started = tuple[subprocess.Popen[str], list[int]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(SCRIPT)
    (tmp_path / "console").write_text(f"#!{sys.executable}\n{SCRIPT}")
    (tmp_path / "console").chmod(0o755)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    ours = ("LOCAL_RANK", "MASTER_PORT", "WORLD_SIZE", "RANK", "OMP_NUM_THREADS")
    kept = {k: v for k, v in os.environ.items() if k not in ours}
    return kept | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"} | more


def run(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def started(folder: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    """Two ranks that wait in the given case, and their process ids."""
    process = subprocess.Popen(
        [sys.executable, "job.py", request.param], cwd=folder, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup ignores it
    )  # fmt: skip
    pids: dict[int, int] = {}
    waiting = 0
    assert process.stdout is not None
    while len(pids) < 2 or waiting < 2:
        line = process.stdout.readline()
        assert line, f"the ranks ended before they waited: {process.communicate()[1]}"
        words = line.split()
        if words[:1] == ["pid"]:
            pids[int(words[1])] = int(words[2])
        waiting += words == ["waiting"]
    yield process, [pids[0], pids[1]]
    for pid in pids.values():
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-X", "utf8", "job.py"], id="script"),
        pytest.param([sys.executable, "-m", "package"], id="module", marks=pytest.mark.slow),
        pytest.param(["./console"], id="console script", marks=pytest.mark.slow),
    ],
)
def test_every_way_to_start(folder: Path, command: list[str]) -> None:
    """Both ranks run the same command, and share the cores."""
    done = run(folder, *command, "ok", "--flag")
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("result")) == [
        "result 0 ['--flag']",
        "result 1 ['--flag']",
    ]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.stdout.count(f"threads {threads}") == 2


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_first_error_is_shown_and_the_others_are_not(folder: Path, rank: int) -> None:
    done = run(folder, sys.executable, "job.py", f"raise{rank}")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"ValueError: boom on {rank}")
    assert "Connection closed" not in done.stderr
    assert "DistNetworkError" not in done.stderr


@pytest.mark.parametrize("started", ["wait"], indirect=True)
def test_a_killed_rank_ends_all(started: Started) -> None:
    process, pids = started
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert gone(pids, seconds=1)
    assert process.returncode == 1
    assert "rank 1 failed first" in errors
    assert f"process {pids[1]} was killed by SIGKILL (out of memory?)" in errors


@pytest.mark.slow
@pytest.mark.parametrize("started", ["wait", "sleep"], indirect=True)
def test_children_die_with_their_parent(started: Started) -> None:
    process, pids = started
    process.kill()
    process.wait()
    assert gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("started", ["wait", "sleep"], indirect=True)
@pytest.mark.parametrize("whole_group", [False, True], ids=["parent only", "group"])
def test_ctrl_c_ends_all(started: Started, whole_group: bool) -> None:
    process, pids = started
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert gone(pids)


@contextmanager
def taken_port() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


def test_a_taken_port_is_named(folder: Path) -> None:
    with taken_port() as port:
        done = run(folder, sys.executable, "job.py", "ok", MASTER_PORT=port)
    assert done.returncode == 1
    assert f"MASTER_PORT={port} is taken" in done.stderr
