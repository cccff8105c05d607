"""Held-out accuracy during training."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from ppo_lightning.engines import SamplingParams, Write, sample_seed
from ppo_lightning.hooks import PPOCallback, emit
from ppo_lightning.samples import Prompt, Sample, Status, require

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.config import PPOConfig
    from ppo_lightning.data import PromptDataModule
    from ppo_lightning.module import PPOModule


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process stands, and how to gather an object of every rank in rank order."""

    rank: int = 0
    world: int = 1
    gather: Callable[[Any], list[Any]] = lambda own: [own]


class PassAtK(Metric):
    """Chance that one of k responses is right, estimated without bias from n >= k of them: with c right ones,
    1 - C(n-c, k) / C(n, k), mean over prompts (Chen et al. 2021, "Evaluating large language models trained
    on code")."""

    total: Tensor
    prompts: Tensor

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("prompts", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, solved: Sequence[bool]) -> None:
        """One prompt's responses."""
        n, right = len(solved), sum(solved)
        if n < self.k:
            raise ValueError(f"pass@{self.k} needs {self.k} responses to a prompt, there are {n}")
        self.total += 1.0 - math.comb(n - right, self.k) / math.comb(n, self.k)
        self.prompts += 1

    def compute(self) -> Tensor:
        return self.total / self.prompts


def evaluate(
    sets: dict[str, list[Prompt]],
    write: Write,
    score: Callable[[list[Sample]], None],
    params: SamplingParams,
    n_samples: int = 1,
    seed: int = 0,
    ranks: Ranks | None = None,
    solved_at: float = 1.0,
) -> dict[str, float]:
    """`eval/NAME/...` of every set, the same on every rank: `mean` reward, `pass@k` for k = 1, 2, 4, ... and
    `n_samples`, `response_length` and the share `truncated`. `write(samples, params, seeds)` fills samples
    as `Engine.generate` does. Each rank writes and scores whole prompts. The draws depend on `seed`, the
    set's name, the prompt's place and the sample's number only; the random states of torch, numpy and
    Python are left as they were."""
    ranks = ranks or Ranks()
    results: dict[str, float] = {}
    with isolate_rng():
        for name, prompts in sets.items():
            samples = [
                Sample(
                    p.prompt,
                    p.label,
                    dict(p.metadata),
                    list(p.tokens),
                    group_index=at,
                    index=at * n_samples + i,
                )
                for at, p in enumerate(prompts)
                if at * ranks.world // len(prompts) == ranks.rank
                for i in range(n_samples)
            ]
            own = sample_seed(seed, zlib.crc32(name.encode()), 0, 0)
            write(samples, params, [sample_seed(own, 0, s.group_index, s.index) for s in samples])
            score(samples)
            everyone = [row for part in ranks.gather([_row(s) for s in samples]) for row in part]
            told = summary(everyone, n_samples, solved_at)
            results |= {f"eval/{name}/{key}": value for key, value in told.items()}
    return results


@dataclass(frozen=True, slots=True)
class Row:
    """What counts of one sample."""

    group: int
    reward: float
    length: int
    truncated: bool


def _row(sample: Sample) -> Row:
    reward = require(sample.reward, f"the reward of evaluation sample {sample.index}", "a RewardCallback")
    return Row(sample.group_index, reward, sample.response_length, sample.status is Status.TRUNCATED)


def summary(rows: Sequence[Row], n_samples: int, solved_at: float = 1.0) -> dict[str, float]:
    """Means and pass@k; `rows` holds all samples of every prompt, in any order. A response with a reward of
    at least `solved_at` is right."""
    groups: dict[int, list[bool]] = {}
    mean, length, truncated = (MeanMetric(sync_on_compute=False) for _ in range(3))
    for row in sorted(rows, key=lambda r: r.group):
        groups.setdefault(row.group, []).append(row.reward >= solved_at)
        mean.update(row.reward)
        length.update(row.length)
        truncated.update(float(row.truncated))
    results = {"mean": mean, "response_length": length, "truncated": truncated}
    values = {name: metric.compute().item() for name, metric in results.items()}
    for k in sorted({n_samples, *(2**i for i in range(n_samples.bit_length()))}):
        metric = PassAtK(k, sync_on_compute=False)
        for solved in groups.values():
            metric.update(solved)
        values[f"pass@{k}"] = metric.compute().item()
    return values


