"""What Lightning asks of any strategy: processes, ranks, devices, precision; nothing of models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from ppo_lightning.launchers.local import LocalLauncher
from ppo_lightning.megatron import topology as groups
from ppo_lightning.megatron.topology import Topology

if TYPE_CHECKING:
    import lightning.pytorch as pl


class MegatronProcesses(ParallelStrategy):
    """The Lightning half of `MegatronStrategy`: one process a rank, Megatron's groups over them."""

    is_distributed = True  # Lightning would otherwise treat an unknown strategy as a single process

    def __init__(
        self,
        *,
        sizes: dict[str, Any],
        seed: int,
        num_nodes: int,
        timeout: timedelta,
        launcher: Any,
        checkpoint_io: Any,
    ) -> None:
        super().__init__(checkpoint_io=checkpoint_io)
        self.seed, self._sizes, self._timeout = seed, sizes, timeout
        self._num_nodes, self._given_launcher = num_nodes, launcher
        self._topology: Topology | None = None

    @property
    def topology(self) -> Topology:
        """Sizes and this rank's coordinates, once the process groups exist."""
        if self._topology is None:
            raise RuntimeError("the process groups do not exist yet: they are formed when trainer.fit starts")
        return self._topology

    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        if self.root_device.type == "cuda":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        box = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the world unless told otherwise: Lightning compares such sums with the world size."""
        return _sync_ddp_if_available(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        self._num_nodes = count

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or [])

    @property
    def root_device(self) -> torch.device:
        return (self.parallel_devices or [torch.device("cpu")])[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topology.dp, "rank": self.topology.dp_rank}

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and type(plugin) is not Precision:
            raise ValueError(
                f"MegatronStrategy cannot use Trainer(precision={plugin.precision!r}): Megatron owns the"
                ' types of weights and activations; keep "32-true" and give the strategy bf16=True (--bf16)'
            )
        self._precision_plugin = plugin

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = self._given_launcher or LocalLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._topology is not None:
            return  # validate after fit comes here again
        self.set_world_ranks()
        reset_seed()
        if not dist.is_initialized():
            assert self.cluster_environment is not None
            backend = "nccl" if self.root_device.type == "cuda" else "gloo"
            _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout)
        minutes = max(1, int(self._timeout.total_seconds() // 60))
        self._topology = groups.initialize(**self._sizes, seed=self.seed, timeout_minutes=minutes)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        yield  # Megatron puts parameters where they belong

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # a sharded load fills models and optimizers that exist

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Nothing: Megatron's parameters are views of buffers, and are where they belong."""

    def teardown(self) -> None:
        """As Lightning's, without moving the module: Megatron's parameters are views of buffers."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
