"""The further ranks of a command start before its imports, and end with it. Real processes: what a recipe's
`callbacks()` does happens in every rank, after that start and before torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ppo_lightning import cli
from tests import forked
from tests.fitting import prepare
from tests.test_launcher import alive, environment, gone, taken_port

RECIPE = """
import os, sys, time
from pathlib import Path
from ppo_lightning.config import ConfigError, PPOConfig

RANK = os.environ.get("LOCAL_RANK", "0")
CASE = os.environ.get("CASE", "")
sys.addaudithook(lambda event, _: Path("started").touch() if event == "subprocess.Popen" else None)

def config():
    return PPOConfig.of(**OPTIONS)

def both():
    deadline = time.monotonic() + 30
    while len(list(Path().glob("rank.*"))) < 2:
        assert time.monotonic() < deadline, "the other rank has not started"
        time.sleep(0.02)

def callbacks():
    Path(f"rank.{RANK}").write_text(f"{os.getpid()} {'torch' in sys.modules}")
    if CASE:
        both()
    if CASE == "config":
        raise ConfigError("not that")
    if CASE == "raise" or CASE == f"raise{RANK}":
        raise ValueError("boom")
    if CASE == f"kill{RANK}":
        os.kill(os.getpid(), 9)
    if CASE:
        time.sleep(60)
    return []

if __name__ == "__main__":
    from ppo_lightning.cli import run_recipe
    raise SystemExit(run_recipe(__file__))
"""
LATE = """
import os, time
from ppo_lightning.config import PPOConfig
from ppo_lightning.launchers.rank_errors import shown_by_first_rank
from ppo_lightning.launchers.ranks import started_early, take_early

with shown_by_first_rank(), started_early(PPOConfig.of(actor_num_gpus_per_node=2)):
    if "LOCAL_RANK" in os.environ:
        time.sleep(0.5)
        raise ValueError("late")
    assert len(take_early().processes) == 1
