"""The same PPO step by TRL 1.12.0 and by ppo_lightning, in turn: seconds, memory, and the ratio pair by pair.

    python -m benchmarks.trl [--cases S M L] [--pairs 5] [--steps 3]

Both train the same random Qwen3 (actor and critic of one size) on the same prompts with full-length
responses: one epoch, one optimizer step of all samples at once, no KL, one thread, and a rule as reward. TRL
asks for a reward *model*: it gets one whose forward pass is that rule. TRL is installed without its
dependencies into a cache folder and runs on this environment's torch and transformers.
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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._cases import CASES, Case, prompts, tokenizer
from benchmarks.step import measure, whole

VERSION = "1.12.0"
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ppo_lightning" / f"trl-{VERSION}"


def install() -> Path:
    """TRL's own code in the cache folder; made once."""
    if not (HOME / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(HOME)]
        subprocess.run([*command, f"trl=={VERSION}"], check=True)
    return HOME


def rule_model() -> Any:
    """A reward model in TRL's sense: the share of tokens divisible by three, at every position."""
    import torch
    from torch import nn

    class Backbone(nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            class Output:
                hidden_states = ((input_ids % 3 == 0).float().cumsum(1)[..., None] / input_ids.shape[1],)

            return Output()

    class Rule(nn.Module):
        base_model_prefix = "backbone"

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.score = Backbone(), nn.Identity()

    return Rule()


def worker(case: Case, steps: int) -> None:
    """`steps` + 2 updates by TRL; what each of the `steps` in the middle took, as JSON."""
    import torch
    import trl.experimental.ppo.ppo_trainer as ppo
    from datasets import Dataset
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

    torch.manual_seed(0)
    torch.set_num_threads(1)
    words = tokenizer(case.vocab)
    config = Qwen3Config(**case.model, num_labels=1)
    policy, reference = Qwen3ForCausalLM(config), Qwen3ForCausalLM(config)
    reference.load_state_dict(policy.state_dict())
    policy.generation_config = GenerationConfig(pad_token_id=words.pad_token_id)
    rows = Dataset.from_list([{"input_ids": ids} for ids in prompts(case, case.batch * (steps + 2))])
    given = ppo.PPOConfig(
        output_dir=tempfile.mkdtemp(prefix="ppo-lightning-trl-"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=case.batch * (steps + 2),
        response_length=case.response,
        temperature=1.0,
        learning_rate=1e-3,
        lam=1.0,
        kl_coef=0.0,
        num_sample_generations=0,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        local_rollout_forward_batch_size=case.batch,
        disable_tqdm=True,
    )
    marks: list[tuple[float, float]] = []
    generate = ppo.batch_generation

    def marked(*args: Any, **kwargs: Any) -> Any:
        marks.append((time.process_time(), time.perf_counter()))
        return generate(*args, **kwargs)

    ppo.batch_generation = marked
    trainer = ppo.PPOTrainer(
        args=given,
        processing_class=words,
        model=policy,
        ref_model=reference,
        reward_model=rule_model(),
        value_model=Qwen3ForSequenceClassification(config),
        train_dataset=rows,
        eval_dataset=rows.select(range(case.batch)),
    )
    trainer.train()
    spent = [[b - a for a, b in zip(one, two)] for one, two in pairwise(marks[1:])]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"steps": [{"all": step} for step in spent], "rss_mb": peak}), flush=True)


def by_trl(name: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.trl", "--worker", name, "--steps", str(steps)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(install()),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"TRL at {name} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(name: str, given: argparse.Namespace) -> None:
    ours, theirs = [], []
    for _ in range(given.pairs):
        theirs.append(by_trl(name, given.steps))
        ours.append(measure(name, given))
    print(f"-- {name}: {given.pairs} pairs, {given.steps} steps each")
    for kind, unit in ((0, "processor"), (1, "wall")):
        a, b = [whole(x, kind) for x in theirs], [whole(x, kind) for x in ours]
        each = [x / y for x, y in zip(a, b)]
        pairs = " ".join(f"{x:.2f}" for x in each)
        print(
            f"{unit:10} seconds a step: TRL {median(a):8.3f}  ppo_lightning {median(b):8.3f}"
            f"  ratio {median(each):5.2f}  ({pairs})"
        )
    a, b = (median(x["rss_mb"] for x in side) for side in (theirs, ours))
    print(f"peak memory: TRL {a:.0f} MB  ppo_lightning {b:.0f} MB  ratio {b / a:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--worker", choices=list(CASES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return worker(CASES[given.worker], given.steps)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    given.threads, given.ranks, given.layout, given.flags = 1, 1, "dp", []
    for name in given.cases:
        compare(name, given)


if __name__ == "__main__":
    main()
