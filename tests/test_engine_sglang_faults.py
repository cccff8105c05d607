"""What becomes of a run whose SGLang servers die, hang or never start; all servers are real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from ppo_lightning.engines import sglang_fleet
from ppo_lightning.engines.base import EngineError
from ppo_lightning.engines.sglang import SGLangEngine
from ppo_lightning.engines.sglang_control import Control, TransferError
from ppo_lightning.engines.sglang_plan import Place
from ppo_lightning.engines.sglang_server import ServerProcess, free_port
from ppo_lightning.samples import Sample, Status
from tests import sglang_fixtures as fixtures
from tests.sglang_fixtures import (
    control_of,
    largest_difference,
    make_plan,
    model_with,
    prompts,
    run,
    scheduler,
    server,
    wait_until_at_work,
    weights,
)

pytestmark = pytest.mark.slow
sglang_checkpoint = fixtures.sglang_checkpoint
LONG = {"max_new_tokens": 400}


@pytest.fixture(scope="module")
def engine(sglang_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    logs = tmp_path_factory.mktemp("logs")
    made = SGLangEngine(make_plan(sglang_checkpoint, logs, health_interval=3.0, health_timeout=20.0))
    yield made
    made.close()


def gone(processes: list[psutil.Process], limit: float = 60) -> bool:
    return not psutil.wait_procs(processes, timeout=limit)[1]


def in_the_middle(engine: SGLangEngine, samples: list[Sample], fault: Callable[[], None]) -> None:
    """Generate, and do `fault` once the server is at work."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, engine, samples, **LONG)
        wait_until_at_work(engine, running)
        fault()
        running.result()


def check_whole(samples: list[Sample], model: Any, version: int) -> None:
    """Every sample was written, once, by these weights."""
    for fresh, sample in zip(prompts(len(samples)), samples, strict=True):
        assert sample.tokens[:3] == fresh.tokens
        assert len(sample.tokens) == 3 + sample.response_length
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert sample.response_length == LONG["max_new_tokens"] or sample.tokens[-1] == 258
        assert sample.weight_versions == [version]
    assert largest_difference(samples, model) < 1e-4


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_server_lost_in_a_rollout_is_replaced(
    fault: signal.Signals, engine: SGLangEngine, sglang_checkpoint: Path
) -> None:
    model = model_with(sglang_checkpoint, seed=fault)
    engine.update_weights(weights(model), int(fault))
    before = [server(engine), *server(engine).children(recursive=True)]
    samples = prompts(12)
    in_the_middle(engine, samples, lambda: scheduler(engine).send_signal(fault))
    check_whole(samples, model, int(fault))
    assert gone(before)
    assert engine._generator.retries >= len(samples)


def test_weights_reach_a_server_that_died_before_them(engine: SGLangEngine, sglang_checkpoint: Path) -> None:
    model = model_with(sglang_checkpoint, seed=30)
    server(engine).kill()
    engine.update_weights(weights(model), 30)
    samples = run(engine, prompts(4), **LONG)
    check_whole(samples, model, 30)