"""
FIT = (sys.executable, "-m", "ppo_lightning", "fit", "--recipe", "mine.py")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    made = prepare(tmp_path_factory.mktemp("tiny"))
    held_out = ("heldout", made["prompt_data"])
    return made | {"rm_type": "random", "actor_num_gpus_per_node": 2, "eval_prompt_data": held_out}


@pytest.fixture
def folder(tmp_path: Path, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> Path:
    mine = options | {"output_dir": str(tmp_path / "out"), "num_rollout": 1}
    (tmp_path / "mine.py").write_text(RECIPE.replace("**OPTIONS", f"**{mine!r}"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*command: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment(**more), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def when(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ranks() -> list[int]:
    """Process ids of two ranks that have both come to `callbacks()`."""
    files = [Path(f"rank.{rank}") for rank in range(2)]
    when(lambda: all(file.is_file() and file.read_text() for file in files))
    assert [file.read_text().split()[1] for file in files] == ["False", "False"]  # torch is not there yet
    assert Path("started").exists()
    return [int(file.read_text().split()[0]) for file in files]


@pytest.mark.parametrize(
    "command",
    [
        FIT,
        (sys.executable, "mine.py"),
        (str(Path(sys.executable).with_name("ppo-lightning")), "evaluate", "--recipe", "mine.py"),
    ],
    ids=["module", "recipe file", "evaluate by console script"],
)
def test_an_error_of_every_rank_is_shown_once(folder: Path, command: tuple[str, ...]) -> None:
    process = start(*command, CASE="raise")
    pids = ranks()
    out, errors = process.communicate(timeout=60)
    assert errors.splitlines() == ["error: ValueError: boom"]
    assert out == ""
    assert process.returncode == 1
    assert gone(pids, seconds=1)


def test_a_configuration_error_of_every_rank_is_shown_once(folder: Path) -> None:
    process = start(*FIT, CASE="config")
    ranks()
    assert process.communicate(timeout=60)[1].splitlines() == ["error: not that"]
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("raise1", "ValueError: boom\n"),
        pytest.param("kill1", "was killed by SIGKILL (out of memory?)\n", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_before_the_imports_ends_all(folder: Path, case: str, said: str) -> None:
    process = start(*FIT, CASE=case)
    pids = ranks()
    failed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - failed < 20
    assert errors.startswith("rank 1 failed first:\n")
    assert errors.endswith(f"{said}All ranks are ended.\n")
    assert errors.count("boom\n") <= 1
    assert process.returncode == 1
    assert gone(pids, seconds=1)


@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGINT, False, 130), (signal.SIGTERM, False, 143)],
    ids=["ctrl-c", "interrupt", "kill"],
)
def test_a_signal_during_the_imports_ends_all(
    folder: Path, number: int, whole_group: bool, code: int
) -> None:
    process = start(*FIT, CASE="wait")
    pids = ranks()
    (os.killpg if whole_group else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=5)
    assert process.returncode == code
    assert "the same command goes on from the last checkpoint" in errors
    assert len(errors.splitlines()) == 1
    assert gone(pids, seconds=1)


@pytest.mark.parametrize("delay", [0.01, 0.02, 0.04])
def test_ctrl_c_while_a_rank_is_born(folder: Path, delay: float) -> None:
    """Python itself would print a traceback for it."""
    process = start(*FIT, CASE="wait")
    when(lambda: bool(psutil.Process(process.pid).children()))
    (child,) = psutil.Process(process.pid).children()
    when(lambda: "mine.py" in child.cmdline())
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=5)
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert gone([child.pid], seconds=1)


def test_ranks_die_with_the_first_one_during_the_imports(folder: Path) -> None:
    process = start(*FIT, CASE="wait")
    pids = ranks()
    process.kill()
    process.wait()
    left = [] if gone(pids) else [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_a_taken_port_is_named_before_any_rank_starts(folder: Path) -> None:
    with taken_port() as port:
        process = start(*FIT, MASTER_PORT=port)
        assert f"error: MASTER_PORT={port} is taken" in process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert not Path("started").exists()


@pytest.mark.parametrize(
    ("flags", "code", "more"),
    [
        (["--dry-run"], 0, {}),
        (["--print-config"], 0, {}),
        (["--lr", "0"], 2, {}),
        (["--rm-type", "none"], 2, {}),
        ([], 1, {"CASE": "raise0", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}),
        ([], 1, {"CASE": "raise0", "SLURM_NTASKS": "2"}),
        (["--actor-num-gpus-per-node", "1"], 1, {"CASE": "raise0"}),
    ],
    ids=["dry run", "print", "bad flag", "no reward", "torchrun", "slurm", "one rank"],
)
def test_no_rank_is_started_where_none_is_wanted(
    folder: Path, flags: list[str], code: int, more: dict[str, str]
) -> None:
    if more:
        (folder / "rank.other").touch()  # nobody to wait for
    process = start(*FIT, *flags, **more)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not Path("started").exists()


def test_an_error_after_the_first_rank_has_ended_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    _, errors = start(sys.executable, str(tmp_path / "late.py")).communicate(timeout=60)
    assert errors.startswith("error: rank 1 failed first:\n")
    assert errors.endswith("ValueError: late\n")


@pytest.mark.parametrize("gpus", [0, 4], ids=["as expected", "too many"])
def test_a_run_uses_the_ranks_that_were_started_if_they_are_right(folder: Path, gpus: int) -> None:
    """What is seen of GPUs before torch is there may be more than torch can use: then four ranks start and
    two are needed, and the three are ended for one that knows."""
    recipe = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(
        recipe.replace("'actor_num_gpus_per_node'", "'tensor_model_parallel_size'")
    )
    forked.warm()

    def started(rank: int) -> None:
        (folder / f"started.{os.getpid()}").touch()
        if rank == 0:
            cli.visible_gpus = lambda: gpus  # type: ignore[attr-defined]

    run = forked.command(["fit", "--recipe", "mine.py"], folder / "said", prepare=started)
    code, said = run.wait(60), (folder / "said").read_text()
    assert code == 0, said
    assert said.count("1 of 1 rollouts done") == 1
    assert "failed" not in said
    assert not forked.members(run.pid)
    assert gpus or len(list(folder.glob("started.*"))) == 2
