"""What the training step works with: the state of one iteration, dynamic sampling, first weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ppo_lightning import advantages, experience, losses, packing
from ppo_lightning.rewards import custom
from ppo_lightning.samples import Experience, Prompt, Sample, Status

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig
    from ppo_lightning.megatron.topology import Topology

Groups = list[list[Sample]]


@dataclass(slots=True)
class Rollout:
    """What the callbacks fill during one iteration."""

    index: int  # rollouts done before this one
    prompts: list[Prompt]
    samples: list[Sample] | None = None  # this rank's share until the rewards are in, then the whole rollout
    draw: int = 0  # draws of this rollout before the present one
    train_actor: bool = True  # the critic warm-up sets it to False
    times: dict[str, float] = field(default_factory=dict)  # seconds by stage


class NonFiniteUpdateError(RuntimeError):
    """Too many optimizer steps in a row were skipped."""

    def __init__(self, role: str, steps: int) -> None:
        super().__init__(
            f"{steps} optimizer steps of the {role} in a row had a loss or gradient that is NaN or inf; lower"
            f" {'--critic-lr' if role == 'critic' else '--lr'}, check the rewards, or raise"
            " --max-skipped-steps"
        )


class DynamicSamplingError(RuntimeError):
    """Too few groups passed the filter."""


class RolloutDone(torch.optim.Optimizer):
    """The one optimizer that Lightning sees: its step means "one rollout done", which is what `global_step`
    counts."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(()), requires_grad=False)], {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            closure()


def rewards_differ(group: list[Sample]) -> bool:
    """Keep a group whose rewards are not all equal: others teach a group-normalised estimator nothing (DAPO,
    2025). Failed samples have no say. `--dynamic-sampling-filter-path ppo_lightning.loop:rewards_differ`."""
    return len({s.reward for s in group if not s.failed}) > 1


class DynamicSampling:
    """Draws prompts until `rollout_batch_size` groups pass the filter. Groups accepted beyond that are
    carried to the next rollouts, oldest first, and through a checkpoint: none is lost. Every draw takes what
    is missing to `over_sampling_batch_size` groups; where the carried ones are a batch, nothing is drawn."""

    def __init__(self, config: PPOConfig) -> None:
        path = config.rollout.dynamic_sampling_filter_path
        self.keep = custom.load(path, flag="--dynamic-sampling-filter-path") if path else bool
        self.size = config.rollout.rollout_batch_size
        self.count = config.rollout.over_sampling_batch_size or self.size
        self.most = config.rollout.max_num_gen_batches
        self.carried: Groups = []
        self.waiting: Groups = []  # only partial rollouts leave groups unfinished
        self.drawn = self.kept = self.reused = 0  # groups of the last rollout, for the log

    @classmethod
    def from_config(cls, config: PPOConfig) -> DynamicSampling | None:
        """None where each rollout trains on just what it draws; saved rollouts went through it before."""
        if config.debug.load_debug_rollout_data is not None:
            return None
        if config.rollout.partial_rollout:
            return PartialRollouts(config)
        return cls(config) if config.rollout.dynamic_sampling_filter_path else None

    def first(self) -> int:
        """Prompts that a rollout begins with."""
        return 0 if len(self.carried) >= self.size else self.missing(self.carried)

    def missing(self, accepted: Groups) -> int:
        """Prompts for which there is room beside the `accepted` groups and those that wait."""
        return max(0, self.count - len(accepted) - len(self.waiting))

    def whole(self, samples: list[Sample]) -> list[Sample]:
        """Those of finished groups, which can be scored."""
        return samples

    def metrics(self) -> dict[str, float]:
        carried = {"rollout/groups_carried": float(self.reused)}
        return carried | ({"rollout/groups_kept": self.kept / self.drawn} if self.drawn else {})

    def fill(self, first: list[Sample], draw: Callable[[int], list[Sample]]) -> list[Sample]:
        """Samples of exactly one batch of groups, renumbered. `draw(count)` gives the scored samples of
        `count` further prompts and of the groups that wait; called alike on every rank. Raises
        DynamicSamplingError where `--max-num-gen-batches` times `over_sampling_batch_size` groups did not
        make a batch."""
        accepted, samples, draws = self.carried, first, 1
        self.drawn, self.kept, self.reused = 0, 0, min(len(accepted), self.size)
        while True:
            groups = _grouped(samples)
            self.waiting = [g for g in groups if not _finished(g)]
            passed = [g for g in groups if _finished(g) and self.keep(g)]
            self.drawn += len(groups) - len(self.waiting)
            self.kept += len(passed)
            accepted = accepted + passed
            if len(accepted) >= self.size:
                break
            under_way = len(accepted) + len(self.waiting) >= self.size
            if not under_way and self.drawn >= self.most * self.count:
                self.carried = accepted
                raise self.too_few(draws)
            samples, draws = draw(0 if under_way else self.missing(accepted)), draws + 1
        self.carried = accepted[self.size :]
        return _renumbered(accepted[: self.size])

    def too_few(self, draws: int) -> DynamicSamplingError:
        return DynamicSamplingError(
            f"{self.kept} of {self.drawn} groups passed --dynamic-sampling-filter-path in {draws} draws, a"
            f" rollout needs {self.size}; raise --max-num-gen-batches or --n-samples-per-prompt, or use"
            " prompts that are neither always nor never solved"
        )

    def state_dict(self) -> dict[str, list[list[dict[str, Any]]]]:
        return {"carried": _rows(self.carried), "waiting": _rows(self.waiting)}

    def load_state_dict(self, state: dict[str, list[list[dict[str, Any]]]]) -> None:
        self.carried = [[sample_from(row) for row in group] for group in state["carried"]]
        self.waiting = [[sample_from(row) for row in group] for group in state["waiting"]]


