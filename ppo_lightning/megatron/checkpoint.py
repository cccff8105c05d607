"""Saving and loading a run: Lightning's CheckpointIO over Megatron-Core's distributed checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from ppo_lightning.megatron import checkpoint_files as files
from ppo_lightning.megatron import checkpoint_publish as publishing
from ppo_lightning.megatron import safe_pickle, torch_dist
from ppo_lightning.megatron.checkpoint_files import (
    TRAINER_FILE,
    CheckpointError,
    critic_root,
    iteration_of,
    latest_iteration,
)
from ppo_lightning.megatron.checkpoint_publish import clean
from ppo_lightning.megatron.checkpoint_save import Retention, Save, Shards
from ppo_lightning.megatron.checkpoint_sources import (
    CriticSource,
    critic_candidates,
    critic_of,
    critic_source,
    describe,
    fall_back,
    policy_source,
    resume_path,
    run_checkpoint,
)
from ppo_lightning.megatron.optimizer import kind_of

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig
    from ppo_lightning.megatron.roles import Role

__all__ = [
    "CheckpointError",
    "CriticSource",
    "MegatronCheckpointIO",
    "Retention",
    "Shards",
    "clean",
    "critic_root",
    "critic_source",
    "describe",
    "iteration_of",
    "latest_iteration",
    "policy_source",
    "resume_path",
    "run_checkpoint",
]
SAVED_ROLES = ("critic", "actor")  # in the order of publication: whoever finds the actor finds its critic


class MegatronCheckpointIO(CheckpointIO):
    """Checkpoints are directories. Every method is collective unless it says otherwise."""

    def __init__(
        self,
        *,
        config: PPOConfig | None = None,
        critic_save: str | Path | None = None,
        async_save: bool = False,
        save_hf: bool = False,
        auto_fallback: bool = False,
    ) -> None:
        self.config = config  # only for where a critic may lie
        self.critic_save = None if critic_save is None else Path(critic_save)
        self.async_save, self.save_hf, self.auto_fallback = async_save, save_hf, auto_fallback
        self.retention = Retention()
        self._pending: Save | None = None
        self._copies: dict[str, dict[Any, Tensor]] = {}  # of asynchronous saves: role -> buffers
        self._reserving: threading.Thread | None = None

    @classmethod
    def from_config(cls, config: PPOConfig) -> MegatronCheckpointIO:
        model = config.model
        return cls(
            config=config,
            critic_save=config.critic.critic_save,
            async_save=model.async_save,
            save_hf=model.save_hf,
            auto_fallback=model.auto_fallback,
        )

    # ---- saving --------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Shards | None = None
    ) -> None:
        """Write `checkpoint` (Lightning's dict) and the roles in `storage_options` to the directory `path`
        and, for the critic, to its own place. Asynchronous saves return when everything is copied; `finish`,
        which the next save calls, publishes them. Raises CheckpointError; the former checkpoint is then
        untouched."""
        if storage_options is None:
            raise ValueError("MegatronCheckpointIO is called by MegatronStrategy, which passes the shards")
        self.finish(wait=True)
        self.wait_for_memory()
        final = Path(path).absolute()
        roles = [name for name in SAVED_ROLES if name in storage_options.roles]
        finals = {name: final if name == "actor" else self.critic_dir(final) for name in roles}
        copies = self._copies if self.async_save else None
        save = Save(checkpoint, storage_options, finals, self.retention, copies=copies)
        if self.async_save:
            save.write_in_background()
            self._pending = save
        else:
            save.publish()

    def reserve(self, shards: Shards) -> None:
        """Begin to make the memory that asynchronous saves copy into, so that the first one need not wait
        for it."""
        making = []
        for name in (name for name in SAVED_ROLES if name in shards.roles):
            with shards.resident(name):
                state = shards.roles[name].sharded_state(optimizer=shards.optimizer)
                making.append(torch_dist.room_for(state, self._copies.setdefault(name, {})))

        def make() -> None:
            for role in making:
                role()

        self._reserving = threading.Thread(target=make, name="checkpoint-memory", daemon=True)
        self._reserving.start()

    def wait_for_memory(self) -> None:
        """Until what `reserve` began is done. Not collective."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def finish(self, *, wait: bool) -> None:
        """Publish an asynchronous save, if all ranks have written it or `wait` says to wait for that."""
        save = self._pending
        if save is not None and (wait or save.written()):
            self._pending = None
            save.publish()

    # ---- loading -------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Lightning's own dict in the checkpoint directory `path`; always read safely. Not collective."""
        return safe_pickle.load_file(Path(path) / TRAINER_FILE)

    def verified(self, path: str | Path, roles: dict[str, Role], *, optimizer: bool) -> dict[str, Path]:
        """The directory of every role for a resume from `path`, all bytes checked; the same on every rank.

        A damaged checkpoint is refused by name, or passed over for the one before it with `auto_fallback`."""
        found: dict[str, Path] = {}
        actor = Path(path).absolute()
        while not found:
            try:
                found = self._verified_pair(actor, "critic" in roles)
            except CheckpointError as error:
                actor = fall_back(actor, str(error), self.auto_fallback, named_by_tracker=False)
        for name, directory in found.items():
            if name in roles and optimizer:
                _check_optimizer(roles[name], directory)
        return found

    def _verified_pair(self, actor: Path, critic: bool) -> dict[str, Path]:
        share = (dist.get_rank(), dist.get_world_size())
        _together(lambda: files.problems(actor, contents=True, share=share))
        found = {"actor": actor}
        if critic:
            found["critic"] = critic_of(actor, critic_candidates(actor, self.config))
            _together(lambda: files.problems(found["critic"], contents=True, share=share))
        return found

    def load_role(self, role: Role, directory: Path, *, optimizer: bool) -> None:
        """Fill models, optimizer and schedule position of `role`, re-sharded to this layout."""
        state = role.sharded_state(optimizer=optimizer, loading=True)
        role.load_state(torch_dist.load(state, directory))

    def load_rng(self, directory: Path) -> dict[str, Any] | None:
        """This rank's random states; None where the checkpoint was made by fewer ranks. Not collective."""
        file = directory / "rng" / f"rank_{dist.get_rank():05d}.pt"
        return safe_pickle.load_file(file) if file.is_file() else None

    # ---- places --------------------------------------------------------------------------------------

    def critic_dir(self, actor: Path) -> Path:
        """Where the critic goes when the actor goes to `actor`. Not collective."""
        return (self.critic_save or critic_root(actor.parent)) / actor.name

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete an actor's directory and its critic's. By one rank."""
        actor = Path(path).absolute()
        publishing.remove(actor)
        publishing.remove(self.critic_dir(actor))


def _together(check: Callable[[], list[str]]) -> None:
    """Raise the first problem that any rank finds, on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, check())
    problems = [p for part in found for p in part]
    if problems:
        raise CheckpointError(problems[0])


def _check_optimizer(role: Role, directory: Path) -> None:
    manifest = files.read_manifest(directory)
    if manifest is None or role.optimizer is None:
        return
    here = kind_of(role.optimizer)
    if manifest.optimizer is None:
        raise CheckpointError(f"{directory} lacks the optimizer state; take only its weights with --finetune")
    if manifest.optimizer != here:
        raise CheckpointError(
            f"{directory} was saved by {manifest.optimizer}, this run has {here}; give the same"
            " --use-distributed-optimizer, --bf16 and --optimizer, or take only the weights with --finetune"
        )
