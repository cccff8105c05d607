"""The real command, interrupted: it ends at once with all of its ranks, and its checkpoints are whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ppo_lightning.megatron.checkpoint_files import latest_iteration
from tests import forked
from tests.fitting import prepare
from tests.test_launcher import environment, gone


def command(folder: Path) -> list[str]:
    """Two ranks with scoring processes, more rollouts than anybody waits for, a checkpoint after each."""
    options = prepare(folder) | {"num_rollout": 10_000, "save_interval": 1}
    options |= {"rm_type": "f1", "label_key": "input"}
    config = folder / "config.yaml"
    config.write_text(json.dumps(options | {"actor_num_gpus_per_node": 2}))  # JSON is YAML
    return [sys.executable, "-m", "ppo_lightning", "fit", "--config", str(config)]


def until_rollout(process: subprocess.Popen[str], number: int) -> None:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(f"rollout {number}/"):
            return
    raise AssertionError(f"ended with {process.wait()} before rollout {number}:\n{''.join(said)}")


@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [
        pytest.param(signal.SIGTERM, False, 143, id="kill"),
        pytest.param(signal.SIGINT, True, 130, id="ctrl-c"),
    ],
)
def test_a_signal_ends_all_ranks_and_keeps_the_checkpoints(
    tmp_path: Path, number: int, whole_group: bool, code: int
) -> None:
    process = subprocess.Popen(
        command(tmp_path), cwd=tmp_path, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup ignores it
    )  # fmt: skip
    until_rollout(process, 3)
    ranks = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    if whole_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "the same command goes on from the last checkpoint" in errors
    assert "Traceback" not in errors
    assert gone(ranks)
    assert latest_iteration(tmp_path / "out" / "checkpoints") >= 2


def test_a_run_that_has_its_rollouts_says_so_and_ends_well(tmp_path: Path) -> None:
    argv = [*command(tmp_path)[3:], "--num-rollout", "1", "--actor-num-gpus-per-node", "1"]
    forked.warm()
    for number in (0, 1):
        said = tmp_path / f"said{number}"
        run = forked.command(argv, said, prepare=lambda rank: None)
        assert run.wait(120) == 0, said.read_text()
        assert "1 of 1 rollouts done" in said.read_text()
        assert ("--num-rollout 1 was reached already; raise it" in said.read_text()) == bool(number)
    assert (tmp_path / "out" / "metrics.csv").read_text().count("\n") == 2  # the names, and one rollout
