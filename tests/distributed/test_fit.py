"""The loop as users run it: `trainer.fit` of real models, on one rank and on several."""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from ppo_lightning.callbacks import PPOCallback, RewardCallback
from ppo_lightning.config import PPOConfig
from ppo_lightning.run import evaluate
from tests.distributed.ranks import RankError, run_ranks
from tests.fitting import DigitShare, fit_rank, prepare


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return prepare(tmp_path_factory.mktemp("fit"))


def fit(world: int, options: dict[str, Any], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return run_ranks(fit_rank, world, options, *args, group=False, timeout=240, **kwargs)


class Hooks(PPOCallback):
    """Writes down the order in which hooks are called."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, name: str) -> None:
        with self.path.open("a") as file:
            file.write(name + "\n")

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name in PPO_HOOKS:
            return lambda *args: self.note(name)
        return super().__getattribute__(name)


PPO_HOOKS = {
    "on_rollout_start", "on_rollout_end", "on_reward", "on_experience_end", "on_advantages_end",
    "on_critic_update_start", "on_critic_update_end", "on_actor_update_start", "on_actor_update_end",
    "on_weights_updated",
}  # fmt: skip


def test_hooks_come_in_the_order_of_the_iteration(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "hooks.txt"
    changed = options | {"num_rollout": 2, "num_critic_only_steps": 1, "output_dir": str(tmp_path / "out")}
    (seen,) = fit(1, changed, [Hooks(path)])
    before = ["on_rollout_start", "on_rollout_end", "on_reward", "on_experience_end", "on_advantages_end"]
    critic = ["on_critic_update_start", "on_critic_update_end"]
    actor = ["on_actor_update_start", "on_actor_update_end", "on_weights_updated"]
    assert path.read_text().split() == [*before, *critic, *before, *critic, *actor]
    assert "train/loss" not in seen["rows"][0]
    assert "train/loss" in seen["rows"][1]


def test_the_first_update_is_on_policy(options: dict[str, Any], tmp_path: Path) -> None:
    """One optimizer step a rollout: the ratio is 1, and the reference is the actor at first."""
    changed = options | {"global_batch_size": 8, "use_kl_loss": True, "output_dir": str(tmp_path / "out")}
    rows = fit(1, changed)[0]["rows"]
    for row in rows:
        assert abs(row["train/ppo_kl"]) < 1e-6
        assert row["train/pg_clipfrac"] == 0.0
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert abs(rows[0]["train/kl_loss"]) < 1e-6 < abs(rows[-1]["train/kl_loss"])
    assert all(math.isfinite(v) for row in rows for v in row.values())


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp1_pp2_cp2": (4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
    "uneven_pp2": (2, {"pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_one_rank(options: dict[str, Any], tmp_path: Path, layout: str) -> None:
    """The same rollouts and the same numbers, on every rank, whatever the layout."""
    world, sizes = LAYOUTS[layout]
    if layout == "uneven_pp2":  # the actor's stages have 3 and 1 layers, the critic's 2 each
        options = options | prepare(tmp_path, num_hidden_layers=4, vocab_size=1500)
    (one,) = fit(1, options | {"output_dir": str(tmp_path / "one")})
    ranks = fit(world, options | sizes | {"output_dir": str(tmp_path / layout)})
    for seen in ranks:
        assert seen["rows"] == ranks[0]["rows"]
        assert seen["rollouts"] == ranks[0]["rollouts"]
    assert ranks[0]["rollouts"][0] == one["rollouts"][0]
    for name, value in one["rows"][0].items():
        assert ranks[0]["rows"][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_resumed_run_equals_the_uninterrupted_one(options: dict[str, Any], tmp_path: Path) -> None:
    whole = options | {"num_rollout": 4, "save_interval": 1, "lr_warmup_iters": 3, "lr_decay_style": "cosine"}
    (through,) = fit(1, whole | {"lr_decay_iters": 8, "output_dir": str(tmp_path / "through")})
    parts = whole | {"lr_decay_iters": 8, "output_dir": str(tmp_path / "parts")}
    fit(1, parts | {"num_rollout": 2})
    (resumed,) = fit(1, parts, (), True)
    assert resumed["step"] == 4
    assert resumed["rollouts"] == through["rollouts"][2:]
    assert resumed["rows"] == through["rows"][2:]
    assert resumed["weights"] == through["weights"]


class Unfinished(RewardCallback):
    def score(self, sample: Any) -> float:
        return math.nan


class Silent(PPOCallback):
    """Takes the default rewards away again: nobody scores."""

    def on_reward(self, trainer: Any, module: Any, samples: list[Any]) -> None:
        for sample in samples:
            sample.reward = None


@pytest.mark.parametrize(("callback", "message"), [(Unfinished(), "nan"), (Silent(), "RewardCallback")])
def test_a_missing_or_broken_reward_names_itself(
    options: dict[str, Any], tmp_path: Path, callback: PPOCallback, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        fit(1, options | {"output_dir": str(tmp_path / "out")}, [callback])


def test_the_full_size_recipe_runs_with_a_toy_model(tmp_path: Path) -> None:
    """qwen3_4b_ppo at its own layout, TP1 PP2 CP2 on four ranks, with a random model of four layers. Its
    reward gives 0 to every response (no `</think>`), so a second one is added that tells them apart."""
    toy = prepare(tmp_path, num_hidden_layers=4)
    prompts = Path(toy["prompt_data"])
    prompts.write_text(prompts.read_text().replace('"input"', '"label": "1", "prompt"'))
    changed = {
        "recipe": "qwen3_4b_ppo",
        "hf_checkpoint": toy["hf_checkpoint"],
        "ref_load": None,
        "prompt_data": str(prompts),
        "num_rollout": 3,
        "rollout_max_response_len": 12,
        "max_tokens_per_gpu": 512,
        "rollout_engine": "hf",
        "sglang_args": (),
        "colocate": False,
        "bf16": False,
        "output_dir": str(tmp_path / "out"),
    }
    ranks = fit(4, changed)
    for seen in ranks:
        assert seen["rows"] == ranks[0]["rows"]
        assert seen["step"] == 3
    assert [("train/loss" in row) for row in ranks[0]["rows"]] == [False, True, True]  # one critic-only step
    assert all(math.isfinite(v) for row in ranks[0]["rows"] for v in row.values())
    assert (tmp_path / "out" / "checkpoints" / "iter_0000003").is_dir()
    assert (tmp_path / "out" / "checkpoints_critic" / "iter_0000003").is_dir()


def evaluate_rank(rank: int, world: int, options: dict[str, Any]) -> dict[str, float]:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    return evaluate(PPOConfig.of(**{"actor_num_gpus_per_node": world, **options}), [DigitShare()])


def test_evaluate_alone_gives_what_the_end_of_training_gave(options: dict[str, Any], tmp_path: Path) -> None:
    held_out = {
        "eval_prompt_data": ("heldout", options["prompt_data"]),
        "eval_temperature": 0.0,
        "output_dir": str(tmp_path / "out"),
    }
    fit(1, options | held_out | {"num_rollout": 1})
    alone = run_ranks(evaluate_rank, 2, options | held_out, group=False, timeout=240)
    assert alone[0] == alone[1] == json.loads((tmp_path / "out" / "evaluation.json").read_text())
    with (tmp_path / "out" / "metrics.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["step"] == "1")  # after the one rollout
    last = {k: float(v) for k, v in row.items() if k.startswith("eval/")}
    assert alone[0] == pytest.approx(last, rel=1e-5)
    assert set(last) >= {"eval/heldout/mean", "eval/heldout/pass@1"}