class EvalCallback(PPOCallback):
    """Evaluates the datamodule's sets before the first rollout, every `interval` rollouts and after the last,
    logs `eval/NAME/...` at the number of rollouts done and calls `on_eval_end`. The Trainer's rollout
    callback writes the responses, its reward callbacks score them. Training is the same bit for bit with and
    without it."""

    def __init__(
        self,
        params: SamplingParams,
        interval: int | None = None,
        n_samples: int = 1,
        before_training: bool = True,
        seed: int = 0,
        solved_at: float = 1.0,
    ) -> None:
        self.params = params
        self.interval = interval
        self.n_samples = n_samples
        self.before_training = before_training
        self.seed = seed
        self.solved_at = solved_at
        self.evaluated_at: int | None = None
        self.results: dict[str, float] = {}  # of the last evaluation
        self._trained = False

    @classmethod
    def from_config(cls, config: PPOConfig) -> EvalCallback:
        """As the flags `--eval-...` say; `config` is resolved."""
        e = config.evaluation
        return cls(
            eval_params(config),
            interval=e.eval_interval,
            n_samples=e.n_samples_per_eval_prompt,
            before_training=not e.skip_eval_before_train,
            seed=config.data.rollout_seed,
            solved_at=e.eval_solved_at,
        )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # not in on_train_start: whatever the order of the callbacks, the engine has its weights by now
        if trainer.global_step == 0 and self.before_training:
            self.run(trainer, cast("PPOModule", pl_module))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._trained = True
        due = self.interval is not None and trainer.global_step % self.interval == 0
        if due or trainer.global_step == trainer.max_steps:  # now: a checkpoint may be judged by the result
            self.run(trainer, cast("PPOModule", pl_module))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._trained:  # another callback may have stopped the run early
            self.run(trainer, cast("PPOModule", pl_module))

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """`trainer.validate`: evaluation alone."""
        self.evaluated_at = None
        self.run(trainer, cast("PPOModule", pl_module))

    def run(self, trainer: pl.Trainer, module: PPOModule) -> dict[str, float]:
        """Evaluate now, once for each number of rollouts done."""
        if self.evaluated_at == trainer.global_step:
            return {}
        self.evaluated_at = trainer.global_step
        data: PromptDataModule = trainer.datamodule  # type: ignore[attr-defined] # set by Lightning's `fit`
        self.results = results = evaluate(
            data.eval_prompts(),
            require(module.write, "module.write", "RolloutCallback"),
            module.score,
            self.params,
            self.n_samples,
            self.seed,
            Ranks(trainer.global_rank, trainer.world_size, module.strategy.gather_objects),
            self.solved_at,
        )
        for logger in trainer.loggers:
            logger.log_metrics(results, step=trainer.global_step)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in results.items()})
        emit(trainer, "on_eval_end", results)
        return results


def eval_params(config: PPOConfig) -> SamplingParams:
    """How the flags `--eval-...` say to draw; `config` is resolved."""
    e, r = config.evaluation, config.rollout
    return SamplingParams(
        max_new_tokens=require(e.eval_max_response_len, "--eval-max-response-len", "the configuration"),
        temperature=require(e.eval_temperature, "--eval-temperature", "PPOConfig.resolve"),
        top_p=require(e.eval_top_p, "--eval-top-p", "PPOConfig.resolve"),
        top_k=require(e.eval_top_k, "--eval-top-k", "PPOConfig.resolve"),
        stop=r.rollout_stop,
        stop_token_ids=r.rollout_stop_token_ids,
    )
