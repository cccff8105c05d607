"""Which checkpoint a command goes on from, where its critic comes from, and which checkpoints stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_lightning.config import PPOConfig
from ppo_lightning.megatron import checkpoint_files as files
from ppo_lightning.megatron.checkpoint_files import CheckpointError
from ppo_lightning.megatron.checkpoint_publish import prune
from ppo_lightning.megatron.checkpoint_sources import (
    critic_source,
    describe,
    policy_source,
    resume_path,
    run_checkpoint,
    weights_in,
)


def put(root: Path, iteration: int, *, save_id: str = "", trainer: bool = True, tracker: bool = True) -> Path:
    """A directory that looks like a checkpoint; without `trainer` like one of Megatron-LM's tools."""
    path = files.iteration_dir(root, iteration)
    path.mkdir(parents=True)
    for name in ("metadata.json", ".metadata", "common.pt", *(["trainer.pt"] if trainer else [])):
        (path / name).write_text(name)
    if save_id:
        facts = {"iteration": iteration, "save_id": save_id, "role": "actor", "optimizer": "x", "layout": {}}
        files.write_manifest(path, {}, **facts)
    if tracker:
        files.write_tracker(root, iteration)
    return path


def put_pair(save: Path, iteration: int, save_id: str = "") -> tuple[Path, Path]:
    save_id = save_id or f"save {iteration}"
    return put(save, iteration, save_id=save_id), put(files.critic_root(save), iteration, save_id=save_id)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    return tmp_path / "hf"


def config(tmp_path: Path, hf: Path, **options: Any) -> PPOConfig:
    save = tmp_path / "save"
    given = {"save": str(save), "load": str(save), "critic_save": f"{save}_critic", "hf_checkpoint": str(hf)}
    return PPOConfig.of(**{**given, **{k: str(v) if isinstance(v, Path) else v for k, v in options.items()}})


# resuming ---------------------------------------------------------------------------------------------


def test_the_tracker_decides(tmp_path: Path) -> None:
    assert resume_path(tmp_path / "save") is None
    for iteration in (5, 10):
        put_pair(tmp_path / "save", iteration)
    assert resume_path(tmp_path / "save") == tmp_path / "save" / "iter_0000010"
    assert resume_path(tmp_path / "save", 5) == tmp_path / "save" / "iter_0000005"
    files.write_tracker(tmp_path / "save", 5)
    assert resume_path(tmp_path / "save") == tmp_path / "save" / "iter_0000005"
    (tmp_path / "save" / files.TRACKER).unlink()
    assert resume_path(tmp_path / "save") == tmp_path / "save" / "iter_0000010"
    assert resume_path(tmp_path / "save" / "iter_0000005") == tmp_path / "save" / "iter_0000005"


def test_a_spoiled_tracker_is_named(tmp_path: Path) -> None:
    put_pair(tmp_path / "save", 5)
    (tmp_path / "save" / files.TRACKER).write_bytes(b"\x00\x00")
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration\.txt holds .*there are: 5"):
        resume_path(tmp_path / "save")


def test_a_missing_directory_is_named_and_the_one_before_offered(tmp_path: Path) -> None:
    put_pair(tmp_path / "save", 5)
    files.write_tracker(tmp_path / "save", 10)
    with pytest.raises(CheckpointError, match=r"iter_0000010 is missing, but .*names it.*--ckpt-step 5 "):
        resume_path(tmp_path / "save")
    taken = resume_path(tmp_path / "save", auto_fallback=True)
    assert taken == tmp_path / "save" / "iter_0000005"


