"""Rollout, weight sync and evaluation callbacks in whole runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from ppo_lightning.callbacks import PPOCallback, RewardCallback, RolloutCallback
from ppo_lightning.config import PPOConfig
from ppo_lightning.engines.base import Engine, SamplingParams
from ppo_lightning.engines.hf import HFEngine
from ppo_lightning.run import evaluate
from ppo_lightning.samples import Sample, Status
from tests.distributed.ranks import run_ranks
from tests.fitting import DigitShare, fit_rank, prepare


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return prepare(tmp_path_factory.mktemp("rollout"))


def fit(world: int, options: dict[str, Any], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return run_ranks(fit_rank, world, options, *args, group=False, timeout=240, **kwargs)


class WatchEval(PPOCallback):
    """Appends each evaluation to a file of its rank."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_eval_end(self, trainer: pl.Trainer, module: Any, results: dict[str, float]) -> None:
        with (self.directory / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.global_step, results]) + "\n")

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """The last evaluation came with the last step, where a checkpoint can still be judged by it."""
        assert self.read(trainer.global_rank)[-1][0] == trainer.global_step

    def read(self, rank: int) -> list[tuple[int, dict[str, float]]]:
        lines = (self.directory / f"rank{rank}.jsonl").read_text().splitlines()
        return [(step, results) for step, results in map(json.loads, lines)]


def test_evaluation_changes_nothing_and_is_the_same_on_every_rank(
    options: dict[str, Any], tmp_path: Path
) -> None:
    plain = fit(2, options | {"output_dir": str(tmp_path / "plain")})
    watch = WatchEval(tmp_path)
    evaluated = {
        "eval_interval": 2,
        "eval_prompt_data": ("some", options["prompt_data"]),
        "eval_temperature": 0.0,
        "n_samples_per_eval_prompt": 2,
        "output_dir": str(tmp_path / "evaluated"),
    }
    ranks = fit(2, options | evaluated, [watch])
    for with_eval, without in zip(ranks, plain):
        assert with_eval["rollouts"] == without["rollouts"]
        assert with_eval["weights"] == without["weights"]
        seen = with_eval["rows"][-1]["eval/some/mean"]  # a monitor sees it; recorded before the last one
        assert seen == pytest.approx(watch.read(0)[1][1]["eval/some/mean"])
    assert watch.read(0) == watch.read(1)
    assert [step for step, _ in watch.read(0)] == [0, 2, 3]  # before, every second, after the last
    assert watch.read(0)[0] != watch.read(0)[-1]  # new weights


