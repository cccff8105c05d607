"""The rules a configuration must meet, each with a message that says what to change; all problems are
reported at once, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from ppo_lightning import rules
from ppo_lightning.checks import check_files, checkpoint_problems
from ppo_lightning.config import ConfigError, Option, options
from ppo_lightning.derive import derived
from ppo_lightning.options import CriticOptions

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig

__all__ = ["check_files", "resolve"]

GROUPED = ("dr_grpo", "grpo", "gspo", "reinforce_plus_plus_baseline", "rloo")


def resolve(
    config: PPOConfig, cuda: bool, device_count: int, *, command: str = "fit", files: bool = True
) -> tuple[PPOConfig, list[str]]:
    """See `PPOConfig.resolve`."""
    bad = dict(_out_of_range(config))
    given = config.replace(**{name: options()[name].default for name in bad})
    full, warnings = derived(given, cuda, device_count)
    problems = list(bad.values())
    training = command != "evaluate"
    for rule in (*rules.SHARED, *(rules.TRAINING if training else rules.EVALUATION)):
        problems += rule(full)
    if not bad:  # arithmetic with defaults in place of bad values would report nonsense
        problems += [*_world(full), *(_batch(given) if training else ())]
    if files:
        problems += [message for _, message in checkpoint_problems(full)]
    if problems:
        raise ConfigError(problems)
    return full, warnings + list(_warnings(full))


def _out_of_range(config: PPOConfig) -> Iterator[tuple[str, str]]:
    for name, value in config.flat().items():
        option = options()[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            want = _bound(option, value)
            if want:
                yield name, f"{option.flag} {value}: must be {want}"


def _bound(option: Option, value: float) -> str:
    m = option.metadata
    if "above" in m and not value > m["above"]:
        return f"above {m['above']}"
    if "at_least" in m and not value >= m["at_least"]:
        return f"at least {m['at_least']}"
    if "at_most" in m and not value <= m["at_most"]:
        return f"at most {m['at_most']}"
    return ""


def _world(config: PPOConfig) -> Iterator[str]:
    c, m, size, world = config.cluster, config.model, config.model_parallel_size, config.world_size
    if world % size == 0:
        return
    below, above = world // size * size, -(-world // size) * size
    yield (
        f"TP {m.tensor_model_parallel_size} x PP {m.pipeline_model_parallel_size} x CP"
        f" {m.context_parallel_size} = {size} does not divide the world of {world} ranks (--actor-num-nodes"
        f" {c.actor_num_nodes} x --actor-num-gpus-per-node {c.actor_num_gpus_per_node}); use"
        f" {_either(below, above)} ranks, or a layout whose product divides {world}"
    )


def _batch(config: PPOConfig) -> Iterator[str]:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout, exactly."""
    r = config.rollout
    if r.rollout_batch_size is None:
        return
    samples = r.rollout_batch_size * r.n_samples_per_prompt
    n = r.n_samples_per_prompt
    made = f"--rollout-batch-size {r.rollout_batch_size} x --n-samples-per-prompt {n} = {samples}"
    batch, steps = r.global_batch_size, r.num_steps_per_rollout
    if batch is not None and steps is not None and batch * steps != samples:
        cures = [f"--num-steps-per-rollout {samples // batch}"] if samples % batch == 0 else []
        cures += [f"--global-batch-size {samples // steps}"] if samples % steps == 0 else []
        cure = " or ".join(cures) or _nearest(samples, batch)
        yield (
            f"{made} samples a rollout, but --global-batch-size {batch} x --num-steps-per-rollout {steps} ="
            f" {batch * steps}; use {cure}, or give only one of the two (the other: none)"
        )
    elif batch is not None and samples % batch:
        prompts = _around(r.rollout_batch_size, lambda p: p * n % batch == 0, batch)
        yield (
            f"{made} samples a rollout do not divide into optimizer batches of --global-batch-size {batch};"
            f" use {_nearest(samples, batch)}, or --rollout-batch-size {_either(*prompts)}"
        )
    elif steps is not None and samples % steps:
        near = _around(steps, lambda s: samples % s == 0, samples)
        yield (
            f"{made} samples a rollout do not divide into --num-steps-per-rollout {steps} optimizer steps;"
            f" use --num-steps-per-rollout {_either(*near)}"
        )


