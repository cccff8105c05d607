"""Where a command begins, as its log tells it: --load, --ckpt-step, --finetune, --critic-load, --save-hf."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from tests import forked, torturing
from tests.torturing import Layout, Material, Run

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    forked.warm()
    return Material.make(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def stopped(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was killed when its second rollout was saved."""
    run = Run(tmp_path_factory.mktemp("old") / "run", material, Layout(1), ("--save-hf",))
    run.start(prepare=torturing.at("tracker", 4, 0, torturing.die, after=True))
    assert run.whole() == [1, 2]
    return run


@pytest.fixture(scope="module")
def whole(material: Material, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of the same run, undisturbed."""
    run = Run(tmp_path_factory.mktemp("whole") / "run", material, Layout(1))
    assert run.start().code == 0
    return run.end_state()


@pytest.fixture
def start(material: Material, tmp_path: Path) -> Start:
    def begin(*flags: str, saves: Run | None = None) -> Run:
        """A new run, with copies of another's checkpoints where `saves` is given."""
        run = Run(tmp_path / "run", material, Layout(1))
        if saves is not None:
            for old, new in zip(saves.roots, run.roots):
                shutil.copytree(old, new)
        outcome = run.start(*flags)
        assert outcome.code == 0, outcome.output
        return run

    return begin


def sources(run: Run) -> list[str]:
    """What the log says of the models' origin, without the clock."""
    lines = [line.split(" INFO ")[-1] for line in run.log().splitlines()]
    return [line for line in lines if line.startswith(("actor: ", "critic: "))]


def test_without_checkpoints_both_begin_with_the_policys_weights(start: Start, material: Material) -> None:
    fresh = f"weights of {material.model}"
    assert sources(start()) == [f"actor: {fresh}", f"critic: {fresh}, fresh value head"]


def test_the_last_row_of_the_metrics_is_not_lost(
    material: Material, tmp_path: Path, whole: dict[str, Any]
) -> None:
    """Killed after the last save and before the loggers; nothing is left to train."""
    run = Run(tmp_path / "run", material, Layout(1))
    run.start(prepare=torturing.at("tracker", 2 * torturing.ROLLOUTS, 0, torturing.die, after=True))
    assert torturing.differing(whole, run.end_state()) == ["metrics"]
    assert run.start().begun == torturing.ROLLOUTS
    assert torturing.differing(whole, run.end_state()) == []


def test_a_run_goes_on_from_another_ones_directory_into_its_own(
    start: Start, stopped: Run, whole: dict[str, Any]
) -> None:
    run = start("--load", str(stopped.save))
    at = "iter_0000002"
    assert sources(run) == [
        f"{role}: goes on from {root / at}" for role, root in zip(("actor", "critic"), stopped.roots)
    ]
    assert (stopped.whole(), run.whole()) == ([1, 2], [3, 4])
    assert differing_but_history(whole, run) == []


def test_a_step_can_be_chosen(start: Start, stopped: Run, whole: dict[str, Any]) -> None:
    run = start("--ckpt-step", "1", saves=stopped)
    assert run.outcomes[-1].begun == 1
    assert differing_but_history(whole, run) == []


def differing_but_history(whole: dict[str, Any], run: Run) -> list[str]:
    """Rollouts that the older run has logged are not in the newer one's files."""
    return [
        name for name in torturing.differing(whole, run.end_state()) if name not in ("metrics", "samples")
    ]


def test_finetune_takes_both_models_and_begins_at_zero(start: Start, stopped: Run) -> None:
    run = start("--load", str(stopped.save), "--finetune")
    actor, critic = (root / "iter_0000002" for root in stopped.roots)
    assert sources(run) == [f"actor: weights of {actor}", f"critic: weights of {critic}"]
    assert run.whole() == [1, 2, 3, 4]


def test_a_critic_can_be_given(start: Start, stopped: Run, material: Material) -> None:
    run = start("--critic-load", str(stopped.roots[1]))
    critic = stopped.roots[1] / "iter_0000002"
    assert sources(run) == [f"actor: weights of {material.model}", f"critic: weights of {critic}"]


def test_the_hugging_face_directory_in_a_checkpoint_is_its_actor(stopped: Run, material: Material) -> None:
    """Read by torch alone."""
    directory = stopped.roots[0] / "iter_0000002"
    model = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32).state_dict()
    first = AutoModelForCausalLM.from_pretrained(material.model, dtype=torch.float32).state_dict()
    for ours, theirs in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("decoder.final_layernorm.weight", "model.norm.weight"),
    ):
        held = {ours: torch.empty_like(model[theirs])}
        dcp.load(held, checkpoint_id=directory, no_dist=True)
        assert torch.equal(held[ours], model[theirs])
        assert not torch.equal(held[ours], first[theirs])
