"""One PPO rollout and step of a random model, phase by phase: seconds, tokens a second, share of the matmul
peak, memory.

    python -m benchmarks.step [--cases S M L SmolLM2] [--steps 4] [--threads 1] [--ranks 1 --layout dp|pp]
    [--json] [FLAGS ...]

fp32, one epoch, one optimizer step, no KL, no end of sequence. Seconds are those of the processor, wall-clock
seconds stand beside them; the median of the steps after the first. Further flags go into the configuration,
as `--no-skip-redundant-passes`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._cases import STEP_CASES, Case, write

ROLES = {"critic": "old values", "actor": "old log-probs", "reference": "reference"}
PHASES = (
    "generate", "reward", *ROLES.values(), "advantages", "critic", "actor", "optimizer", "weight sync",
    "bookkeeping",
)  # fmt: skip


def clocks() -> tuple[float, ...]:
    """Processor and wall seconds."""
    return time.process_time(), time.perf_counter()


class Phases:
    """What grows on `clock` by phase and step. A phase inside another one is counted there alone."""

    def __init__(self, clock: Callable[[], tuple[float, ...]] = clocks) -> None:
        self.steps: list[dict[str, list[float]]] = []
        self._stack: list[str] = ["bookkeeping"]
        self._clock, self._since = clock, clock()

    def _book(self) -> None:
        now = self._clock()
        if self.steps:
            spent = self.steps[-1][self._stack[-1]]
            spent[:] = [a + b - c for a, b, c in zip(spent, now, self._since)]
        self._since = now

    def begin_step(self) -> None:
        self._book()
        self.steps.append(defaultdict(lambda: [0.0] * len(self._since)))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._book()
        self._stack.append(name)
        try:
            yield
        finally:
            self._book()
            self._stack.pop()

    def watch(self, owner: Any, method: str, name: str | Callable[..., str]) -> None:
        """Count what `owner.method` does as the phase `name` (or name(*args))."""
        inner = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name(*args)):
                return inner(*args, **kwargs)

        setattr(owner, method, watched)


def run(
    case: Case,
    steps: int,
    flags: list[str],
    ranks: int = 1,
    layout: str = "dp",
    clock: Callable[[], tuple[float, ...]] = clocks,
) -> dict[str, Any]:
    """Train for `steps` + 2 rollouts in this process; what each of the `steps` in the middle took."""
    import lightning.pytorch as pl

    from ppo_lightning import build
    from ppo_lightning.callbacks import RewardCallback, RolloutCallback, WeightSyncCallback
    from ppo_lightning.engines.hf import HFEngine
    from ppo_lightning.flags import build_parser

    class Share(RewardCallback):
        """A rule that reads every token."""

        def score(self, sample: Any) -> float:
            return sum(t % 3 == 0 for t in sample.tokens[-sample.response_length :]) / sample.response_length

    phases = Phases(clock)

    class Steps(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            phases.begin_step()

    directory = Path(
        os.environ.setdefault("PPO_LIGHTNING_BENCHMARK", tempfile.mkdtemp(prefix="ppo-lightning-step-"))
    )
    places = {"hf_checkpoint": str(directory / "model"), "prompt_data": str(directory / "prompts.jsonl")}
    if not (directory / "prompts.jsonl").exists():
        places = write(case, directory, case.batch * (steps + 2))
    config = options(case, directory, steps, ranks, layout).replace(**places)
    parsed = vars(build_parser("benchmarks.step", "").parse_args(flags))
    config = config.replace(**{name: x for name, x in parsed.items() if name in config.flat()})
    engine = HFEngine(places["hf_checkpoint"], end_ids=())
    trainer, module, data = build(config, [Share(), RolloutCallback(engine=engine), Steps()])
    strategy = trainer.strategy
    phases.watch(engine, "generate", "generate")
    phases.watch(module, "score", "reward")
    phases.watch(module, "advantages", "advantages")
    phases.watch(strategy, "forward", lambda role, *_: ROLES[role])
    phases.watch(strategy, "forward_backward", lambda role, *_: role)
    phases.watch(strategy, "step", "optimizer")
    for callback in trainer.callbacks:
        if isinstance(callback, WeightSyncCallback):
            phases.watch(callback, "send", "weight sync")
    began = time.perf_counter()
    trainer.fit(module, data)
    return {
        "steps": [dict(step) for step in phases.steps[1:-1]],
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "fit_s": time.perf_counter() - began,
    }


def options(case: Case, directory: Path, steps: int, ranks: int, layout: str) -> Any:
    """The run's configuration, without the places of model and data."""
    from ppo_lightning.config import PPOConfig

    pipeline = layout == "pp"
    return PPOConfig.of(
        actor_num_gpus_per_node=ranks,
        pipeline_model_parallel_size=ranks if pipeline else 1,
        advantage_estimator="ppo",
        normalize_advantages=True,
        num_rollout=steps + 2,
        rollout_batch_size=case.batch,
        n_samples_per_prompt=case.samples,
        num_steps_per_rollout=1,
        rollout_max_response_len=case.response,
        micro_batch_size=case.sequences // 8 if pipeline else case.sequences // ranks,
        lr=1e-3,
        output_dir=str(directory / "out"),
        use_tensorboard=False,
    )