class AsleepAtFirst(PPOCallback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Models have been built by now, and the engine has left them the room."""
        assert not pl_module.engine.health()


def test_an_engine_that_slept_has_weights_again(options: dict[str, Any], tmp_path: Path) -> None:
    """Also after a step that trained the critic alone, and for the evaluation that follows it."""
    changed = options | {"num_critic_only_steps": 2, "num_rollout": 4, "global_batch_size": 8}
    (awake,) = fit(1, changed | {"output_dir": str(tmp_path / "awake")})
    asleep = {"offload_rollout": True, "eval_interval": 1, "eval_prompt_data": ("a", options["prompt_data"])}
    engine = HFEngine(options["hf_checkpoint"])
    engine.generate([Sample("", tokens=[33, 34])], SamplingParams(1), [0])  # its weights are there
    callbacks = [RolloutCallback(engine=engine), AsleepAtFirst()]
    (slept,) = fit(1, changed | asleep | {"output_dir": str(tmp_path / "slept")}, callbacks)
    assert slept["rollouts"] == awake["rollouts"]
    assert slept["weights"] == awake["weights"]


class Reports(PPOCallback):
    """Counts the responses that were reported and the rewards that began with them, by rank, in files."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.told = directory, 0

    def on_response_end(self, trainer: pl.Trainer, module: Any, sample: Sample) -> None:
        assert sample.status is not Status.PENDING
        self.told += 1

    def on_rollout_end(self, trainer: pl.Trainer, module: Any, samples: list[Sample]) -> None:
        begun = [t.name for t in threading.enumerate() if t.name.startswith("early-reward")]
        with (self.directory / f"reports{trainer.global_rank}").open("a") as file:
            file.write(json.dumps([self.told, len(samples), len(begun)]) + "\n")
        self.told = 0


def all_at_once(
    samples: Sequence[Sample], engine: Engine, params: SamplingParams, seeds: Sequence[int]
) -> None:
    engine.generate(samples, params, seeds)


def test_a_run_is_the_same_with_rewards_that_begin_early(options: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks, dynamic draws; evaluation in between is scored as a whole."""
    changed = options | {
        "label_key": "input",
        "eval_interval": 2,
        "eval_prompt_data": ("some", options["prompt_data"]),
        "dynamic_sampling_filter_path": "ppo_lightning.loop:rewards_differ",
    }
    seen = {}
    for name, rollout in (("early", RolloutCallback()), ("late", RolloutCallback(generate=all_at_once))):
        directory = tmp_path / name
        directory.mkdir()
        callbacks = [rollout, RewardCallback("f1"), RewardCallback("dapo", weight=0.1), Reports(directory)]
        seen[name] = fit(2, changed | {"output_dir": str(directory / "out")}, callbacks)
        for rank in range(2):
            lines = [json.loads(line) for line in (directory / f"reports{rank}").read_text().splitlines()]
            assert len(lines) >= 3
            for told, written, begun in lines:
                # a rank may have no share of a later draw
                assert (told, begun) == ((written, 2 * bool(written)) if name == "early" else (0, 0))
    assert seen["early"] == seen["late"]


async def two_turns(
    samples: Sequence[Sample], engine: Engine, params: SamplingParams, seeds: Sequence[int]
) -> None:
    """The model writes, a tool answers "!!", the model writes again."""
    for sample in samples:
        sample.metadata["prompt"] = list(sample.tokens)
    short = SamplingParams(3, params.temperature)
    engine.generate(samples, short, seeds)
    first = [(s.response_length, s.rollout_log_probs) for s in samples]
    for sample in samples:
        sample.tokens = [*sample.tokens, 33, 33]
    engine.generate(samples, short, [seed + 1 for seed in seeds])
    for sample, (length, logprobs) in zip(samples, first):
        sample.loss_mask = [1] * length + [0, 0] + [1] * sample.response_length
        sample.rollout_log_probs = [*logprobs, 0.0, 0.0, *sample.rollout_log_probs]
        sample.response_length = len(sample.loss_mask)


class CheckTurns(PPOCallback):
    def on_reward(self, trainer: pl.Trainer, module: Any, samples: list[Sample]) -> None:
        assert all("prompt" in s.metadata for s in samples)  # in an evaluation too

    def on_experience_end(self, trainer: pl.Trainer, module: Any, experience: Any) -> None:
        for sample in module.rollout.samples:
            assert sample.prompt_tokens == sample.metadata["prompt"]
            tool = [
                t for t, kept in zip(sample.tokens[-sample.response_length :], sample.loss_mask) if not kept
            ]
            assert tool == [33, 33]
        assert (~experience.mask).sum() >= 2 * len(experience.samples)


@pytest.mark.parametrize("given", ["callback", "flag"])
def test_an_own_generate_function_may_mask_what_a_tool_wrote(
    options: dict[str, Any], tmp_path: Path, given: str
) -> None:
    changed = options | {"num_rollout": 2, "output_dir": str(tmp_path / "out")}
    changed |= {"eval_prompt_data": ("some", options["prompt_data"]), "eval_interval": 1}
    callbacks: list[PPOCallback] = [CheckTurns()]
    if given == "flag":
        changed["custom_generate_function_path"] = f"{__name__}:two_turns"
    else:
        callbacks.append(RolloutCallback(generate=two_turns))
    (seen,) = fit(1, changed, callbacks)
    assert seen["step"] == 2
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in seen["rows"])
    (alone,) = run_ranks(evaluate_rank, 1, changed, callbacks, group=False, timeout=240)
    assert 5 <= alone["eval/some/response_length"] <= 8  # two turns of at most 3, and 2 of the tool


def evaluate_rank(rank: int, world: int, options: dict[str, Any], callbacks: list[Any]) -> dict[str, float]:
    return evaluate(PPOConfig.of(**options), [DigitShare(), *callbacks])