def test_a_restart_that_fails_once_is_tried_again(
    engine: SGLangEngine, sglang_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with(sglang_checkpoint, seed=31)
    engine.update_weights(weights(model), 31)
    assert engine._fleet is not None
    boot, calls = engine._fleet._boot, []

    async def port_taken_at_first(process: ServerProcess, version: int | None) -> None:
        calls.append(version)
        if len(calls) == 1:
            raise EngineError("address already in use")
        await boot(process, version)

    monkeypatch.setattr(engine._fleet, "_boot", port_taken_at_first)
    samples = prompts(4)
    in_the_middle(engine, samples, server(engine).kill)
    check_whole(samples, model, 31)
    assert calls == [31, 31]


def test_a_server_that_keeps_dying_ends_the_run(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_fleet, "MAX_RESTARTS", 0)
    with pytest.raises(
        EngineError, match=r"(?s)an SGLang server ended after 0 restarts.*end of .*engine_0\.log"
    ):
        in_the_middle(engine, prompts(4), server(engine).kill)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_limit": 1.0}, r"not ready within 1 s; end of"),
        (
            {"extra": "--no-such-flag"},
            r"(?s)ended before it was ready.*unrecognized arguments: --no-such-flag",
        ),
    ],
)
def test_a_server_that_does_not_start_ends_the_run_with_its_log(
    changes: dict[str, Any], message: str, sglang_checkpoint: Path, tmp_path: Path
) -> None:
    extra = changes.pop("extra", None)
    plan = make_plan(sglang_checkpoint, tmp_path, **changes)
    if extra:
        plan = make_plan(sglang_checkpoint, tmp_path, arguments=(*plan.arguments, extra))
    with pytest.raises(EngineError, match=message):
        SGLangEngine(plan)
    assert not psutil.Process().children(recursive=True)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_server_in_a_bundle_of_its_own_is_kept(
    fault: signal.Signals, sglang_checkpoint: Path, tmp_path: Path
) -> None:
    file = fixtures.config_file(
        tmp_path / "run.yaml",
        sglang_checkpoint,
        tmp_path,
        rollout_health_check_interval=2.0,
        rollout_health_check_timeout=15.0,
    )
    port = str(free_port("127.0.0.1"))
    with file.open() as config:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "ppo_lightning.engines.sglang_keeper", "127.0.0.1", port, "0"],
            stdin=config,
        )
    control = Control(f"http://127.0.0.1:{port}", 1, 60)
    try:
        wait_until_up(control)
        control.post("/update_weight_version", new_version="5", abort_all_requests=False)
        before = psutil.Process(keeper.pid).children(recursive=True)
        next(p for p in before if "scheduler" in " ".join(p.cmdline())).send_signal(fault)
        assert gone(before, 90)
        wait_until_up(control)
        assert control.get("/model_info")["weight_version"] == "none"  # the trainer sees that
    finally:
        servers = psutil.Process(keeper.pid).children(recursive=True)
        keeper.kill()
        keeper.wait()
        assert gone(servers)


def wait_until_up(control: Control, limit: float = 300) -> None:
    end = time.monotonic() + limit
    while True:
        try:
            control.get("/health")
            return
        except TransferError:
            assert time.monotonic() < end
            time.sleep(0.5)


TRAINER = """
import sys, time
from functools import partial
from pathlib import Path
from tests.sglang_fixtures import make_plan
from ppo_lightning.engines.sglang import SGLangEngine
engine = SGLangEngine(make_plan(Path(sys.argv[1]), Path(sys.argv[2])))
print("ready", flush=True)
time.sleep(600)
"""


def test_no_server_outlives_a_killed_trainer(sglang_checkpoint: Path, tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(sglang_checkpoint), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    servers = psutil.Process(trainer.pid).children(recursive=True)
    assert len(servers) >= 3  # the server, its scheduler, its detokenizer
    trainer.kill()
    trainer.wait()
    assert gone(servers, 15)


class Meeting:
    """`gather_objects` for ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._table: list[Any] = [None] * ranks

    def share(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(own: Any) -> list[Any]:
            self._barrier.wait(900)
            self._table[rank] = own
            self._barrier.wait(900)
            return list(self._table)

        return gather


def test_two_ranks_with_an_engine_each_share_a_router(sglang_checkpoint: Path, tmp_path: Path) -> None:
    places = (Place(0, 0), Place(1, 0))
    plan = make_plan(sglang_checkpoint, tmp_path, places=places, health_interval=3.0, health_timeout=20.0)
    meeting = Meeting(2)
    model = model_with(sglang_checkpoint, seed=40)

    def rank(number: int) -> SGLangEngine:
        made = SGLangEngine(plan, number, 2, meeting.share(number))
        made.update_weights(weights(model), 40)
        return made

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    try:
        assert first._generator.url == second._generator.url
        assert sorted(first._generator.workers) == sorted({control_of(first).url, control_of(second).url})
        assert first._generator.url not in first._generator.workers
        samples = prompts(24)
        with ThreadPoolExecutor(1) as pool:
            others = prompts(24)
            running = pool.submit(run, second, others, **LONG)
            in_the_middle(first, samples, lambda: scheduler(second).kill())
            running.result()
        check_whole(samples, model, 40)
        check_whole(others, model, 40)
        router = first._fleet._router
        assert router.alive()
        for fault in (signal.SIGSTOP, signal.SIGKILL):
            lost = psutil.Process(router.pid)
            samples = prompts(8)
            in_the_middle(first, samples, partial(lost.send_signal, fault))
            check_whole(samples, model, 40)
            assert router.pid != lost.pid
        model = model_with(sglang_checkpoint, seed=41)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda e: e.update_weights(weights(model), 41), (first, second)))
        check_whole(run(second, prompts(8), **LONG), model, 41)
    finally:
        first.close()
        second.close()
