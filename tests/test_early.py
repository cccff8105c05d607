"""Scoring while responses are written: a real engine, real worker processes, a real HTTP service."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from ppo_lightning.callbacks import PPOCallback, RewardCallback
from ppo_lightning.callbacks.rollout import reports
from ppo_lightning.engines.base import SamplingParams
from ppo_lightning.engines.hf import HFEngine
from ppo_lightning.rewards import RewardError
from ppo_lightning.rewards.remote_rm import RemoteReward
from ppo_lightning.rewards.sandbox import shared
from ppo_lightning.samples import Sample, Status
from tests.engine_contract import TEXTS, make_samples
from tests.tinymodel import make_tiny_model

PARAMS = SamplingParams(40, stop_token_ids=tuple(range(30)))
REWARDS = """
import time
from ppo_lightning.rewards import register

@register("early_length", needs_label=False, sandboxed=True)
def length(response, label=None):  # a label is a place to write down when the first score began
    if isinstance(label, str):
        with open(label, "a") as file:
            file.write(f"{time.monotonic()}\\n")
    return float(len(response))

@register("early_spin", needs_label=False, sandboxed=True, seconds=0.1)
def spin(response, label=None):
    while label == "spin":
        pass
    return float(len(response))

@register("early_wrong", needs_label=False, sandboxed=True)
def wrong(response, label=None):
    if label == "wrong":
        raise LookupError("no such " + label)
    return 1.0

@register("early_asleep", needs_label=False, sandboxed=True, seconds=60)
def asleep(response, label=None):
    open(label, "a").write("asleep\\n")
    time.sleep(3600)
"""


@pytest.fixture(scope="module", autouse=True)
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "early_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    importlib.import_module("early_rewards")
    shared().close()  # workers of earlier tests do not know the folder
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HFEngine:
    directory = tmp_path_factory.mktemp("early") / "model"
    make_tiny_model(directory)
    return HFEngine(str(directory))


@pytest.fixture
def service() -> Iterator[SimpleNamespace]:
    """Answers with `answer(request)`, a pair of status and value."""
    state = SimpleNamespace(requests=[], answer=lambda request: (200, len(request["response"])))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.requests.append((time.monotonic(), request))
            status, value = state.answer(request)
            with contextlib.suppress(ConnectionError):  # who was interrupted waits no more
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    state.reward = RemoteReward(
        f"http://127.0.0.1:{server.server_port}/", pause=0.001, attempts=2, seconds=20
    )
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


class Gate(PPOCallback):
    """Holds the first response's report until `begun` is true, and notes when each response ended."""

    def __init__(self, begun: Callable[[], Any], error: BaseException | None = None) -> None:
        self.begun, self.error, self.ends = begun, error, []

    def on_response_end(self, trainer: pl.Trainer, module: Any, sample: Sample) -> None:
        limit = time.monotonic() + 30
        while not self.begun():
            assert time.monotonic() < limit, "nothing is scored while responses are written"
            time.sleep(0.005)
        if self.error is not None:
            raise self.error
        self.ends.append(time.monotonic())


def trainer_of(*callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=list(callbacks))


def prompts(label: Callable[[int], Any] = lambda place: None) -> list[Sample]:
    given = make_samples(TEXTS, 3)
    for sample in given:
        sample.label = label(sample.index)
    return given


def written(
    engine: HFEngine, given: list[Sample], *callbacks: pl.Callback, early: bool = True
) -> list[Sample]:
    with reports(trainer_of(*callbacks)) as finished:
        engine.generate(given, PARAMS, list(range(len(given))), finished if early else None)
    assert len({s.response_length for s in given}) > 3
    return given


def rewarded(callback: RewardCallback, given: list[Sample]) -> list[float]:
    callback.on_reward(None, SimpleNamespace(rollout=None), given)
    assert threads() == []
    return [s.reward for s in given]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("early-reward")]


# ---- it overlaps, and changes nothing ----------------------------------------------------------------------


