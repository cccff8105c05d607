"""Which checkpoint a run starts from: the resumed pair, the critic's source, first weights. Reads names and
manifests only."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_only

from ppo_lightning.megatron.checkpoint_files import (
    MANIFEST,
    TRACKER,
    TRAINER_FILE,
    CheckpointError,
    Manifest,
    critic_root,
    is_distributed_checkpoint,
    iteration_dir,
    iteration_of,
    iterations,
    latest_iteration,
    listed,
    newest_whole,
    problems,
    read_manifest,
)

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig

log = logging.getLogger(__name__)


# what is resumed --------------------------------------------------------------------------------------


def resume_path(
    load: str | Path | None, ckpt_step: int | None = None, *, auto_fallback: bool = False
) -> Path | None:
    """The checkpoint directory that a run with `--load` goes on from; None for a fresh start.

    `load` is a root with a tracker or one iteration's directory. Weights without a trainer's state, as
    Megatron-LM and converters leave them, are no run to go on from. Raises CheckpointError, naming file and
    cure, for a checkpoint that is not whole; with `auto_fallback` the newest whole one before it is taken
    instead.
    """
    if load is None:
        return None
    root = Path(load)
    if is_distributed_checkpoint(root) or iteration_of(root) is not None:
        root, ckpt_step = root.parent, iteration_of(root) if ckpt_step is None else ckpt_step
    iteration = latest_iteration(root) if ckpt_step is None else ckpt_step
    if iteration is None:
        return None
    path = iteration_dir(root, iteration)
    found = problems(path)
    if not found:
        return path if (path / TRAINER_FILE).is_file() else None
    return fall_back(path, found[0], auto_fallback, named_by_tracker=ckpt_step is None)


def run_checkpoint(config: PPOConfig) -> Path | None:
    """The checkpoint that the run of a resolved configuration goes on from; None for a fresh start.

    Its own newest in --save counts before another run's in --load: the command that started from there goes
    on from where it was stopped. --ckpt-step chooses in --load.
    """
    model = config.model
    fallback = model.auto_fallback
    if model.save is not None and model.ckpt_step is None and not _same_place(model.save, model.load):
        own = resume_path(model.save, auto_fallback=fallback)
        if own is not None:
            return own
    return None if model.finetune else resume_path(model.load, model.ckpt_step, auto_fallback=fallback)


def fall_back(path: Path, problem: str, allowed: bool, *, named_by_tracker: bool = True) -> Path:
    """The newest whole checkpoint before the damaged `path`, where that is allowed; else CheckpointError."""
    iteration = iteration_of(path)
    older = None if iteration is None else newest_whole(path.parent, iteration)
    if allowed and older is not None:
        rank_zero_only(log.warning)(f"{problem}: going on from iteration {older} instead of {iteration}")
        return iteration_dir(path.parent, older)
    if named_by_tracker and not path.exists():
        problem = f"{problem}, but {path.parent / TRACKER} names it"
    if older is None:
        cure = f"no whole checkpoint before it is left in {path.parent}; name another place with --load"
    else:
        cure = f"go on from the one before it with --ckpt-step {older} (or --auto-fallback)"
    raise CheckpointError(f"{problem}; {cure} (there are: {listed(iterations(path.parent))})")


def critic_of(actor: Path, candidates: list[Path]) -> Path:
    """The critic that was saved together with the actor in `actor`, out of the roots in `candidates`.

    Raises CheckpointError where none of them has it, or only one of another iteration or another save.
    """
    mine, iteration = read_manifest(actor), iteration_of(actor)
    tried = []
    for root in candidates:
        path = root if iteration is None else iteration_dir(root, iteration)
        found = problems(path)
        theirs = None if found else read_manifest(path)
        if not found and mine is not None and theirs is None:
            found = [f"{path / MANIFEST} is missing"]
        if not found and not _same_save(mine, theirs):
            found = [f"{path} was not saved together with {actor}"]
        if not found:
            return path
        tried.append(f"{found[0]} (there are iterations: {listed(iterations(root))})")
    raise CheckpointError(
        f"{actor} has no critic beside it: {'; '.join(tried)}; choose an iteration that both have with"
        " --ckpt-step, or name the critic's place with --critic-load"
    )


def _same_save(a: Manifest | None, b: Manifest | None) -> bool:
    return a is None or b is None or (a.iteration, a.save_id) == (b.iteration, b.save_id)


def _same_place(a: str | Path | None, b: str | Path | None) -> bool:
    return a is not None and b is not None and Path(a).resolve() == Path(b).resolve()


def critic_candidates(actor: Path, config: PPOConfig | None) -> list[Path]:
    """Roots where the critic of a resumed actor may lie, in the order in which they count."""
    roots = []
    if config is not None:
        if config.critic.critic_load is not None:
            roots.append(Path(config.critic.critic_load))
        if config.critic.critic_save is not None and _same_place(config.model.save, actor.parent):
            roots.append(Path(config.critic.critic_save))
    roots.append(critic_root(actor.parent))
    return list(dict.fromkeys(roots))


# first weights ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CriticSource:
    """Where the critic comes from: "resumed" with the run, another "critic" checkpoint, or fresh from a
    "policy"."""

    kind: Literal["resumed", "critic", "policy"]
    path: Path

    def __str__(self) -> str:
        return {
            "resumed": f"critic: goes on from {self.path}",
            "critic": f"critic: weights from {self.path}, fresh optimizer",
            "policy": f"critic: fresh value head on the weights of {self.path}",
        }[self.kind]


def critic_source(config: PPOConfig) -> CriticSource:
    """Where the critic of a resolved configuration comes from. First that applies:

    the checkpoint that is resumed, with the critic of the same save (from --critic-load, --critic-save or
    <load>_critic); a checkpoint in --critic-load; <load>_critic with the iteration of the weights in --load;
    the policy's weights with a new value head. The strategy logs in one line what was taken.
    """
    model, given = config.model, config.critic.critic_load
    resumed = run_checkpoint(config)
    while resumed is not None:
        try:
            return CriticSource("resumed", critic_of(resumed, critic_candidates(resumed, config)))
        except CheckpointError as error:
            resumed = fall_back(resumed, str(error), model.auto_fallback, named_by_tracker=False)
    named = weights_in(given) if given is not None else None
    if named is not None:
        return CriticSource("critic", named)
    loaded = weights_in(model.load, model.ckpt_step) if model.load is not None else None
    if loaded is not None and iteration_of(loaded) is not None:
        beside = critic_root(loaded.parent) / loaded.name
        if is_distributed_checkpoint(beside):
            return CriticSource("critic", beside)
    return CriticSource("policy", policy_source(config, "actor"))


def policy_source(config: PPOConfig, role: str) -> Path:
    """First weights of the "actor" (--load, else --ref-load, else --hf-checkpoint) or the "reference" (the
    same without --load)."""
    model = config.model
    resumed = run_checkpoint(config) if role == "actor" else None
    if resumed is not None:
        return resumed
    loaded = weights_in(model.load, model.ckpt_step) if role == "actor" and model.load is not None else None
    if loaded is not None:
        return loaded
    source = model.ref_load or model.hf_checkpoint
    assert source is not None, "checked when the configuration was resolved"
    return weights_in(source) or Path(source)


def weights_in(path: str | Path, ckpt_step: int | None = None) -> Path | None:
    """The one directory with weights that `path` stands for: itself, or the iteration (or `release`) that its
    tracker names; None if it holds none."""
    root = Path(path)
    if (root / "config.json").is_file() or is_distributed_checkpoint(root):
        return root
    iteration = latest_iteration(root) if ckpt_step is None else ckpt_step
    inner = root / "release" if iteration is None else iteration_dir(root, iteration)
    return inner if is_distributed_checkpoint(inner) else None


# for people -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Description:
    """A checkpoint directory in words."""

    path: Path
    iteration: int | None
    manifest: Manifest | None  # None: made by other tools
    size: int  # bytes
    problems: list[str]

    def __str__(self) -> str:
        if self.problems:
            return f"{self.path}: " + "; ".join(self.problems)
        m = self.manifest
        kind = "weights" if m is None or m.optimizer is None else "weights and optimizer"
        role = "" if m is None else f" of the {m.role}"
        return f"{self.path}: {kind}{role}, iteration {self.iteration}, {self.size / 1e9:.2f} GB"


def describe(path: str | Path) -> Description:
    """What lies in a checkpoint directory and whether it is whole (sizes, not contents)."""
    path = Path(path)
    found = problems(path)
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return Description(path, iteration_of(path), None if found else read_manifest(path), size, found)
