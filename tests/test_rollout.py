"""What the rollout callback decides: shares, seeds, and which samples it lets through."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ppo_lightning.callbacks.rollout import RolloutError, check, seed_of, share_of_samples, training_params
from ppo_lightning.config import PPOConfig
from ppo_lightning.engines.base import SamplingParams
from ppo_lightning.samples import Prompt, Sample, Status

PROMPTS = [Prompt(100 + i, f"p{i}", label=i, metadata={"at": [i]}, tokens=[i, i]) for i in range(5)]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_shares_are_the_whole_rollout_in_whole_groups(world: int) -> None:
    shares = [share_of_samples(PROMPTS, 3, rank, world) for rank in range(world)]
    together = [sample for share in shares for sample in share]
    assert together == share_of_samples(PROMPTS, 3, 0, 1)
    assert [s.index for s in together] == list(range(15))
    assert [s.group_index for s in together] == [i // 3 for i in range(15)]
    assert all(len(share) % 3 == 0 for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 3


def test_samples_own_what_they_may_change() -> None:
    samples = share_of_samples(PROMPTS, 2, 0, 1)
    samples[0].tokens.append(7)
    samples[0].metadata["seen"] = True
    assert samples[1].tokens == PROMPTS[0].tokens == [0, 0]
    assert samples[1].metadata == PROMPTS[0].metadata == {"at": [0]}
    assert samples[1].label == 0


def test_seeds_differ_by_place_rollout_and_both_seeds() -> None:
    """A prompt that comes twice in one rollout has its own draws each time."""
    config = PPOConfig.of(seed=1)
    samples = share_of_samples([PROMPTS[0], PROMPTS[0], PROMPTS[1]], 4, 0, 1)
    variants = [
        (config, 0, 0),
        (config, 1, 0),
        (config, 0, 1),
        (config.replace(seed=2), 0, 0),
        (config.replace(rollout_seed=1), 0, 0),
    ]
    seeds = [seed_of(c, rollout, draw, s) for c, rollout, draw in variants for s in samples]
    assert len(set(seeds)) == 60
    assert seeds == [seed_of(c, rollout, draw, s) for c, rollout, draw in variants for s in samples]


def test_sampling_parameters_come_from_the_flags() -> None:
    config = PPOConfig.of(
        rollout_max_response_len=7,
        rollout_temperature=0.8,
        rollout_top_p=0.9,
        rollout_top_k=4,
        rollout_stop=("a", "b"),
        rollout_stop_token_ids=(1,),
    )
    assert training_params(config) == SamplingParams(7, 0.8, 0.9, 4, ("a", "b"), (1,))


def written(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "prompt": "p",
        "index": 9,
        "tokens": [1, 2, 3, 4],
        "response_length": 2,
        "rollout_log_probs": [-0.5, -0.25],
        "status": Status.COMPLETED,
    }
    return Sample(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout_log_probs": None},
        {"loss_mask": [0, 1], "rollout_log_probs": [math.nan, -1.0]},  # what the model did not write
        {"status": Status.FAILED, "tokens": [1], "response_length": 0, "rollout_log_probs": None},
    ],
)
def test_good_samples_pass(changes: dict[str, Any]) -> None:
    check(written(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": Status.PENDING}, "status was not set"),
        ({"response_length": 0, "rollout_log_probs": []}, "response_length is 0 of 4 tokens"),
        ({"tokens": [3, 4]}, "response_length is 2 of 2 tokens"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries for 2 response tokens"),
        ({"rollout_log_probs": [-1.0]}, "rollout_log_probs has 1 entries for 2 response tokens"),
        ({"rollout_log_probs": [-1.0, math.nan]}, r"rollout_log_probs\[1\] is nan"),
        ({"rollout_log_probs": [-math.inf, -1.0]}, r"rollout_log_probs\[0\] is -inf"),
    ],
)
def test_a_fault_names_sample_and_slot(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=f"sample 9 after generation: {message}"):
        check(written(**changes))