def test_a_checkpoint_cut_short_is_no_fallback(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        put_pair(tmp_path / "save", iteration)
    for iteration, name in ((3, "common.pt"), (2, "manifest.json")):
        (tmp_path / "save" / f"iter_{iteration:07d}" / name).unlink()
    with pytest.raises(CheckpointError, match=r"iter_0000003/common\.pt is missing.*--ckpt-step 1 "):
        resume_path(tmp_path / "save")


def test_weights_alone_are_no_run_to_go_on_from(tmp_path: Path, hf: Path) -> None:
    load = tmp_path / "other"
    put(load, 7, trainer=False)
    run = config(tmp_path, hf, load=load)
    assert resume_path(load) is None
    assert policy_source(run, "actor") == load / "iter_0000007"
    assert policy_source(run, "reference") == hf


def test_an_own_checkpoint_counts_before_another_runs(tmp_path: Path, hf: Path) -> None:
    put_pair(tmp_path / "old", 40)
    for finetune in (False, True):
        run = config(tmp_path, hf, load=tmp_path / "old", finetune=finetune)
        assert run_checkpoint(run) == (None if finetune else tmp_path / "old" / "iter_0000040")
        assert policy_source(run, "actor") == tmp_path / "old" / "iter_0000040"
    put_pair(tmp_path / "save", 3)
    for finetune in (False, True):
        run = config(tmp_path, hf, load=tmp_path / "old", finetune=finetune)
        assert run_checkpoint(run) == tmp_path / "save" / "iter_0000003"
    chosen = config(tmp_path, hf, load=tmp_path / "old", ckpt_step=40)
    assert run_checkpoint(chosen) == tmp_path / "old" / "iter_0000040"


def test_release_weights_are_found(tmp_path: Path) -> None:
    release = tmp_path / "released" / "release"
    release.mkdir(parents=True)
    (release / "metadata.json").write_text("{}")
    (tmp_path / "released" / files.TRACKER).write_text("release\n")
    assert weights_in(tmp_path / "released") == release
    assert resume_path(tmp_path / "released") is None


# the critic -------------------------------------------------------------------------------------------


def source(run: PPOConfig) -> tuple[str, Path]:
    found = critic_source(run)
    return found.kind, found.path


def test_a_fresh_critic_starts_from_the_policy(tmp_path: Path, hf: Path) -> None:
    assert source(config(tmp_path, hf)) == ("policy", hf)
    put(tmp_path / "ref", 0, trainer=False)
    assert source(config(tmp_path, hf, ref_load=tmp_path / "ref"))[1] == tmp_path / "ref" / "iter_0000000"
    put(tmp_path / "other", 7, trainer=False)
    run = config(tmp_path, hf, ref_load=tmp_path / "ref", load=tmp_path / "other")
    assert source(run) == ("policy", tmp_path / "other" / "iter_0000007")


def test_a_given_critic_counts_before_the_one_beside_the_weights(tmp_path: Path, hf: Path) -> None:
    put(tmp_path / "other", 7, trainer=False)
    put(tmp_path / "other_critic", 9, trainer=False)
    run = config(tmp_path, hf, load=tmp_path / "other")
    assert source(run)[0] == "policy"  # 9 is not the iteration of the weights
    put(tmp_path / "other_critic", 7, trainer=False)
    assert source(run) == ("critic", tmp_path / "other_critic" / "iter_0000007")
    put(tmp_path / "given", 3, trainer=False)
    run = config(tmp_path, hf, load=tmp_path / "other", critic_load=tmp_path / "given")
    assert source(run) == ("critic", tmp_path / "given" / "iter_0000003")


def test_an_empty_critic_load_is_not_taken(tmp_path: Path, hf: Path) -> None:
    run = config(tmp_path, hf, critic_load=tmp_path / "save_critic")
    assert source(run) == ("policy", hf)


def test_a_resumed_critic_is_the_one_of_the_same_save(tmp_path: Path, hf: Path) -> None:
    """A pretrained critic that happens to have the same iteration is not mistaken for it."""
    put(tmp_path / "pretrained", 5, save_id="another")
    run = config(tmp_path, hf, critic_load=tmp_path / "pretrained")
    assert source(run) == ("critic", tmp_path / "pretrained" / "iter_0000005")
    _, critic = put_pair(tmp_path / "save", 5)
    assert source(run) == ("resumed", critic)
    critic.rename(tmp_path / "save_critic" / "iter_0000004")
    with pytest.raises(CheckpointError, match=r"not saved together with .*; .*iter_0000005 is missing"):
        critic_source(run)


def test_a_critic_without_its_manifest_is_not_taken_for_another_tools(tmp_path: Path, hf: Path) -> None:
    """What cannot be checked, nor told to be of the same save, is no pair."""
    _, critic = put_pair(tmp_path / "save", 5)
    (critic / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"save_critic/iter_0000005/manifest\.json is missing"):
        critic_source(config(tmp_path, hf))


def test_a_pair_without_its_critic_is_passed_over_where_that_is_allowed(tmp_path: Path, hf: Path) -> None:
    put_pair(tmp_path / "save", 3)
    put(tmp_path / "save", 6, save_id="save 6")
    with pytest.raises(CheckpointError, match=r"has no critic beside it.*--ckpt-step 3 \(or --auto-fallback"):
        critic_source(config(tmp_path, hf))
    kind, path = source(config(tmp_path, hf, auto_fallback=True))
    assert (kind, path) == ("resumed", tmp_path / "save_critic" / "iter_0000003")


# retention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "protected", "left"),
    [(1, (), [50]), (2, (), [40, 50]), (2, (10, 30), [10, 30, 40, 50]), (9, (), [10, 20, 30, 40, 50])],
)
def test_the_newest_and_the_protected_stay(
    tmp_path: Path, keep: int, protected: tuple[int, ...], left: list[int]
) -> None:
    for iteration in range(10, 60, 10):
        put_pair(tmp_path / "save", iteration)
    roots = [tmp_path / "save_critic", tmp_path / "save"]
    prune(roots, 50, keep, protected)
    assert [files.iterations(root) for root in roots] == [left, left]
    assert not [p for root in roots for p in root.iterdir() if p.name.startswith(".")]


def test_nothing_goes_while_the_newest_is_not_whole(tmp_path: Path) -> None:
    for iteration in (1, 2):
        put_pair(tmp_path / "save", iteration)
    (tmp_path / "save_critic" / "iter_0000002" / "common.pt").write_text("cut")
    prune([tmp_path / "save_critic", tmp_path / "save"], 2, keep=1)
    assert files.iterations(tmp_path / "save") == [1, 2]


def test_later_iterations_survive_a_return_to_an_earlier_one(tmp_path: Path) -> None:
    for iteration in (10, 15, 20):
        put_pair(tmp_path / "save", iteration)
    prune([tmp_path / "save_critic", tmp_path / "save"], 15, keep=1)
    assert files.iterations(tmp_path / "save") == [15, 20]


def test_descriptions_tell_what_is_there(tmp_path: Path) -> None:
    actor, critic = put_pair(tmp_path / "save", 3)
    assert "weights and optimizer of the actor, iteration 3" in str(describe(actor))
    (critic / "common.pt").unlink()
    assert str(describe(critic)).endswith("common.pt is missing")
