"""One tortured run: its command, what happens to it at which moment, what of it is on disk, and its end."""

from __future__ import annotations

import atexit
import csv
import ctypes
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

import ppo_lightning.report
from ppo_lightning.megatron import checkpoint_publish as publishing
from ppo_lightning.megatron import torch_dist
from tests import fitting, forked

ROLLOUTS = 4
TRACKER = "latest_checkpointed_iteration.txt"
LEFT_OVER = re.compile(r"^\.(partial|old|publish)-|\.tmp$")
LIMIT = 300.0  # seconds after which a run counts as hanging
GRACE = 40.0  # seconds in which the ranks of a dead run must be gone
Event = Callable[[str, bool], None]
Action = Callable[[], bool | None]


def reward(sample: Any) -> float:
    """Differs between samples and needs no label."""
    return sum(t % 3 == 0 for t in sample.tokens[-sample.response_length :]) / sample.response_length


@dataclass(frozen=True)
class Material:
    """A model and prompts that all runs share."""

    model: Path
    prompts: Path

    @classmethod
    def make(cls, directory: Path) -> Material:
        """Ten prompts, four a rollout: the data's epoch ends in the midst of the third."""
        small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
        fitting.prepare(directory, prompts=10, **small)
        return cls(directory / "model", directory / "prompts.jsonl")


@dataclass(frozen=True)
class Layout:
    """What decides every bit of a run."""

    world: int
    flags: tuple[str, ...] = ()


@dataclass
class Outcome:
    """How one start of the command ended."""

    code: int
    output: str
    seconds: float
    begun: int  # rollout from which it went on, by the run's log
    orphans: list[int]
    hung: bool


