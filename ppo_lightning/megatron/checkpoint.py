"""Saving and loading a run: Lightning's CheckpointIO over Megatron-Core's distributed checkpoints."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO

from ppo_lightning.megatron import checkpoint_files as files
from ppo_lightning.megatron import safe_pickle, torch_dist
from ppo_lightning.megatron.checkpoint_files import (
    TRAINER_FILE,
    CheckpointError,
    clean,
    critic_root,
    iteration_of,
    latest_iteration,
    staging_dir,
)
from ppo_lightning.megatron.checkpoint_sources import (
    CriticSource,
    critic_candidates,
    critic_of,
    critic_source,
    describe,
    fall_back,
    policy_source,
    resume_path,
)
from ppo_lightning.megatron.optimizer import kind_of
from ppo_lightning.megatron.torch_dist import everywhere

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig
    from ppo_lightning.megatron.roles import Role

__all__ = [
    "CheckpointError",
    "CriticSource",
    "MegatronCheckpointIO",
    "Retention",
    "clean",
    "critic_root",
    "critic_source",
    "describe",
    "iteration_of",
    "latest_iteration",
    "policy_source",
    "resume_path",
]
log = logging.getLogger(__name__)
SAVED_ROLES = ("critic", "actor")  # in the order of publication: whoever finds the actor finds its critic


@dataclass
class Shards:
    """What this rank contributes to a save."""

    roles: dict[str, Role]
    optimizer: bool
    rng: dict[str, Any]
    write_hf: Callable[[Path], None] | None = None  # collective; fills the given directory on rank 0


@dataclass
class Retention:
    """Which checkpoints stay: the newest `keep` (None: all) and the protected iterations."""

    keep: int | None = None
    protected: frozenset[int] = frozenset()


@dataclass
class _Save:
    """A save under way."""

    finals: dict[str, Path]
    writes: dict[str, torch_dist.Write]
    facts: dict[str, dict[str, Any]]
    retention: Retention
    thread: threading.Thread | None = None
    started: float = field(default_factory=time.monotonic)


class MegatronCheckpointIO(CheckpointIO):
    """Checkpoints are directories. Every method is collective unless it says otherwise."""

    def __init__(
        self,
        *,
        config: PPOConfig | None = None,
        critic_save: str | Path | None = None,
        async_save: bool = False,
        auto_fallback: bool = False,
    ) -> None:
        self.config = config  # only for where a critic may lie
        self.critic_save = None if critic_save is None else Path(critic_save)
        self.async_save, self.auto_fallback = async_save, auto_fallback
        self.retention = Retention()
        self._pending: _Save | None = None

    @classmethod
    def from_config(cls, config: PPOConfig) -> MegatronCheckpointIO:
        model = config.model
        return cls(
            config=config,
            critic_save=config.critic.critic_save,
            async_save=model.async_save,
            auto_fallback=model.auto_fallback,
        )

    # ---- saving --------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Shards | None = None
    ) -> None:
        """Write `checkpoint` (Lightning's dict) and the roles in `storage_options` to the directory `path`
        and, for the critic, to its own place. Asynchronous saves return when everything is copied; the next
        save or `finish` publishes them. Raises CheckpointError; the former checkpoint is then untouched."""
        if storage_options is None:
            raise ValueError("MegatronCheckpointIO is called by MegatronStrategy, which passes the shards")
        self.finish(wait=True)
        shards, final = storage_options, Path(path).absolute()
        roles = {name: shards.roles[name] for name in SAVED_ROLES if name in shards.roles}
        finals = {name: final if name == "actor" else self.critic_dir(final) for name in roles}
        everywhere(f"making room in {final.parent}", lambda: _make_staging(list(finals.values())))
        try:
            save = self._begin(checkpoint, shards, roles, finals)
        except CheckpointError:
            _drop_staging(list(finals.values()))
            raise
        self._pending = save
        if self.async_save:
            save.thread = threading.Thread(target=_write_all, args=[save], daemon=True)
            save.thread.start()
            return
        _write_all(save)
        self.finish(wait=True)

    def _begin(
        self, checkpoint: dict[str, Any], shards: Shards, roles: dict[str, Role], finals: dict[str, Path]
    ) -> _Save:
        """Plan, copy what must not change, and write the small files."""
        box = [uuid.uuid4().hex]
        dist.broadcast_object_list(box)
        iteration = checkpoint["global_step"]
        facts = {name: _facts(role, iteration, box[0], shards.optimizer) for name, role in roles.items()}
        writes = {}
        for name, role in roles.items():
            state = role.sharded_state(optimizer=shards.optimizer)
            state["iteration"] = iteration
            writes[name] = torch_dist.Write(state, staging_dir(finals[name]), snapshot=self.async_save)
        place, rank = staging_dir(finals["actor"]), dist.get_rank()
        if shards.write_hf is not None:
            shards.write_hf(place / "hf")

        def small_files() -> None:
            torch_dist.save_file(shards.rng, place / "rng" / f"rank_{rank:05d}.pt")
            if rank == 0:
                torch_dist.save_file(checkpoint, place / TRAINER_FILE)

        everywhere(f"writing {place / TRAINER_FILE}", small_files)
        return _Save(finals, writes, facts, self.retention)

    def finish(self, *, wait: bool) -> bool:
        """Publish a save under way, if it is written on all ranks; True if none is left. With `wait` it
        is."""
        save = self._pending
        if save is None:
            return True
        if save.thread is not None:
            alive = torch.tensor(float(save.thread.is_alive()))
            if not wait:
                dist.all_reduce(alive, dist.ReduceOp.MAX)
                if alive > 0:
                    return False
            save.thread.join()
        self._pending = None
        try:
            self._publish(save)
        except CheckpointError as error:
            _drop_staging(list(save.finals.values()))
            raise CheckpointError(
                f"{error}. {save.finals['actor']} was not written; the checkpoint before it is whole. Free"
                " space or mend the permissions, and run the same command again"
            ) from error
        return True

    def _publish(self, save: _Save) -> None:
        for name, write in save.writes.items():
            digests: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(digests, write.finish())
            merged = {k: v for part in digests for k, v in part.items()}
            save.facts[name]["digests"] = merged
        everywhere(f"publishing {save.finals['actor']}", lambda: _publish_files(save))

    # ---- loading -------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Lightning's own dict in the checkpoint directory `path`; always read safely. Not collective."""
        return safe_pickle.load_file(Path(path) / TRAINER_FILE)

    def verified(self, path: str | Path, roles: dict[str, Role], *, optimizer: bool) -> dict[str, Path]:
        """The directory of every role for a resume from `path`, all bytes checked; the same on every rank.

        A damaged checkpoint is refused by name, or passed over for the one before it with `auto_fallback`."""
        actor = Path(path).absolute()
        while True:
            try:
                return self._verified_pair(actor, roles, optimizer)
            except CheckpointError as error:
                problem = str(error).split(";")[0]
                actor = fall_back(actor, problem, self.auto_fallback, named_by_tracker=False)

    def _verified_pair(self, actor: Path, roles: dict[str, Role], optimizer: bool) -> dict[str, Path]:
        found = {"actor": actor} if "actor" in roles else {}
        share = (dist.get_rank(), dist.get_world_size())
        _together(lambda: files.problems(actor, contents=True, share=share))
        if "critic" in roles:
            found["critic"] = critic_of(actor, critic_candidates(actor, self.config))
            _together(lambda: files.problems(found["critic"], contents=True, share=share))
        for name, directory in found.items():
            _check_optimizer(roles[name], directory, optimizer)
        return found

    def load_role(self, role: Role, directory: Path, *, optimizer: bool) -> None:
        """Fill models, optimizer and schedule position of `role`, re-sharded to this layout."""
        role.load_state(torch_dist.load(role.sharded_state(optimizer=optimizer, loading=True), directory))

    def load_rng(self, directory: Path) -> dict[str, Any] | None:
        """This rank's random states; None where the checkpoint was made by fewer ranks. Not collective."""
        file = directory / "rng" / f"rank_{dist.get_rank():05d}.pt"
        return safe_pickle.load_file(file) if file.is_file() else None

    # ---- places --------------------------------------------------------------------------------------

    def critic_dir(self, actor: Path) -> Path:
        """Where the critic goes when the actor goes to `actor`."""
        return (self.critic_save or critic_root(actor.parent)) / actor.name

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete an actor's directory and its critic's. By one rank."""
        actor = Path(path).absolute()
        files.remove(actor)
        files.remove(self.critic_dir(actor))

    def teardown(self) -> None:
        """Nothing: a save under way is published when training ends; after an error it is dropped."""


# inner ------------------------------------------------------------------------------------------------


def _make_staging(finals: list[Path]) -> None:
    if dist.get_rank() != 0:
        return
    for final in finals:
        final.parent.mkdir(parents=True, exist_ok=True)
        clean(final.parent)
        staging_dir(final).mkdir()
    (staging_dir(finals[-1]) / "rng").mkdir()


def _drop_staging(finals: list[Path]) -> None:
    if dist.get_rank() == 0:
        for final in finals:
            shutil.rmtree(staging_dir(final), ignore_errors=True)


def _write_all(save: _Save) -> None:
    for write in save.writes.values():
        write.write()


def _publish_files(save: _Save) -> None:
    if dist.get_rank() != 0:
        return
    for name, final in save.finals.items():
        facts = dict(save.facts[name])
        files.write_manifest(staging_dir(final), facts.pop("digests"), **facts)
    files.publish(list(save.finals.values()))
    newest, keep = iteration_of(save.finals["actor"]), save.retention.keep
    if newest is not None and keep is not None:
        files.prune([f.parent for f in save.finals.values()], newest, keep, save.retention.protected)
    log.info("checkpoint: %s (%.1f s)", save.finals["actor"], time.monotonic() - save.started)


def _facts(role: Role, iteration: int, save_id: str, optimizer: bool) -> dict[str, Any]:
    t = role.topology
    return {
        "iteration": iteration,
        "save_id": save_id,
        "role": role.name,
        "optimizer": kind_of(role.optimizer) if optimizer and role.optimizer is not None else None,
        "layout": {"tp": t.tp, "pp": t.pp, "cp": t.cp, "dp": t.dp, "vpp": t.vpp},
    }


def _together(check: Callable[[], list[str]]) -> None:
    """Raise the first problem that any rank finds, on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, check())
    problems = [p for part in found for p in part]
    if problems:
        raise CheckpointError(problems[0])


def _check_optimizer(role: Role, directory: Path, wanted: bool) -> None:
    manifest = files.read_manifest(directory)
    if not wanted or manifest is None or role.optimizer is None:
        return
    here = kind_of(role.optimizer)
    if manifest.optimizer is None:
        raise CheckpointError(f"{directory} lacks the optimizer state; take only its weights with --finetune")
    if manifest.optimizer != here:
        raise CheckpointError(
            f"{directory} was saved by {manifest.optimizer}, this run has {here}; give the same"
            " --use-distributed-optimizer, --bf16 and --optimizer, or take only the weights with --finetune"
        )
