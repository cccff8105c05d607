"""Rewards as callbacks: by registered name, by function, or by a subclass with `score`. Several add up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ppo_lightning import rewards
from ppo_lightning.early import EarlyScores
from ppo_lightning.hooks import PPOCallback
from ppo_lightning.rewards import RewardError, custom
from ppo_lightning.rewards.deepscaler import RESPONSE_MARK, THINK_END
from ppo_lightning.rewards.model import RewardModel
from ppo_lightning.rewards.remote_rm import RemoteReward
from ppo_lightning.samples import Status

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.config import PPOConfig
    from ppo_lightning.module import PPOModule
    from ppo_lightning.samples import Prompt, Sample

log = logging.getLogger(__name__)

WATCHED_ROLLOUTS = 3  # constant rewards for that long are no bad luck
_BOXED = frozenset({"deepscaler", "math", "dapo_strict_box"})


class RewardCallback(PPOCallback):
    """Adds `weight` times a reward to every sample of this rank.

        class Brevity(RewardCallback):
            def score(self, sample):
                return -0.01 * sample.response_length

    `score` may be `async`; with `group = True` it gets the list of a prompt's samples and returns as many
    values. Or give the constructor a registered name (`RewardCallback("deepscaler")`), a function with the
    contract of `score` (`RewardCallback(my_function, weight=0.5)`), or an object whose `score(samples)`
    scores many at once (`RewardModel`, `RemoteReward`). A value is a number, or a dict of which
    `reward_key` names it. No number: TypeError; NaN or infinity: ValueError; a label missing where the
    reward needs one: RewardError. Responses that met the sandbox's time or memory limit score 0 and are
    counted in `rollout/reward_timeouts`.
    """

    # Defaults on the class: a subclass need not call our constructor.
    reward: Any = None
    weight: float = 1.0
    group: bool = False
    reward_key: str | None = None
    timeouts: int = 0  # of this rank, since the rollout began
    metrics: dict[str, float] | None = None
    _watched: int = 0
    _constant: int = 0
    _last: float | None = None
    _early: EarlyScores | None = None

    def __init__(
        self,
        reward: str | Callable[[Any], Any] | Any | None = None,
        *,
        weight: float | None = None,
        group: bool = False,
        reward_key: str | None = None,
    ) -> None:
        if reward is None and not self._overridden:
            raise TypeError(
                "RewardCallback needs a registered name, a function, or a subclass with `score(self, sample)`"
            )
        self.reward = rewards.get(reward) if isinstance(reward, str) else reward
        self.weight = self.weight if weight is None else weight
        self.group = group or self.group
        self.reward_key = reward_key or self.reward_key

    @classmethod
    def from_config(cls, config: PPOConfig) -> list[RewardCallback]:
        """One callback for each reward that the flags name; none when they name none.

        `--custom-rm-path` alone is the reward; to add it to others, name it: `--rm-type
        deepscaler,custom:0.2`.
        """
        options = config.reward
        terms = rewards.parse_rm_type(options.rm_type) if options.rm_type else []
        if options.custom_rm_path and "custom" not in dict(terms):
            if terms:
                log.warning(
                    "--custom-rm-path takes the place of --rm-type %s; for both, write --rm-type %s,custom",
                    options.rm_type,
                    options.rm_type,
                )
            terms = [("custom", 1.0)]
        return [cls(_source(name, config), weight=weight, **_details(name, config)) for name, weight in terms]

    @property
    def name(self) -> str:
        """What errors and warnings call this reward."""
        if self._overridden:
            return f"{type(self).__name__}.score"
        of_function = getattr(self.reward, "__name__", type(self.reward).__name__)
        return str(getattr(self.reward, "name", of_function))

    @property
    def _overridden(self) -> bool:
        return type(self).score is not RewardCallback.score

    def score(self, sample: Sample) -> float:
        """The reward of one sample, before the weight."""
        return self.values([sample])[0]

    def values(self, samples: Sequence[Sample]) -> list[float]:
        """The reward of each sample, before the weight, in order; counts time-outs."""
        if isinstance(self.reward, rewards.Reward) and not self._overridden:
            return self._registered(self.reward, samples)
        if not self._overridden and hasattr(self.reward, "score"):
            results = custom.call_all(self._many, [list(samples)], lambda _: f"reward {self.name}")[0]
        else:
            results = self._custom(self.score if self._overridden else self.reward, samples)
        if len(results) != len(samples):
            raise RewardError(f"reward {self.name} returned {len(results)} values for {len(samples)} samples")
        return [custom.as_float(value, self._where(s), self.reward_key) for s, value in zip(samples, results)]

    def _custom(self, function: Callable[[Any], Any], samples: Sequence[Sample]) -> list[Any]:
        if not self.group:
            return custom.call_all(function, list(samples), self._where)
        ordered = sorted(range(len(samples)), key=lambda row: samples[row].group_index)
        groups = [list(rows) for _, rows in groupby(ordered, key=lambda row: samples[row].group_index)]
        results = custom.call_all(
            function, [[samples[row] for row in rows] for rows in groups], lambda group: self._where(group[0])
        )
        values: list[Any] = [None] * len(samples)
        for rows, result in zip(groups, results):
            if not hasattr(result, "__len__") or len(result) != len(rows):
                raise RewardError(
                    f"reward {self.name} must return a list of {len(rows)} values, one for each sample of the"
                    f" group; it returned {result!r:.{custom.HEAD_CHARS}}"
                )
            for row, value in zip(rows, result):
                values[row] = value
        return values

    def _registered(self, reward: rewards.Reward, samples: Sequence[Sample]) -> list[float]:
        if reward.name == "random":  # the coin depends on the sample's place too: equal responses differ
            keys = [f"{s.weight_versions[-1:]}:{s.group_index}:{s.index}" for s in samples]
            return [reward.function(s.response, s.label, key) for s, key in zip(samples, keys)]  # type: ignore[call-arg]

        def score(rest: Sequence[Sample]) -> list[rewards.Outcome]:
            return reward.batch([(s.response, s.label) for s in rest])

        outcomes = score(samples) if self._early is None else self._early.complete(samples, score)
        self.timeouts += sum(outcome.timed_out for outcome in outcomes)
        return [custom.as_float(o.value, self._where(s)) for s, o in zip(samples, outcomes)]

    def _many(self, samples: list[Sample]) -> Any:
        if self._early is None:
            return self.reward.score(samples)
        return self._early.complete(samples, lambda rest: custom.run(self.reward.score(rest)))

    @property
    def _overlaps(self) -> bool:
        """Whether a response may be scored while others are written."""
        mine, ours = ((c.score, c.values, c.on_reward) for c in (type(self), RewardCallback))
        return mine == ours and EarlyScores.fits(self.reward)

    def _end_early(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None

    def _where(self, sample: Sample) -> str:
        return (
            f"reward {self.name} of sample {sample.index} (response {sample.response[: custom.HEAD_CHARS]!r})"
        )

    # ---- hooks ---------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(self.reward, RewardModel):
            self.reward.load()  # a missing model must not surface after the first rollout

    def on_rollout_start(self, trainer: pl.Trainer, module: PPOModule, prompts: list[Prompt]) -> None:
        if module.rollout.draw == 0:  # the later draws of the same rollout add theirs
            self.timeouts = 0

    def on_response_end(self, trainer: pl.Trainer, module: PPOModule, sample: Sample) -> None:
        if sample.failed or not self._overlaps or self._lacks_label(sample):
            return
        self._early = self._early or EarlyScores(self.reward)
        self._early.add(sample)

    def on_reward(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        try:
            self._check_labels(module, samples)
            values = self.values(samples)
        finally:
            self._end_early()
        for sample, value in zip(samples, values):
            sample.add_reward(self.weight * value)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: Any) -> None:
        self._end_early()

    def on_samples_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        """Time-outs of all rewards and ranks become a metric; rewards that never vary are reported once."""
        family = [c for c in trainer.callbacks if isinstance(c, RewardCallback)]  # type: ignore[attr-defined] # set by the connector
        if family[0] is not self:
            return
        counts = module.strategy.gather_objects(sum(c.timeouts for c in family))
        self.metrics = {"rollout/reward_timeouts": float(sum(counts))}
        warning = self.diagnose(samples, [c.name for c in family])
        if warning and trainer.is_global_zero:
            log.warning(warning)

    def diagnose(self, samples: Sequence[Sample], names: Sequence[str]) -> str | None:
        """What to tell the user after this rollout: a text once, when each of the first three had one reward
        throughout, and the same; else None. `samples` is the whole rollout, `names` the rewards in use."""
        self._watched += 1
        values = {s.reward for s in samples}
        if self._watched > WATCHED_ROLLOUTS or len(values) != 1:
            return None
        (value,) = values
        if self._watched > 1 and value != self._last:
            return None
        self._last = value
        self._constant += 1
        if self._constant < WATCHED_ROLLOUTS:
            return None
        return (
            f"every reward of the first {WATCHED_ROLLOUTS} rollouts is {value:g}, so nothing can be learned:"
            f" {likely_cause(samples, names)}"
        )

    def _lacks_label(self, sample: Sample) -> bool:
        return getattr(self.reward, "needs_label", False) and (sample.label is None or sample.label == "")

    def _check_labels(self, module: PPOModule, samples: Sequence[Sample]) -> None:
        if self._overridden:
            return
        for sample in samples:
            if self._lacks_label(sample):
                raise RewardError(
                    f"reward {self.name} compares with a label, and {_row_of(module, sample)} has none:"
                    " set --label-key to the column that holds it, or drop the row"
                )


def likely_cause(samples: Sequence[Sample], names: Sequence[str]) -> str:
    """Why a rollout's rewards may all be equal, by what its responses lack."""
    responses = [s.response for s in samples]
    if all(s.status is Status.TRUNCATED for s in samples):
        return "every response was cut at --rollout-max-response-len before its end; raise it"
    if "deepscaler" in names and not any(THINK_END in r or RESPONSE_MARK in r for r in responses):
        return (
            f"no response contains {THINK_END}, without which deepscaler gives 0; use --rm-type math, or a"
            " model and a prompt that think first"
        )
    if _BOXED & set(names) and not any("\\boxed{" in r for r in responses):
        return "no response contains \\boxed{...}, which the reward looks for; ask for it in the prompt"
    if "dapo" in names and not any("answer" in r.lower() for r in responses):
        return 'no response contains "Answer:", where dapo looks for the answer; ask for it in the prompt'
    if not any(responses):
        return "every response is empty; look at the stop tokens and the chat template"
    return (
        "the task may be too hard or too easy for the model, or --label-key may name the wrong column; look"
        " at samples.jsonl"
    )


def _row_of(module: PPOModule, sample: Sample) -> str:
    prompts = module.rollout.prompts if module.rollout else []
    for prompt in prompts[sample.group_index : sample.group_index + 1]:
        if prompt.prompt == sample.prompt:
            return f"row {prompt.index} of the prompt data"
    return f"the prompt {str(sample.prompt)[: custom.HEAD_CHARS]!r}"


def _source(name: str, config: PPOConfig) -> Any:
    options = config.reward
    if name == "remote_rm":
        return RemoteReward(_needed(name, "--rm-url", options.rm_url))
    if name == "model":
        path = _needed(name, "--reward-model-path", options.reward_model_path)
        return RewardModel(path, batch_size=options.reward_model_batch_size)
    if name == "custom":
        return custom.load(_needed(name, "--custom-rm-path", options.custom_rm_path))
    return name


def _details(name: str, config: PPOConfig) -> dict[str, Any]:
    if name == "custom":
        return {"group": config.reward.group_rm, "reward_key": config.reward.reward_key}
    return {"reward_key": config.reward.reward_key} if name == "remote_rm" else {}


def _needed(name: str, flag: str, value: str | None) -> str:
    if value is None:
        raise ValueError(f"--rm-type {name} needs {flag}")
    return value