@dataclass
class Run:
    """A run in a directory of its own; each `start` is the same command again."""

    home: Path
    material: Material
    layout: Layout
    flags: tuple[str, ...] = ()  # that change how it is saved, and not a bit of what
    save: Path | None = None  # where not below `home`
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.home / "tmp").mkdir(parents=True)
        self.save = self.save or self.home / "out" / "checkpoints"

    @property
    def roots(self) -> tuple[Path, Path]:
        assert self.save is not None
        return self.save, self.save.with_name(self.save.name + "_critic")

    def command(self, *more: str) -> list[str]:
        """The command line, as a user would type it."""
        return [
            "fit", "--hf-checkpoint", str(self.material.model), "--prompt-data", str(self.material.prompts),
            "--apply-chat-template", "--rollout-shuffle", "--advantage-estimator", "ppo",
            "--normalize-advantages", "--num-rollout", str(ROLLOUTS), "--rollout-batch-size", "4",
            "--global-batch-size", "2", "--rollout-max-response-len", "4", "--micro-batch-size", "2",
            "--lr", "1e-3", "--critic-lr", "2e-3", "--num-critic-only-steps", "1", "--no-use-tensorboard",
            "--custom-rm-path", "tests.torturing:reward", "--output-dir", str(self.home / "out"),
            "--save", str(self.save), "--save-interval", "1", "--actor-num-gpus-per-node",
            str(self.layout.world), *self.layout.flags, *self.flags, *more,
        ]  # fmt: skip

    def start(
        self,
        *more: str,
        prepare: forked.Prepare | None = None,
        meanwhile: Callable[[forked.Forked], None] | None = None,
    ) -> Outcome:
        """Run the command, with `meanwhile` beside it, until nothing of it is left."""

        def prepared(rank: int) -> None:
            ppo_lightning.report.write_report = lambda directory: directory  # two seconds of drawing
            if prepare is not None:
                prepare(rank)

        started, logged = time.monotonic(), len(self.log())
        output = self.home / f"output_{len(self.outcomes)}.txt"
        environment = {"TMPDIR": str(self.home / "tmp")}
        process = forked.command(self.command(*more), output, environment=environment, prepare=prepared)
        if meanwhile is not None:
            meanwhile(process)
        deadline = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        hung = process.returncode is None
        deadline = time.monotonic() + GRACE
        while not hung and forked.members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [] if hung else forked.members(process.pid)
        forked.end_group(process.pid)
        begun = [int(n) for n in re.findall(r"actor: goes on from \S*/iter_(\d+)", self.log()[logged:])]
        text, seconds = output.read_text(errors="replace"), time.monotonic() - started
        self.outcomes.append(Outcome(process.wait(), text, seconds, max(begun, default=0), left, hung))
        return self.outcomes[-1]

    # ---- what is on disk -----------------------------------------------------------------------------

    def log(self) -> str:
        file = self.home / "out" / "log.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def acknowledged(self) -> int:
        """The newest rollout that counts as saved, by the tracker or by the run's own log; 0: none."""
        tracker = self.roots[0] / TRACKER
        told = [int(n) for n in re.findall(r"checkpoint: \S*/iter_(\d+) \(", self.log())]
        return max([*told, int(tracker.read_text()) if tracker.exists() else 0])

    def whole(self) -> list[int]:
        """Rollouts whose actor and critic are both there to the last byte, by the manifests."""
        actor, critic = ({i: _whole(p) for i, p in _iterations(root).items()} for root in self.roots)
        return sorted(i for i, mark in actor.items() if mark is not None and critic.get(i) == mark)

    def left_over(self) -> list[str]:
        """Temporary files and directories of saves, logs and metrics."""
        places = [*self.roots, self.home / "out"]
        return [str(p) for place in places if place.is_dir() for p in place.iterdir() if _is_left_over(p)]

    def end_state(self) -> dict[str, Any]:
        """Everything that two runs of one layout must have alike when they are done."""
        state: dict[str, Any] = {}
        for name, root in zip(("actor", "critic"), self.roots):
            last = root / f"iter_{ROLLOUTS:07d}"
            state |= {f"{name} {p.name}": _digest(p) for p in sorted(last.glob("*.distcp"))}
            state |= {f"{name} {p.name}": self._plain(p) for p in sorted(last.glob("rng/*.pt"))}
            for file in ("common.pt", "trainer.pt"):
                state[f"{name} {file}"] = self._plain(last / file) if (last / file).exists() else None
        with (self.home / "out" / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        state["metrics"] = [{k: v for k, v in row.items() if not _is_time(k)} for row in rows]
        state["samples"] = (self.home / "out" / "samples.jsonl").read_text()
        return state

    def _plain(self, file: Path) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.tolist()
            if isinstance(value, dict):
                return {str(plain(k)): plain(v) for k, v in value.items() if not _is_time(k)}
            if isinstance(value, list | tuple):
                return [plain(v) for v in value]
            text = str(value)
            return text.replace(str(self.save), "SAVE").replace(str(self.home), "HOME")

        return plain(torch.load(file, weights_only=True))


def _iterations(root: Path) -> dict[int, Path]:
    return {int(p.name[5:]): p for p in sorted(root.glob("iter_*"))}


def _whole(path: Path) -> str | None:
    """The id of the save that wrote `path`, if all its files are as they were written."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, (size, digest) in manifest["files"].items():
            if (path / name).stat().st_size != size or _digest(path / name) != digest:
                return None
        return str(manifest["save_id"])
    except (OSError, ValueError, KeyError):
        return None


def _is_left_over(path: Path) -> bool:
    return LEFT_OVER.search(path.name) is not None


def _is_time(name: Any) -> bool:
    return str(name).startswith("perf/")


def _digest(file: Path) -> str:
    return xxhash.xxh3_128(file.read_bytes()).hexdigest()


# moments ----------------------------------------------------------------------------------------------


def watch(on_event: Event) -> None:
    """Tell `on_event(name, after)` before and after everything by which a save comes to last: "write" of a
    tensor, "fsync", "rename", "exchange", "rmtree", "replace" of a file, of a "tracker"."""

    def told(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            event = "tracker" if name == "replace" and str(args[1]).endswith(TRACKER) else name
            on_event(event, False)
            result = original(*args, **kwargs)
            on_event(event, True)
            return result

        return call

    places = [
        (os, "fsync", "fsync"), (os, "rename", "rename"), (os, "replace", "replace"),
        (shutil, "rmtree", "rmtree"), (publishing, "_exchange", "exchange"),
        (torch_dist, "_write_item", "write"),
    ]  # fmt: skip
    for module, attribute, name in places:
        setattr(module, attribute, told(name, getattr(module, attribute)))


def at(event: str, nth: int, rank: int, action: Action, *, after: bool = False) -> forked.Prepare:
    """Do `action` in `rank` just before (`after`: after) the nth `event` there; again at every later event
    while it returns False."""

    def prepare(here: int) -> None:
        if here != rank:
            return
        seen, done = 0, False

        def on_event(name: str, is_after: bool) -> None:
            nonlocal seen, done
            seen += (name, is_after) == (event, after)
            if seen >= nth and not done:
                done = True  # first: what the action does may be an event too
                done = action() is not False

        watch(on_event)

    return prepare


def count_into(file: Path) -> forked.Prepare:
    """Write down, as JSON, how often each event comes in each rank."""

    def prepare(rank: int) -> None:
        seen: Counter[str] = Counter()
        watch(lambda name, after: seen.update([name] if after else []))
        atexit.register(lambda: file.with_suffix(f".{rank}").write_text(json.dumps(seen)))

    return prepare


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_together() -> None:
    os.killpg(0, signal.SIGKILL)


def obey_permissions() -> None:
    """Take from this process, root's, the capability to ignore permission bits."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, data) == 0:
        data[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.capset(header, data)


def differing(one: dict[str, Any], other: dict[str, Any]) -> Sequence[str]:
    """Names of what two end states do not have alike."""
    return sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