def _nearest(samples: int, batch: int) -> str:
    return f"--global-batch-size {_either(*_around(batch, lambda b: samples % b == 0, samples))}"


def _around(value: int, fits: Callable[[int], bool], most: int) -> list[int]:
    """The nearest values below and above that fit, up to `most` further."""
    below = next((v for v in range(value - 1, 0, -1) if fits(v)), 0)
    above = next((v for v in range(value + 1, value + most + 1) if fits(v)), 0)
    return [below, above]


def _either(*values: int) -> str:
    return " or ".join(str(v) for v in values if v > 0)


def _biased_kl(config: PPOConfig) -> Iterator[str]:
    """A KL estimator that is right as a value and wrong as a loss."""
    a = config.algorithm
    if not a.use_kl_loss or a.kl_loss_coef == 0:
        return
    if a.use_unbiased_kl and a.kl_loss_type == "k2":
        yield "--use-unbiased-kl with --kl-loss-type k2 biases its gradient, which is right without; drop one"
    elif not a.use_unbiased_kl and a.kl_loss_type != "k2":
        gradient = "is 0 on average" if a.kl_loss_type == "k1" else "is that of the other direction"
        yield (
            f"--kl-loss-type {a.kl_loss_type}: as a loss, its gradient {gradient}; use k2, or add"
            " --use-unbiased-kl (docs/algorithms.md)"
        )


def _no_effect(config: PPOConfig) -> Iterator[str]:
    """Options that another one leaves without their usual meaning."""
    a, r, reward = config.algorithm, config.rollout, config.reward
    if a.policy_loss_type == "cispo":
        if a.advantage_estimator == "gspo":
            yield (
                "--policy-loss-type cispo with --advantage-estimator gspo takes the ratio of each token, not"
                " gspo's of the sequence; drop one of them, or say --advantage-estimator grpo"
            )
        if a.eps_clip_c is not None:
            yield f"--eps-clip-c {a.eps_clip_c:g} is ignored: --policy-loss-type cispo has no dual clip"
    longest, buffer = r.rollout_max_response_len, reward.overlong_buffer_len
    if buffer and longest and buffer > longest:
        yield (
            f"--overlong-buffer-len {buffer} is above --rollout-max-response-len {longest}: every response is"
            " punished, the shortest too; lower it"
        )
    if r.over_sampling_batch_size and not (r.dynamic_sampling_filter_path or r.partial_rollout):
        yield (
            f"--over-sampling-batch-size {r.over_sampling_batch_size} is ignored: it is for"
            " --dynamic-sampling-filter-path and --partial-rollout"
        )


def _warnings(config: PPOConfig) -> Iterator[str]:
    a, c, r = config.algorithm, config.critic, config.rollout
    if config.ppo and config.cluster.offload_train is False:
        yield (
            "--no-offload-train: actor and critic both stay resident on the device, which doubles the memory"
        )
    if a.use_kl_loss and a.kl_loss_coef == 0:
        yield (
            "--use-kl-loss with --kl-loss-coef 0 only monitors the KL; it costs a forward pass of the"
            " reference model in each rollout"
        )
    yield from _biased_kl(config)
    if r.num_rollout is not None and r.num_epoch is not None:
        yield "--num-rollout and --num-epoch are both given: --num-epoch is ignored"
    if r.sglang_args and r.rollout_engine != "sglang":
        yield f"{r.sglang_args[0]} is ignored: it is for --rollout-engine sglang"
    if not config.ppo and c != CriticOptions():
        changed = [f for f in fields(c) if getattr(c, f.name) != f.default]
        flags = ", ".join(options()[f.name].flag for f in changed)
        yield f"{flags} ignored: only --advantage-estimator ppo has a critic"
    if config.ppo and r.num_rollout is not None and c.num_critic_only_steps >= r.num_rollout:
        yield (
            f"--num-critic-only-steps {c.num_critic_only_steps} covers the whole run: the actor never trains"
        )
    yield from _no_effect(config)
    if a.advantage_estimator in GROUPED and r.n_samples_per_prompt == 1:
        yield (
            f"--advantage-estimator {a.advantage_estimator} compares the samples of one prompt, and"
            " --n-samples-per-prompt is 1: every advantage is 0"
        )
