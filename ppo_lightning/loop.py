"""What the training step works with: the state of one iteration, dynamic sampling, first weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ppo_lightning.rewards import custom
from ppo_lightning.samples import Prompt, Sample, Status

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig

Groups = list[list[Sample]]


@dataclass(slots=True)
class Rollout:
    """What the callbacks fill during one iteration."""

    index: int  # rollouts done before this one
    prompts: list[Prompt]
    samples: list[Sample] | None = None  # this rank's share until the rewards are in, then the whole rollout
    draw: int = 0  # how often dynamic sampling has drawn further prompts
    train_actor: bool = True  # the critic warm-up sets it to False
    times: dict[str, float] = field(default_factory=dict)  # seconds by stage


class NonFiniteUpdateError(RuntimeError):
    """Too many optimizer steps in a row were skipped."""


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
    2025). `--dynamic-sampling-filter-path ppo_lightning.loop:rewards_differ`."""
    return len({s.reward for s in group}) > 1


class DynamicSampling:
    """Draws prompts until `rollout_batch_size` groups pass the filter. Groups accepted beyond that are
    carried to the next rollout, and through a checkpoint: none is lost."""

    def __init__(self, config: PPOConfig) -> None:
        path = config.rollout.dynamic_sampling_filter_path or ""
        self.keep = custom.load(path, flag="--dynamic-sampling-filter-path")
        self.size = config.rollout.rollout_batch_size
        self.count = config.rollout.over_sampling_batch_size or self.size
        self.most = config.rollout.max_num_gen_batches
        self.carried: Groups = []
        self.drawn = self.kept = 0  # groups of the last rollout, for the log

    def fill(self, first: list[Sample], draw: Callable[[int], list[Sample]]) -> list[Sample]:
        """Samples of exactly one batch of groups, renumbered. `draw(count)` gives the scored samples of
        further prompts; called alike on every rank. Raises DynamicSamplingError after
        `--max-num-gen-batches` draws."""
        accepted, groups, draws = self.carried, _grouped(first), 1
        self.drawn = self.kept = 0
        while True:
            passed = [g for g in groups if self.keep(g)]
            self.drawn, self.kept = self.drawn + len(groups), self.kept + len(passed)
            accepted = accepted + passed
            if len(accepted) >= self.size:
                break
            if draws == self.most:
                self.carried = accepted
                raise DynamicSamplingError(
                    f"{self.kept} of {self.drawn} groups passed --dynamic-sampling-filter-path in {draws}"
                    f" draws, a rollout needs {self.size}; raise --max-num-gen-batches or"
                    " --n-samples-per-prompt, or use prompts that are neither always nor never solved"
                )
            groups, draws = _grouped(draw(self.count)), draws + 1
        self.carried = accepted[self.size :]
        return _renumbered(accepted[: self.size])

    def state_dict(self) -> list[list[dict[str, Any]]]:
        return [[asdict(s) | {"status": str(s.status)} for s in group] for group in self.carried]

    def load_state_dict(self, state: list[list[dict[str, Any]]]) -> None:
        self.carried = [[sample_from(row) for row in group] for group in state]


def sample_from(row: dict[str, Any]) -> Sample:
    """The sample that `asdict` and plain types made `row` of."""
    return Sample(**row | {"status": Status(row["status"])})


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


def initial_weights(config: PPOConfig, role: str) -> str:
    """Where a role's first weights lie in a run that resumes nothing."""
    from ppo_lightning.megatron.checkpoint_sources import critic_source, policy_source

    if role == "critic":
        return str(critic_source(config).path)
    return str(policy_source(config, role))
