"""Responses written in pieces: what is written, what waits, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_lightning import PPOConfig
from ppo_lightning.callbacks.rollout import share_of_waiting
from ppo_lightning.engines.base import SamplingParams
from ppo_lightning.engines.hf import HFEngine
from ppo_lightning.engines.pieces import write_piece
from ppo_lightning.loop import DynamicSamplingError, PartialRollouts, rewards_differ
from ppo_lightning.samples import Sample, Status
from tests.distributed.ranks import run_ranks
from tests.engine_contract import TEXTS, make_samples
from tests.fitting import fit_rank, prepare
from tests.tinymodel import make_tiny_model

GREEDY = SamplingParams(max_new_tokens=23, temperature=0.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HFEngine:
    directory = tmp_path_factory.mktemp("pieces") / "model"
    make_tiny_model(directory)
    return HFEngine(str(directory))


def write(engine: HFEngine, samples: list[Sample], piece: int, mask_older: bool = False) -> None:
    def text(ids: Any) -> str:
        return str(engine.tokenizer.decode(list(ids), skip_special_tokens=True))

    write_piece(
        engine, samples, GREEDY, list(range(len(samples))), piece=piece, mask_older=mask_older, text=text
    )


@pytest.mark.parametrize("piece", [1, 5, 23, 100])
def test_greedy_pieces_are_the_whole_response(engine: HFEngine, piece: int) -> None:
    """Stop tokens in the middle, characters of several bytes, a last piece that is shorter."""
    whole, pieces = make_samples(TEXTS), make_samples(TEXTS)
    engine.generate(whole, GREEDY, list(range(len(whole))))
    for _ in range(-(-23 // piece)):
        write(engine, pieces, piece)
    for expected, sample in zip(whole, pieces):
        assert sample.tokens == expected.tokens
        assert sample.response == expected.response
        assert (sample.status, sample.response_length) == (expected.status, expected.response_length)
        torch.testing.assert_close(
            torch.tensor(sample.rollout_log_probs),
            torch.tensor(expected.rollout_log_probs),
            atol=1e-5,
            rtol=0,
        )


def test_a_piece_leaves_what_goes_on_pending(engine: HFEngine) -> None:
    samples = make_samples(TEXTS)
    write(engine, samples, 5)
    assert Status.PENDING in {s.status for s in samples}
    assert all(s.response_length == 5 for s in samples if s.status is Status.PENDING)


def test_tokens_of_older_weights_are_masked_if_asked(engine: HFEngine) -> None:
    for mask_older, expected in ((True, [0] * 5 + [1] * 10), (False, None)):
        samples = make_samples(["Compute 3+5-2"])
        write(engine, samples, 5, mask_older)
        engine.version = 1
        write(engine, samples, 5, mask_older)
        write(engine, samples, 5, mask_older)
        engine.version = 0
        assert samples[0].weight_versions == [0, 1]
        assert samples[0].loss_mask == expected


# ---- which groups wait ------------------------------------------------------------------------------------


def group(name: str, done: bool, reward: float = 0.0) -> list[Sample]:
    """Two samples, the second of which may be unfinished."""
    last = Status.COMPLETED if done else Status.PENDING
    made = [Sample(prompt=name, status=Status.COMPLETED), Sample(prompt=name, status=last)]
    for sample, value in zip(made, (0.0, reward)):
        sample.reward = value if done else None
        sample.group_index = ord(name)
    return made


def names(samples: list[Sample]) -> str:
    return "".join(str(s.prompt) for s in samples[::2])


def pool(**changes: Any) -> PartialRollouts:
    options = {"rollout_batch_size": 2, "over_sampling_batch_size": 4, "partial_rollout": True} | changes
    made = PartialRollouts.from_config(PPOConfig.of(**options))
    assert isinstance(made, PartialRollouts)
    return made


def never(count: int) -> list[Sample]:
    raise AssertionError(f"drew {count} more")


def test_the_batch_is_trained_on_and_the_others_wait() -> None:
    groups = pool()
    assert groups.first() == 4
    drawn = group("a", True) + group("b", False) + group("c", True) + group("d", True)
    assert names(groups.whole(drawn)) == "acd"
    assert names(groups.fill(drawn, never)) == "ac"
    assert [names(g) for g in groups.waiting] == ["b"]
    assert groups.first() == 2  # beside one that waits and one carried


def test_waiting_groups_go_on_without_new_prompts_until_the_batch_is_whole() -> None:
    groups, asked = pool(), []

    def draw(count: int) -> list[Sample]:
        asked.append(count)
        return group("b", len(asked) == 2) + group("c", False)

    assert names(groups.fill(group("a", True) + group("b", False) + group("c", False), draw)) == "ab"
    assert asked == [0, 0]
    assert [names(g) for g in groups.waiting] == ["c"]


def test_the_filter_drops_whole_groups_and_new_prompts_take_their_place() -> None:
    groups = pool(dynamic_sampling_filter_path="ppo_lightning.loop:rewards_differ")
    assert groups.keep is rewards_differ
    draws = iter([group("d", True, 1.0) + group("e", True, 1.0) + group("f", False)])
    asked: list[int] = []

    def draw(count: int) -> list[Sample]:
        asked.append(count)
        return next(draws)

    first = group("a", True, 1.0) + group("b", True) + group("c", True)
    assert names(groups.fill(first, draw)) == "ad"
    assert asked == [3]
    assert names([s for g in groups.carried for s in g]) == "e"
    assert groups.metrics() == {
        "rollout/groups_kept": 3 / 5,
        "rollout/groups_waiting": 1.0,
        "rollout/groups_carried": 0.0,
    }


def test_a_filter_that_passes_nothing_ends_the_run() -> None:
    groups = pool(dynamic_sampling_filter_path="ppo_lightning.loop:rewards_differ", max_num_gen_batches=2)
    with pytest.raises(DynamicSamplingError, match=r"0 of 8 groups .* in 2 draws"):
        groups.fill(
            [s for name in "abcd" for s in group(name, True)],
            lambda count: [s for name in "efgh"[:count] for s in group(name, True)],
        )


def test_what_waits_survives_a_checkpoint() -> None:
    groups = pool()
    groups.fill(group("a", True) + group("b", False) + group("c", True) + group("d", True), never)
    again = pool()
    again.load_state_dict(groups.state_dict())
    assert again.waiting == groups.waiting
    assert again.carried == groups.carried


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_waiting_groups_are_shared_over_the_ranks_and_numbered_behind_the_new_ones(world: int) -> None:
    waiting = [group(name, False) for name in "abcd"]
    shares = [share_of_waiting(waiting, 3, rank, world) for rank in range(world)]
    together = [s for share in shares for s in share]
    assert names(together) == "abcd"
    assert [s.index for s in together] == list(range(6, 14))
    assert [s.group_index for s in together] == [3, 3, 4, 4, 5, 5, 6, 6]


# ---- whole runs -------------------------------------------------------------------------------------------


def run(folder: Path, world: int, resume: bool = False, **options: Any) -> list[dict[str, Any]]:
    base = prepare(folder) | {
        "rollout_max_response_len": 12,
        "rollout_stop_token_ids": tuple(range(32)),  # about one token in eight ends a response
        "partial_rollout": True,
        "partial_rollout_tokens": 4,
        "over_sampling_batch_size": 7,
        "num_rollout": 4,
        "save_interval": 2,
        "n_samples_per_prompt": 1,
        "global_batch_size": 4,
    }
    return run_ranks(fit_rank, world, base | options, (), resume, group=world > 1, timeout=240)


def test_a_run_keeps_and_goes_on_with_responses(tmp_path: Path) -> None:
    """Other ranks, the same rollouts; a run that stops in between goes on with the responses that waited."""
    (whole,) = run(tmp_path / "one", 1)
    assert any(row["rollout/groups_waiting"] > 0 for row in whole["rows"])
    run(tmp_path / "stopped", 1, num_rollout=2)
    (resumed,) = run(tmp_path / "stopped", 1, resume=True)
    assert resumed["rollouts"] == whole["rollouts"][2:]
    two = run(tmp_path / "two", 2)
    assert [r["rollouts"][0] for r in two] == [whole["rollouts"][0]] * 2


def test_an_engine_that_sleeps_while_training_is_awake_for_every_draw(tmp_path: Path) -> None:
    """Waiting responses are gone on with until the batch is whole: several draws, one sleep."""
    (awake,) = run(tmp_path / "awake", 1, num_rollout=2)
    (slept,) = run(tmp_path / "slept", 1, num_rollout=2, offload_rollout=True)
    assert slept["rollouts"] == awake["rollouts"]
    assert slept["weights"] == awake["weights"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"over_sampling_batch_size": 2}, "give --over-sampling-batch-size above --rollout-batch-size 4"),
    ({"rollout_stop": ("x",)}, "may lie across the border of two pieces"),
    ({"custom_generate_function_path": "a:b"}, "your function writes whole responses"),
    ({"partial_rollout": False}, "--partial-rollout-tokens has no effect without --partial-rollout"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_options_that_do_not_go_together(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = prepare(tmp_path) | {
        "partial_rollout": True,
        "partial_rollout_tokens": 4,
        "over_sampling_batch_size": 7,
    }
    PPOConfig.of(**options).resolve()
    with pytest.raises(ValueError, match=message):
        PPOConfig.of(**options | changes).resolve()


def test_a_piece_is_a_quarter_unless_given(tmp_path: Path) -> None:
    options = prepare(tmp_path) | {"partial_rollout": True, "over_sampling_batch_size": 7}
    config, _ = PPOConfig.of(**options).resolve()
    assert config.rollout.partial_rollout_tokens == 3  # of 10