class PartialRollouts(DynamicSampling):
    """Keeps `over_sampling_batch_size` groups under way. Every draw lets the unfinished responses grow by a
    piece; when a batch of groups is whole, the others wait for the next rollout with what they have, also
    through a checkpoint."""

    def whole(self, samples: list[Sample]) -> list[Sample]:
        return [s for group in _grouped(samples) if _finished(group) for s in group]

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"rollout/groups_waiting": float(len(self.waiting))}


def sample_from(row: dict[str, Any]) -> Sample:
    """The sample that `asdict` and plain types made `row` of."""
    return Sample(**row | {"status": Status(row["status"])})


def _rows(groups: Groups) -> list[list[dict[str, Any]]]:
    return [[asdict(s) | {"status": str(s.status)} for s in group] for group in groups]


def _finished(group: list[Sample]) -> bool:
    return all(s.status is not Status.PENDING for s in group)


def _grouped(samples: list[Sample]) -> Groups:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


def _renumbered(groups: Groups) -> list[Sample]:
    n = len(groups[0])
    for place, group in enumerate(groups):
        for number, sample in enumerate(group):
            sample.group_index, sample.index = place, place * n + number
    return [sample for group in groups for sample in group]


def plan_of(samples: list[Sample], config: PPOConfig, topology: Topology) -> packing.RolloutPlan:
    """How a whole rollout is cut for this layout."""
    performance = config.performance
    dynamic = performance.use_dynamic_batch_size
    return packing.plan_rollout(
        [len(s.tokens) for s in samples],
        num_steps=config.rollout.num_steps_per_rollout,
        data_ranks=topology.dp,
        micro_batch_size=None if dynamic else performance.micro_batch_size,
        max_tokens=performance.max_tokens_per_gpu * topology.cp if dynamic else None,
        balance=performance.balance_data,
        multiple_of=topology.pp if topology.vpp else 1,
    )


def share_of(
    samples: list[Sample], plan: packing.RolloutPlan, config: PPOConfig, data_rank: int
) -> Experience:
    """A data rank's part of a whole rollout."""
    estimator = advantages.estimator(config.algorithm.advantage_estimator)
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float32)
    # a failed sample is no part of its group: its 0 would move the others' baseline
    groups = torch.tensor([-1 - i if s.failed else s.group_index for i, s in enumerate(samples)])
    shaped = advantages.shape_rewards(estimator.name, rewards, groups)
    trainable = torch.tensor([sum(s.trainable) for s in samples])
    longest = config.rollout.rollout_max_response_len
    weights = torch.zeros(len(samples))
    for step in plan.steps:
        weights[step.samples] = losses.token_weights(
            trainable[step.samples],
            per_token=config.algorithm.calculate_per_token_loss,
            constant_length=longest if estimator.constant_length else None,
        )
    mine = plan.samples_of(data_rank)
    return experience.gather(
        [samples[i] for i in mine],
        shaped[mine],
        weights[mine],
        with_rollout_logprobs=any(s.rollout_log_probs is not None for s in samples),
    )


def engine_has_policy(config: PPOConfig) -> bool:
    """Whether the engine's own weights, those of --hf-checkpoint, are the policy's first ones."""
    return Path(initial_weights(config, "actor")) == Path(str(config.model.hf_checkpoint))


def initial_weights(config: PPOConfig, role: str) -> str:
    """Where a role's first weights lie in a run that resumes nothing."""
    from ppo_lightning.megatron.checkpoint_sources import critic_source, policy_source

    if role == "critic":
        return str(critic_source(config).path)
    return str(policy_source(config, role))
