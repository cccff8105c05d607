"""The scoring processes: limits, ends, isolation; with functions that misbehave as text could make one."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ppo_lightning import rewards
from ppo_lightning.rewards.sandbox import Sandbox, shared

ROOT = Path(__file__).parents[1]
BAD = """
import os, sys, time
pid = lambda response, label: float(os.getpid())
size = lambda response, label: float(len(response))
def spin(response, label):
    if response != "spin":
        return float(response)
    while True:
        pass
def native(response, label):  # one C call that looks at no signal
    return float(response) if response != "spin" else float(sum(range(10**13)))
def stubborn(response, label):
    while response == "spin":
        try:
            while True:
                pass
        except BaseException:
            pass
    return float(response)
def hoard(response, label):
    return float(response) if response != "spin" else float(len(bytes(8 << 30)))
def die(response, label):
    return float(response) if response != "spin" else os.kill(os.getpid(), 9)
def asleep(response, label):
    return float(response) if response != "spin" else time.sleep(10**6)
def noisy(response, label):
    print("[0.5]")
    sys.stdout.flush()
    return 1.0
def wrong(response, label):
    raise LookupError("no such " + response)
"""


@pytest.fixture(scope="module")
def bad_module(tmp_path_factory):
    """An importable module of misbehaving functions; workers take over the path."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad_rewards.py").write_text(BAD)
    sys.path.insert(0, str(folder))
    yield "bad_rewards"
    sys.path.remove(str(folder))


@pytest.fixture
def sandbox(bad_module):
    made = Sandbox(workers=2)
    yield made
    made.close()


def numbers(*rows):
    return [(str(row), None) for row in rows]


@pytest.mark.parametrize("function", ["spin", "native", "stubborn", "hoard", "die"])
def test_a_limit_costs_its_own_response_only(sandbox, bad_module, function, monkeypatch):
    monkeypatch.setattr("ppo_lightning.rewards.sandbox.WALL_FACTOR", 1e6)  # the kernel's limits alone
    outcomes = sandbox.score(f"{bad_module}:{function}", numbers(1, "spin", 2, 3, "spin", 4), seconds=0.1)
    assert outcomes == [(1.0, False), (0.0, True), (2.0, False), (3.0, False), (0.0, True), (4.0, False)]
    assert sandbox.score(f"{bad_module}:size", [("abc", None)]) == [(3.0, False)]


def test_a_worker_that_takes_no_cpu_time_ends_too(sandbox, bad_module):
    outcomes = sandbox.score(f"{bad_module}:asleep", numbers(1, "spin", 2), seconds=0.02)
    assert outcomes == [(1.0, False), (0.0, True), (2.0, False)]


def test_a_soft_limit_keeps_the_process(sandbox, bad_module):
    (before,) = sandbox.score(f"{bad_module}:pid", numbers(0))
    for function in ("spin", "hoard"):
        sandbox.score(f"{bad_module}:{function}", numbers("spin"), seconds=0.1)
    assert sandbox.score(f"{bad_module}:pid", numbers(0)) == [before]


def test_off_the_main_thread_and_after_that_thread(sandbox, bad_module):
    found = []
    work = lambda: found.extend(sandbox.score(f"{bad_module}:pid", numbers(0)))  # noqa: E731
    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        time.sleep(0.2)  # a process bound to its starting thread would be gone by now
    assert len({value for value, _ in found}) == 1


def test_many_threads_take_turns(sandbox, bad_module):
    found = {}

    def work(n):  # fmt: skip
        found[n] = sandbox.score(f"{bad_module}:size", [("x" * (n + row), None) for row in range(100)])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [(float(n + row), False) for row in range(100)] for n in range(6)}


def test_text_crosses_unchanged_and_print_does_no_harm(sandbox, bad_module):
    odd = ["", "\x00", "\ud800x", "a\nb\r\u2028", "\u202eabc", '"\\', "é😀"]
    assert sandbox.score(f"{bad_module}:size", [(text, {"a": 1}) for text in odd]) == [
        (float(len(text)), False) for text in odd
    ]
    assert sandbox.score(f"{bad_module}:noisy", numbers(1, 2)) == [(1.0, False)] * 2
    long = [("x" * (3 << 20), None)] * 5
    assert sandbox.score(f"{bad_module}:size", long) == [(float(1 << 20), False)] * 5


