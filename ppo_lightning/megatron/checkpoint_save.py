"""One save: planned, copied, written, published. All ranks take part; rank 0 does what is done once."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ppo_lightning.megatron import checkpoint_files as files
from ppo_lightning.megatron import checkpoint_publish as publishing
from ppo_lightning.megatron import torch_dist
from ppo_lightning.megatron.checkpoint_files import TRAINER_FILE, CheckpointError, iteration_of, staging_dir
from ppo_lightning.megatron.optimizer import kind_of
from ppo_lightning.megatron.roles import Role
from ppo_lightning.megatron.torch_dist import everywhere

log = logging.getLogger(__name__)


@dataclass
class Shards:
    """What this rank contributes to a save."""

    roles: dict[str, Role]
    optimizer: bool  # whether optimizers and schedules are saved too
    rng: dict[str, Any]
    resident: Callable[[str], Any]  # a context in which the named role's tensors are there
    write_hf: Callable[[Path], None] | None = None  # fills the given directory (rank 0); collective


@dataclass
class Retention:
    """Which checkpoints stay: the newest `keep` (None: all) and the protected iterations."""

    keep: int | None = None
    protected: frozenset[int] = frozenset()


class Save:
    """A save under way, from the first byte to the trackers. Making it and its methods are collective."""

    def __init__(
        self,
        checkpoint: dict[str, Any],
        shards: Shards,
        finals: dict[str, Path],
        retention: Retention,
        *,
        copies: dict[str, dict[Any, torch.Tensor]] | None = None,
    ) -> None:
        """Plan, copy what must not change (into `copies`, by role), write the small files. `finals`: role ->
        directory, in the order of publication. Raises CheckpointError on every rank."""
        self.finals, self.retention = finals, retention
        self._started = time.monotonic()
        self._device = shards.roles["actor"].topology.device
        self._thread: threading.Thread | None = None
        self._writes: dict[str, torch_dist.Write] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        everywhere(f"making room in {finals['actor'].parent}", self._make_staging)
        try:
            self._prepare(checkpoint, shards, copies)
        except CheckpointError:
            self.drop()
            raise

    def _make_staging(self) -> None:
        if dist.get_rank() != 0:
            return
        for final in reversed(self.finals.values()):
            final.parent.mkdir(parents=True, exist_ok=True)
            publishing.clean(final.parent)
        for final in self.finals.values():
            staging_dir(final).mkdir()
        (staging_dir(self.finals["actor"]) / "rng").mkdir()

    def _prepare(
        self, checkpoint: dict[str, Any], shards: Shards, copies: dict[str, dict[Any, torch.Tensor]] | None
    ) -> None:
        box = [uuid.uuid4().hex]
        dist.broadcast_object_list(box)
        iteration = checkpoint["global_step"]
        for name in self.finals:
            role, place = shards.roles[name], staging_dir(self.finals[name])
            with shards.resident(name):
                state = role.sharded_state(optimizer=shards.optimizer)
                state["iteration"] = iteration
                own = None if copies is None else copies.setdefault(name, {})
                write = torch_dist.Write(state, place, copies=own)
                if copies is None:
                    write.write()
            self._writes[name] = write
            self._facts[name] = _facts(role, iteration, box[0], shards.optimizer)
        place, rank = staging_dir(self.finals["actor"]), dist.get_rank()
        write_hf = shards.write_hf
        if write_hf is not None:
            everywhere(f"writing {place / 'hf'}", lambda: write_hf(place / "hf"))

        def small_files() -> None:
            torch_dist.save_file(shards.rng, place / "rng" / f"rank_{rank:05d}.pt")
            if rank == 0:
                torch_dist.save_file(checkpoint, place / TRAINER_FILE)

        everywhere(f"writing {place / TRAINER_FILE}", small_files)

    def write_in_background(self) -> None:
        """Write this rank's copies from a thread of their own."""

        def write_all() -> None:
            for write in self._writes.values():
                write.write()

        self._thread = threading.Thread(target=write_all, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def written(self) -> bool:
        """Whether every rank's files are complete."""
        alive = torch.tensor(float(self._thread is not None and self._thread.is_alive()), device=self._device)
        dist.all_reduce(alive, dist.ReduceOp.MAX)
        return bool(alive == 0)

    def publish(self) -> None:
        """Wait for the files, then metadata, manifests, final names, trackers, retention. Raises
        CheckpointError; what was there before is then untouched."""
        if self._thread is not None:
            self._thread.join()
        try:
            for name, write in self._writes.items():
                digests: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(digests, write.finish())
                self._facts[name]["digests"] = {k: v for part in digests for k, v in part.items()}
            everywhere(f"publishing {self.finals['actor']}", self._publish_files)
        except CheckpointError as error:
            self.drop()
            raise CheckpointError(
                f"{error}. {self.finals['actor']} was not written; the checkpoint before it is whole. Free"
                " space or mend the permissions, and run the same command again"
            ) from error

    def _publish_files(self) -> None:
        if dist.get_rank() != 0:
            return
        for name, final in self.finals.items():
            facts = dict(self._facts[name])
            files.write_manifest(staging_dir(final), facts.pop("digests"), **facts)
        publishing.publish(list(self.finals.values()))
        newest, keep = iteration_of(self.finals["actor"]), self.retention.keep
        if newest is not None and keep is not None:
            publishing.prune([f.parent for f in self.finals.values()], newest, keep, self.retention.protected)
        log.info("checkpoint: %s (%.1f s)", self.finals["actor"], time.monotonic() - self._started)

    def drop(self) -> None:
        """Remove what was written so far. Not collective."""
        if dist.get_rank() == 0:
            for final in self.finals.values():
                shutil.rmtree(staging_dir(final), ignore_errors=True)


def _facts(role: Role, iteration: int, save_id: str, optimizer: bool) -> dict[str, Any]:
    t = role.topology
    return {
        "iteration": iteration,
        "save_id": save_id,
        "role": role.name,
        "optimizer": kind_of(role.optimizer) if optimizer and role.optimizer is not None else None,
        "layout": {"tp": t.tp, "pp": t.pp, "cp": t.cp, "dp": t.dp, "vpp": t.vpp},
    }
