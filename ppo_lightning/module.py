"""The PPO iteration as a Lightning module. `training_step` is the page to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from ppo_lightning import advantages, experience, loop, losses, packing
from ppo_lightning.gae import sum_to_go
from ppo_lightning.hooks import emit, listens
from ppo_lightning.masked import masked_sum
from ppo_lightning.megatron.optimizer import OptimizerOptions
from ppo_lightning.metrics import experience_metrics, mean_of, rollout_metrics
from ppo_lightning.samples import Experience, Prompt, Sample, require
from ppo_lightning.savings import WATCHERS, Savings, Seen

if TYPE_CHECKING:
    from torch import Tensor

    from ppo_lightning.config import PPOConfig
    from ppo_lightning.engines.base import Engine, Write
    from ppo_lightning.megatron.strategy import MegatronStrategy


class PPOModule(pl.LightningModule):
    """Actor and, for `ppo`, critic, trained by one PPO iteration per batch of prompts.

    `config` must be resolved (`PPOConfig.resolve`). Needs a Trainer with `MegatronStrategy`, a rollout
    callback and at least one reward callback."""

    def __init__(self, config: PPOConfig) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.engine: Engine | None = None
        self.write: Write | None = None  # how responses are written: by the engine, or by an own function
        self.rollout: loop.Rollout | None = None
        self.weight_version = 0
        self.skipped_in_a_row = {"actor": 0, "critic": 0}
        self.kl = losses.KLController.from_config(config)
        self.estimator = advantages.estimator(config.algorithm.advantage_estimator)
        self.has_critic = self.estimator.needs_critic
        self.has_reference = config.kl
        self.sampling = loop.DynamicSampling.from_config(config)

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> None:
        """One PPO iteration: prompts in, updated actor and critic out."""
        started = time.perf_counter()
        samples = self.generate(prompts)
        if self.config.debug.debug_rollout_only:
            return self.end_rollout(rollout_metrics(samples), time.perf_counter() - started)
        plan, metrics = self.plan(samples), rollout_metrics(samples)
        share, saved = self.share(samples, plan), self.savings()
        if self.has_critic:
            share.old_values = self.infer("critic", "values", share, plan, later=saved.old_values)
        if self.rollout.train_actor or not saved.idle_actor:
            if self.has_reference:
                share.ref_logprobs = self.infer("reference", "logprobs", share, plan)
            share.old_logprobs = self.old_logprobs(share, plan, saved)
        if saved.old_values:  # targets are sums of rewards; the critic's first step tells the old values
            share.returns = sum_to_go(share.rewards, share.mask, gamma=1.0)
            metrics |= self.train_role("critic", share, plan, saved)
        self.emit("on_experience_end", share)
        share.advantages, share.returns = self.advantages(share)
        self.adapt_kl(share, len(samples))
        self.emit("on_advantages_end", share)

        metrics |= experience_metrics(share, self.strategy.reduce_over_data)
        if self.has_critic and not saved.old_values:
            metrics |= self.train_role("critic", share, plan, saved)
        if self.rollout.train_actor:
            metrics |= self.train_role("actor", share, plan, saved)
            self.weight_version += 1
            with self.timed("weight_sync"):
                self.emit("on_weights_updated", self.weight_version)
        self.end_rollout(metrics, time.perf_counter() - started)

    # ---- the stages ----------------------------------------------------------------------------------------

    def generate(self, prompts: list[Prompt]) -> list[Sample]:
        """Responses and rewards of the whole rollout, in its order, on every rank."""
        self.rollout = loop.Rollout(self.trainer.global_step, prompts)
        if self.sampling is None:
            samples = self.draw(prompts)
        else:
            self.rollout.prompts = self.trainer.datamodule.resized(prompts, self.sampling.first())
            samples = self.sampling.fill(self.draw(self.rollout.prompts), self.draw_more)
        if self.config.algorithm.mask_truncated_samples:
            for sample in samples:
                sample.mask_if_truncated()
        self.rollout.samples = samples
        self.emit("on_samples_end", samples)
        return samples

    def draw(self, prompts: list[Prompt]) -> list[Sample]:
        """Generate and score `prompts`, each rank its share; everyone's samples in order."""
        with self.timed("rollout"):
            self.rollout.samples = None
            self.emit("on_rollout_start", prompts)
            mine = require(self.rollout.samples, "module.rollout.samples", "RolloutCallback")
            whole = mine if self.sampling is None else self.sampling.whole(mine)
            self.emit("on_rollout_end", whole)
        with self.timed("reward"):
            self.score(whole)
            everyone = [s for part in self.strategy.gather_objects(mine) for s in part]
        return sorted(everyone, key=lambda s: s.index)

    def draw_more(self, count: int) -> list[Sample]:
        """The next `count` prompts of the data, and what waits, generated and scored."""
        self.rollout.draw += 1
        return self.draw(self.take(count))

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts of the data, used up when this rollout is done."""
        prompts = self.trainer.datamodule.take(count)
        self.rollout.prompts = self.rollout.prompts + prompts
        return prompts

    def score(self, samples: list[Sample]) -> None:
        """Let the reward callbacks score `samples`, unless they were loaded with their rewards; a failed
        sample counts 0 and is not trained on."""
        if self.config.debug.load_debug_rollout_data is None:
            self.emit("on_reward", [s for s in samples if not s.failed])
        for sample in samples:
            if sample.failed:
                sample.reward = 0.0
            require(sample.reward, f"the reward of sample {sample.index}", "a RewardCallback (or --rm-type)")

    def plan(self, samples: list[Sample]) -> packing.RolloutPlan:
        """Optimizer batches, data ranks and micro-batches; computed alike on every rank."""
        return loop.plan_of(samples, self.config, self.strategy.topology)

    def share(self, samples: list[Sample], plan: packing.RolloutPlan) -> Experience:
        """This data rank's part; rewards are shaped and denominators counted over the whole rollout."""
        return loop.share_of(samples, plan, self.config, self.strategy.topology.dp_rank)

    def savings(self) -> Savings:
        return Savings.of(self.config, watched=listens(self.trainer, *WATCHERS))

    def old_logprobs(self, share: Experience, plan: packing.RolloutPlan, saved: Savings) -> Tensor | None:
        if self.config.algorithm.use_rollout_logprobs:
            return require(share.rollout_logprobs, "rollout_log_probs", "the rollout engine")
        return self.infer("actor", "logprobs", share, plan, later=saved.old_logprobs)

    def infer(
        self, role: str, output: str, share: Experience, plan: packing.RolloutPlan, *, later: bool = False
    ) -> Tensor | None:
        """A forward pass of `role` over this rank's share, [B, T]; `later`: without the first step's part."""
        rows = [r for step in plan.rows_of(self.strategy.topology.dp_rank)[later:] for r in step]
        if not rows:
            return None
        batches = experience.microbatches(share, rows)
        with self.timed(f"{role}_forward"), self.active(role):
            return experience.scatter(share, batches, self.strategy.forward(role, batches, output))

    def advantages(self, share: Experience) -> tuple[Tensor, Tensor | None]:
        """Advantages, whitened over all data ranks if asked for, and returns (from before whitening)."""
        options = advantages.AdvantageOptions.from_config(self.config, kl_coef=self.kl.coef)
        return advantages.estimate(share, options, self.strategy.reduce_over_data)

    def adapt_kl(self, share: Experience, num_samples: int) -> None:
        """Steer the coefficient of the KL in the reward towards `--kl-target`, the mean KL of a sample."""
        if self.kl.target is not None and self.kl.coef != 0.0:
            total = masked_sum(share.old_logprobs - share.ref_logprobs, share.mask)
            mean = self.strategy.reduce_over_data(total).item() / num_samples
            self.kl = self.kl.observe(mean, num_samples)

    def train_role(
        self, role: str, share: Experience, plan: packing.RolloutPlan, saved: Savings
    ) -> dict[str, float]:
        """`update` between its hooks."""
        self.emit(f"on_{role}_update_start")
        metrics = self.update(role, share, plan, saved.old_values if role == "critic" else saved.old_logprobs)
        self.emit(f"on_{role}_update_end")
        return metrics

    def update(
        self, role: str, share: Experience, plan: packing.RolloutPlan, first: bool = False
    ) -> dict[str, float]:
        """All optimizer steps of `role`; metrics are their means. `first`: the first fills the old slot."""
        a, objective, reports = self.config.algorithm, self.objective(role), []
        entropy = role == "actor" and (a.observe_training_entropy or a.entropy_coef != 0.0)
        slot = "old_values" if role == "critic" else "old_logprobs"
        with self.timed(role), self.active(role):
            for number, rows in enumerate(plan.rows_of(self.strategy.topology.dp_rank) * a.ppo_epochs):
                new = first and number == 0
                batches = experience.microbatches(share, rows, without=slot if new else None)
                seen = Seen(objective, slot.removeprefix("old_")) if new else objective
                sums = self.strategy.forward_backward(role, batches, seen, entropy=entropy)
                if new:
                    flats = self.strategy.complete(role, batches, seen.parts)
                    setattr(share, slot, experience.scatter(share, batches, flats, getattr(share, slot)))
                step = self.strategy.step(role)
                self.count_skipped(role, step.skipped)
                reports.append(
                    sums | {"grad_norm": step.grad_norm, "lr": step.lr, "skipped": float(step.skipped)}
                )
        return mean_of(reports, prefix="critic" if role == "critic" else "train")

    def objective(self, role: str) -> Callable[..., Any]:
        """The loss of `role` with this run's options."""
        if role == "critic":
            return partial(losses.value_objective, options=losses.ValueLossOptions.from_config(self.config))
        reduce = self.strategy.reduce_over_context
        options = losses.PolicyLossOptions.from_config(self.config, reduce_sequence=reduce)
        return partial(losses.policy_objective, options=options)

    # ---- Lightning -----------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the roles this run needs; weights come from the checkpoint that is resumed, else from their
        sources."""
        c = self.config
        if "actor" in self.strategy.roles or (c.debug.debug_rollout_only and loop.engine_has_policy(c)):
            return
        fitting = self.trainer.state.fn == TrainerFn.FITTING and not c.debug.debug_rollout_only
        roles = {"actor": OptimizerOptions.from_config(c, "actor") if fitting else None}
        if self.has_critic and fitting:
            roles["critic"] = OptimizerOptions.from_config(c, "critic")
        if self.has_reference and fitting:
            roles["reference"] = None
        for role, optimizer in roles.items():
            self.strategy.setup_model(
                role, c.model.hf_checkpoint, optimizer=optimizer, temperature=c.rollout.rollout_temperature
            )
            self.strategy.load_weights(role, loop.initial_weights(c, role))  # dropped for a checkpoint's
            self.strategy.deactivate(role)

    def validation_step(self, batch: list[Prompt], batch_idx: int) -> None:
        """Nothing: `trainer.validate` gives the evaluation callback its occasion."""

    def configure_optimizers(self) -> loop.RolloutDone:
        return loop.RolloutDone()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ppo"] = {
            "weight_version": self.weight_version,
            "skipped_in_a_row": dict(self.skipped_in_a_row),
            "kl_coef": None if self.kl.target is None else self.kl.coef,
            "groups": self.sampling.state_dict() if self.sampling else None,
        }

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        state = checkpoint["ppo"]
        self.weight_version = state["weight_version"]
        if self.kl.target is not None and state["kl_coef"]:  # else --kl-coef says it
            self.kl = replace(self.kl, coef=state["kl_coef"])
        self.skipped_in_a_row = dict(state["skipped_in_a_row"])
        if self.sampling is not None and state["groups"] is not None:
            self.sampling.load_state_dict(state["groups"])

    # ---- small things --------------------------------------------------------------------------------------

    @property
    def strategy(self) -> MegatronStrategy:
        return self.trainer.strategy

    def emit(self, hook: str, *args: Any) -> None:
        emit(self.trainer, hook, *args)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        times = self.rollout.times
        times[stage] = times.get(stage, 0.0) + time.perf_counter() - started

    @contextmanager
    def active(self, role: str) -> Iterator[None]:
        """Only the model at work is resident."""
        self.strategy.activate(role)
        yield
        self.strategy.deactivate(role)

    def count_skipped(self, role: str, skipped: bool) -> None:
        self.skipped_in_a_row[role] = self.skipped_in_a_row[role] + 1 if skipped else 0
        limit = self.config.debug.max_skipped_steps
        if self.skipped_in_a_row[role] >= limit:
            raise loop.NonFiniteUpdateError(role, limit)

    def end_rollout(self, metrics: dict[str, float], seconds: float) -> None:
        """Log, count the rollout as done and its prompts as used."""
        rollout = self.rollout
        metrics["perf/step_time"] = seconds
        metrics["perf/tokens_per_second"] = sum(s.response_length for s in rollout.samples) / seconds
        metrics |= {f"perf/{stage}_time": t for stage, t in rollout.times.items()}
        if self.sampling is not None:
            metrics |= self.sampling.metrics()
        for callback in self.trainer.callbacks:
            metrics |= getattr(callback, "metrics", None) or {}
        self.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)
        self.optimizers().step()
        self.trainer.datamodule.commit(len(rollout.prompts))