def test_workers_score_before_the_last_response_ends(engine: HFEngine, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    callback, gate = RewardCallback("early_length"), Gate(seen.exists)
    given = written(engine, prompts(lambda place: str(seen)), callback, gate)
    assert rewarded(callback, given) == [float(len(s.response)) for s in given]
    begun = [float(line) for line in seen.read_text().split()]
    assert len(begun) == len(given) == len(gate.ends)  # each once
    assert min(begun) < max(gate.ends)
    late = written(engine, prompts(lambda place: str(seen)), callback, early=False)
    assert (rewarded(callback, late), late) == ([s.reward for s in given], given)


def test_a_service_scores_before_the_last_response_ends(engine: HFEngine, service: SimpleNamespace) -> None:
    callback, gate = RewardCallback(service.reward), Gate(lambda: service.requests)
    given = written(engine, prompts(str), callback, gate)
    assert rewarded(callback, given) == [float(len(s.response)) for s in given]
    assert sorted(r["label"] for _, r in service.requests) == sorted(s.label for s in given)  # each once
    assert service.requests[0][0] < max(gate.ends)
    late = written(engine, prompts(str), callback, early=False)
    assert (rewarded(callback, late), late) == ([s.reward for s in given], given)


def test_requests_do_not_wait_for_each_other(engine: HFEngine, service: SimpleNamespace) -> None:
    """The first reply comes when the last request is there."""
    complete = threading.Event()

    def answer(request: Any) -> tuple[int, float]:
        if len(service.requests) == len(TEXTS) * 3:
            complete.set()
        return (200, 1.0) if complete.wait(15) else (404, 0.0)

    service.answer = answer
    callback = RewardCallback(service.reward)
    given = written(engine, prompts(), callback)
    assert rewarded(callback, given) == [1.0] * len(given)


def test_time_outs_count_once(engine: HFEngine) -> None:
    def label(place: int) -> str:
        return "spin" if place in (0, 5, 11) else "run"

    callback = RewardCallback("early_spin")
    given = written(engine, prompts(label), callback)
    expected = [0.0 if s.label == "spin" else float(len(s.response)) for s in given]
    assert (rewarded(callback, given), callback.timeouts) == (expected, 3)


@pytest.mark.parametrize("kind", ["workers", "service"])
def test_what_has_changed_is_scored_anew(engine: HFEngine, service: SimpleNamespace, kind: str) -> None:
    callback = RewardCallback("early_length" if kind == "workers" else service.reward)
    given = written(engine, prompts(lambda place: [place]), callback)
    given[0].response += "!!!"
    given[4].label.append("in place")
    last, given[-1] = given[-1], prompts()[-1]  # another object in its place
    given[-1].response = last.response + "?"
    assert rewarded(callback, given) == [float(len(s.response)) for s in given]
    if kind == "service":
        labels = [r["label"] for _, r in service.requests]
        assert [labels.count([place]) for place in (1, 2, 3, *range(5, 17))] == [1] * 15
        assert labels.count([4, "in place"]) == labels.count(None) == 1


def test_what_is_not_reported_is_scored_all_the_same(engine: HFEngine) -> None:
    callback = RewardCallback("early_length")
    first = written(engine, prompts(), callback)
    second = written(engine, prompts(), callback, early=False)
    assert rewarded(callback, first[::2] + second) == [float(len(s.response)) for s in first[::2] + second]


# ---- errors ------------------------------------------------------------------------------------------------


def test_an_error_in_a_worker_comes_with_the_rewards(engine: HFEngine) -> None:
    def label(place: int) -> str:
        return "wrong" if place == 7 else "right"

    callback = RewardCallback("early_wrong")
    given = written(engine, prompts(label), callback)
    with pytest.raises(RewardError, match=r"early_rewards:wrong failed on a response:(?s:.)*no such wrong"):
        rewarded(callback, given)
    assert threads() == []
    given = written(engine, prompts(label), callback)
    given[7].label = "right"  # nobody asks for that score any more
    assert rewarded(callback, given) == [1.0] * len(given)


def test_an_error_of_a_service_comes_with_the_rewards(engine: HFEngine, service: SimpleNamespace) -> None:
    service.answer = lambda request: (404, "where?") if request["label"] == 7 else (200, 1.0)
    callback = RewardCallback(service.reward)
    given = written(engine, prompts(int), callback)
    with pytest.raises(RewardError, match="answered HTTP 404") as caught:
        rewarded(callback, given)
    assert "raised by reward RemoteReward" in caught.value.__notes__[0]
    assert threads() == []
    given = written(engine, prompts(int), callback)
    given[7].label = 0
    assert rewarded(callback, given) == [1.0] * len(given)
    service.answer = lambda request: (200, "good" if request["label"] == 7 else 1.0)
    given = written(engine, prompts(int), callback)
    with pytest.raises(TypeError, match=r"RemoteReward of sample 7 .*returned 'good'; a reward is a number"):
        rewarded(callback, given)


@pytest.mark.parametrize("kind", ["workers", "service"])
def test_an_interrupt_leaves_no_thread(
    engine: HFEngine, service: SimpleNamespace, tmp_path: Path, kind: str
) -> None:
    """While a worker sleeps or the service is silent."""
    seen, silence = tmp_path / "seen", threading.Event()
    service.answer = lambda request: (200, float(silence.wait(60)))
    callback = RewardCallback("early_asleep" if kind == "workers" else service.reward)
    gate = Gate(seen.exists if kind == "workers" else lambda: service.requests, KeyboardInterrupt())
    given = prompts(lambda place: str(seen))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        written(engine, given, callback, gate)
    assert threads() != []
    callback.on_exception(None, None, KeyboardInterrupt())
    assert threads() == []
    assert time.monotonic() - began < 30  # it would be a minute, or an hour
    silence.set()


def test_nothing_is_reported_after_generation() -> None:
    """A thread of an interrupted engine may come late."""
    callback = RewardCallback("early_length")
    with reports(trainer_of(callback)) as finished:
        pass
    finished(Sample(prompt="", response="late", status=Status.COMPLETED))
    assert threads() == []


# ---- what is not scored early ------------------------------------------------------------------------------


class Own(RewardCallback):
    def on_reward(self, trainer: pl.Trainer, module: Any, samples: list[Sample]) -> None:
        for sample in samples:
            sample.add_reward(1.0)


class Mine(RemoteReward):
    async def score(self, samples: Any) -> list[float]:
        return [0.0] * len(samples)


@pytest.mark.parametrize(
    "callback",
    [
        RewardCallback(lambda sample: 1.0),
        RewardCallback("random"),
        Own("f1"),
        RewardCallback(Mine("http://127.0.0.1:9/")),
    ],
)
def test_other_rewards_wait(callback: RewardCallback) -> None:
    with reports(trainer_of(callback)) as finished:
        finished(Sample(prompt="", response="4", label="4", status=Status.COMPLETED))
    assert threads() == []


def test_failed_samples_and_missing_labels_wait(service: SimpleNamespace) -> None:
    with reports(trainer_of(RewardCallback(service.reward))) as finished:
        finished(Sample(prompt="", response="", status=Status.FAILED))
    with reports(trainer_of(RewardCallback("gsm8k"))) as finished:
        finished(Sample(prompt="", response="4", status=Status.COMPLETED))
    assert threads() == []
    assert service.requests == []


def test_nobody_listens() -> None:
    with reports(trainer_of(PPOCallback())) as finished:
        assert finished is None
