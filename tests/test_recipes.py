"""Recipes: their task, and their configurations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_lightning.recipes import _arithmetic, qwen3_4b_ppo, smollm2_135m_ppo, tiny_ppo

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("tiny_ppo", "smollm2_135m_ppo", "qwen3_4b_ppo")


# ---- the task ------------------------------------------------------------------------------------


def test_answers_agree_with_python() -> None:
    for problem in _arithmetic.problems(2) + _arithmetic.problems(3)[::7]:
        assert problem.answer == eval(problem.expression)
        *steps, box = problem.stepwise.split(";")
        for step in steps:
            left, _, right = step.partition("=")
            assert eval(left) == int(right)
        assert box == problem.direct == f"\\boxed{{{eval(problem.expression)}}}"


def test_all_problems_are_there_once() -> None:
    expressions = {p.expression for p in _arithmetic.problems(3)}
    assert len(expressions) == len(_arithmetic.problems(3)) == 10**3 * 2**2


def test_held_out_problems_are_in_no_training() -> None:
    training, held_out = _arithmetic.split(tiny_ppo.HELD_OUT)
    assert len({p.expression for p in held_out}) == len(held_out) == 192
    assert {len(p.terms) for p in held_out} == {3}
    assert not {p.expression for p in training} & {p.expression for p in held_out}
    assert len(training) + len(held_out) == 10**3 * 2**2 + 10**2 * 2
    assert _arithmetic.split(tiny_ppo.HELD_OUT) == (training, held_out)

    training, held_out = smollm2_135m_ppo.split()
    assert not {p.expression for p in training} & {p.expression for p in held_out}
    assert len(held_out) == 32
    assert len(training) + len(held_out) == 155


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"\boxed{6}", "6", 1.0),
        (r"3+5=8;8-2=6;\boxed{6}", 6, 1.0),
        (r"\boxed{-3}", "-3", 1.0),
        (r"\boxed{3}", "-3", 0.0),
        (r"\boxed{6};\boxed{7}", "6", 0.0),
        (r"\boxed{7};\boxed{6}", "6", 1.0),
        (r"\boxed{3+5-2}", "6", 0.0),  # equal, but no answer
        (r"\boxed{6", "6", 0.0),
        ("6", "6", 0.0),
        ("", "6", 0.0),
    ],
)
def test_reward_is_the_exact_number_in_the_last_box(response: str, label: object, expected: float) -> None:
    assert _arithmetic.exact_match(response, label) == expected


def test_warm_start_shows_every_first_result_and_no_held_out_problem() -> None:
    import random

    from ppo_lightning.recipes import _warm_start

    training, held_out = _arithmetic.split(tiny_ppo.HELD_OUT)
    settings = _warm_start.WarmStart(steps=60, last_part=0.5)
    batches = list(_warm_start._answers(training, settings, random.Random(0)))
    seen = [p for batch in batches for p, _ in batch]
    assert not {p.expression for p in seen} & {p.expression for p in held_out}
    counts = {v: sum(p.results[1] == v for p in seen) for v in range(-9, 19)}
    assert min(counts.values()) >= 10  # left to chance, -9 would come about 5 times in 1920

    def stepwise(part: list) -> float:
        answers = [answer for batch in part for _, answer in batch]
        return sum("=" in answer for answer in answers) / len(answers)

    assert stepwise(batches[:30]) > 0.8
    assert stepwise(batches[30:]) < 0.35


def test_orthogonal_brings_singular_values_near_one() -> None:
    import torch

    from ppo_lightning.recipes._warm_start import orthogonal

    torch.manual_seed(0)
    for shape in ((3, 16, 48), (2, 48, 16), (1, 16, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.max() < 1.3
        assert values.median() > 0.6


# ---- configurations ------------------------------------------------------------------------------


def test_qwen3_4b_is_the_full_size_recipe() -> None:
    wanted = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 4,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "num_rollout": 300,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 8192,
        "rollout_temperature": 0.8,
        "global_batch_size": 32,
        "balance_data": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 16384,
        "advantage_estimator": "ppo",
        "critic_lr": 1e-5,
        "num_critic_only_steps": 1,
        "normalize_advantages": True,
        "use_kl_loss": True,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k1",
        "kl_coef": 0.0,
        "entropy_coef": 0.0,
        "eps_clip": 0.2,
        "optimizer": "adam",
        "lr": 1e-6,
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "rollout_engine": "sglang",
        "rollout_num_gpus_per_engine": 1,
        "sglang_args": ("--sglang-mem-fraction-static", "0.8", "--sglang-max-running-requests", "512"),
        "colocate": True,
        "rm_type": "deepscaler",
        "input_key": "prompt",
        "label_key": "label",
        "apply_chat_template": True,
        "rollout_shuffle": True,
        "save_interval": 20,
    }
    flat = qwen3_4b_ppo.config().flat()
    assert {name: flat[name] for name in wanted} == wanted

    config, _ = qwen3_4b_ppo.config().resolve(cuda=True, device_count=4, files=False)
    assert (config.data_parallel_size, config.rollout.num_steps_per_rollout) == (1, 2)
    assert config.cluster.rollout_num_gpus == 4
    assert config.cluster.offload_train


def test_the_shipped_architecture_is_qwen3_4b() -> None:
    import torch
    from transformers import Qwen3Config, Qwen3Model

    with torch.device("meta"):
        model = Qwen3Model(Qwen3Config(**qwen3_4b_ppo.model_config()))
    assert sum(p.numel() for p in model.parameters()) == 4_022_468_096  # of the published checkpoint, tied
    assert model.config.rope_parameters["rope_theta"] == 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_configurations_resolve_and_name_themselves(name: str) -> None:
    module = {m.__name__.rpartition(".")[2]: m for m in (tiny_ppo, smollm2_135m_ppo, qwen3_4b_ppo)}[name]
    config, _ = module.config().resolve(files=False)
    assert config.recipe == name
    assert config.ppo


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_file_plans_before_anything_is_prepared(name: str, tmp_path: Path) -> None:
    """Run as a script in an empty directory: absolute imports, nothing heavy, the shipped architecture."""
    code = f"""
import runpy, sys
sys.argv = [{str(ROOT / "recipes" / (name + ".py"))!r}, "--dry-run"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("exit", end.code)
print("heavy", sorted({{"torch", "transformers", "lightning", "megatron", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "exit 0" in done.stdout, done.stdout + done.stderr
    assert "heavy []" in done.stdout
    assert f"Plan of {name}" in done.stdout
    assert "GiB GiB" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_its_files_says_prepare(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "recipes" / "tiny_ppo.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "ppo-lightning prepare --recipe tiny_ppo" in done.stderr