def test_an_error_travels_with_its_traceback(sandbox, bad_module):
    with pytest.raises(rewards.RewardError, match=r"(?s)bad_rewards:wrong.*LookupError: no such thing"):
        sandbox.score(f"{bad_module}:wrong", [("thing", None)])
    with pytest.raises(rewards.RewardError, match="ModuleNotFoundError"):
        sandbox.score("no_such_module:function", numbers(1))
    assert sandbox.score(f"{bad_module}:size", [("abc", None)]) == [(3.0, False)]


def test_a_worker_killed_while_idle_is_replaced(sandbox, bad_module):
    ((pid, _),) = sandbox.score(f"{bad_module}:pid", numbers(0))
    os.kill(int(pid), signal.SIGKILL)
    psutil.Process(int(pid)).wait(10) if psutil.pid_exists(int(pid)) else None
    assert sandbox.score(f"{bad_module}:size", [("abc", None)]) == [(3.0, False)]


PARENT = """
import sys, threading
sys.path.insert(0, {folder!r})
from ppo_lightning.rewards.sandbox import Sandbox
box = Sandbox(workers=1)
((pid, _),) = box.score("bad_rewards:pid", [("", None)])
print(int(pid), flush=True)
if {busy}:
    box.score("bad_rewards:{function}", [("spin", None)], seconds=100)
{ending}
"""


@pytest.mark.parametrize(
    ("function", "busy", "ending"),
    [
        ("native", True, ""),
        ("spin", True, ""),
        ("pid", False, "input()"),
        ("pid", False, ""),
        ("pid", False, "1/0"),
    ],
)
def test_no_orphan(bad_module, function, busy, ending):
    folder = os.path.dirname(sys.modules[bad_module].__file__) if bad_module in sys.modules else sys.path[0]
    code = PARENT.format(folder=folder, busy=busy, function=function, ending=ending)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    worker = psutil.Process(int(parent.stdout.readline()))
    if busy or ending == "input()":
        time.sleep(0.2)
        parent.kill()
    parent.wait(30)
    gone, alive = psutil.wait_procs([worker], timeout=30)
    assert (gone, alive) == ([worker], [])
    parent.stdout.close()
    parent.stdin.close()


def test_a_forked_child_has_its_own_processes():
    code = """
import os
from ppo_lightning import rewards
from ppo_lightning.rewards.sandbox import shared
assert rewards.score("math", "\\\\boxed{1}", "1") == 1
mine = {w.process.pid for w in shared()._pool}
child = os.fork()
if child == 0:
    assert rewards.score("math", "\\\\boxed{2}", "2") == 1
    os._exit(0 if mine.isdisjoint(w.process.pid for w in shared()._pool) else 1)
assert os.waitpid(child, 0)[1] == 0
assert rewards.score("math", "\\\\boxed{3}", "3") == 1
assert mine == {w.process.pid for w in shared()._pool}
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("done\n", "")


def hostile(count):
    """The benchmark's hostile responses."""
    spec = importlib.util.spec_from_file_location("reward_benchmark", ROOT / "benchmarks" / "rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hostile(count)


@pytest.mark.parametrize("name", ["deepscaler", "dapo"])
def test_a_thousand_hostile_responses(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcomes = rewards.get(name).batch(hostile(1000))
    assert {outcome.value for outcome in outcomes} == {0.0 if name == "deepscaler" else -1.0}
    assert sum(outcome.timed_out for outcome in outcomes) == 0
    assert list(tmp_path.iterdir()) == []  # nothing was executed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math", "gsm8k", "f1", "math_verify"])
def test_hostile_responses_in_every_family(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcomes = rewards.get(name).batch(hostile(700))
    assert all(0.0 <= outcome.value <= 1.0 for outcome in outcomes)
    assert sum(outcome.timed_out for outcome in outcomes) <= 7
    assert list(tmp_path.iterdir()) == []


def test_the_shared_sandbox_is_one():
    assert shared() is shared()