def worker(given: argparse.Namespace) -> None:
    import torch

    from benchmarks.peak import matmul_peak

    torch.set_num_threads(given.threads)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    before = matmul_peak(given.threads, 1.0)[0] if rank == 0 else 0.0
    result = run(STEP_CASES[given.worker], given.steps, given.flags, given.ranks, given.layout)
    if rank == 0:
        result["peak"] = max(before, matmul_peak(given.threads, 1.0)[0])
        print(json.dumps(result), flush=True)


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One case in a process of its own."""
    passed = [
        "--steps",
        given.steps,
        "--threads",
        given.threads,
        "--ranks",
        given.ranks,
        "--layout",
        given.layout,
    ]
    command = [sys.executable, "-m", "benchmarks.step", "--worker", name, *map(str, passed), *given.flags]
    environment = os.environ | {"OMP_NUM_THREADS": str(given.threads)}
    with tempfile.TemporaryDirectory(prefix="ppo-lightning-step-") as directory:
        environment["PPO_LIGHTNING_BENCHMARK"] = directory
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def of_phase(result: dict[str, Any], phase: str, kind: int) -> float:
    """Median over the steps: processor (0) or wall (1) seconds of a phase."""
    return median(step.get(phase, (0.0, 0.0))[kind] for step in result["steps"])


def whole(result: dict[str, Any], kind: int) -> float:
    return median(sum(spent[kind] for spent in step.values()) for step in result["steps"])


def table(case: Case, result: dict[str, Any]) -> str:
    cpu, wall, peak = whole(result, 0), whole(result, 1), result["peak"]
    lines = [f"{'phase':14} {'cpu s':>8} {'wall s':>8} {'share':>7} {'GFLOP':>8} {'of peak':>8}"]
    done = 0.0
    for phase in PHASES:
        spent, waited = of_phase(result, phase, 0), of_phase(result, phase, 1)
        flops = case.flops(phase) / 1e9 if spent > 0 else 0.0
        done += flops
        share = f"{flops / spent / peak:8.1%}" if flops else ""
        lines.append(f"{phase:14} {spent:8.3f} {waited:8.3f} {spent / cpu:7.1%} {flops or 0:8.1f} {share}")
    lines.append(f"{'all':14} {cpu:8.3f} {wall:8.3f} {1:7.0%} {done:8.1f} {done / cpu / peak:8.1%}")
    lines.append(
        f"{case.response_tokens / cpu:.0f} response tokens a processor second,"
        f" {case.response_tokens / wall:.0f} a wall second; peak {peak:.1f} GFLOP/s;"
        f" {result['rss_mb']:.0f} MB"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(STEP_CASES), choices=list(STEP_CASES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layout", choices=["dp", "pp"], default="dp")
    parser.add_argument("--json", action="store_true", help="one JSON object a case")
    parser.add_argument("--worker", choices=list(STEP_CASES), help=argparse.SUPPRESS)
    given, given.flags = parser.parse_known_args()
    if given.worker:
        return worker(given)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    for name in given.cases:
        result = measure(name, given)
        print(
            json.dumps({"case": name, **result})
            if given.json
            else f"-- {name}\n{table(STEP_CASES[name], result)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
