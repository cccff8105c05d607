"""Lightning's strategy over Megatron-Core: every verb that the module may know of parallelism."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from ppo_lightning.megatron.checkpoint import MegatronCheckpointIO, Shards
from ppo_lightning.megatron.first_weights import load_weights
from ppo_lightning.megatron.hf_files import save_hf
from ppo_lightning.megatron.model import ModelOptions
from ppo_lightning.megatron.offload import PARTS, Offload, Part
from ppo_lightning.megatron.processes import MegatronProcesses
from ppo_lightning.megatron.rng import rng_state, set_rng_state
from ppo_lightning.megatron.roles import LossFn, Output, Role, StepReport, build_role
from ppo_lightning.megatron.weights import stream
from ppo_lightning.samples import Microbatch

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig
    from ppo_lightning.megatron.optimizer import OptimizerOptions

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class MegatronStrategy(MegatronProcesses):
    """Tensor, pipeline, context, sequence and data parallelism of Megatron-Core behind a few verbs.

    A *role* ("actor", "critic", "reference") is one model of the run; the data-parallel size is what the
    world leaves over. Precision is Megatron's (`bf16`): the Trainer keeps `precision="32-true"`.
    """

    strategy_name = "megatron"

    def __init__(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        sequence_parallel: bool = False,
        use_distributed_optimizer: bool = False,
        bf16: bool = False,
        recompute_granularity: str | None = None,
        recompute_method: str | None = None,
        recompute_num_layers: int | None = None,
        log_probs_chunk_size: int | None = None,
        seed: int = 1234,
        num_nodes: int = 1,
        timeout: timedelta = timedelta(minutes=30),
        checkpoint_io: MegatronCheckpointIO | None = None,
        launcher: Any = None,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(
            sizes={
                "tensor_model_parallel_size": tensor_model_parallel_size,
                "pipeline_model_parallel_size": pipeline_model_parallel_size,
                "context_parallel_size": context_parallel_size,
                "virtual_pipeline_model_parallel_size": virtual_pipeline_model_parallel_size,
                "sequence_parallel": sequence_parallel,
            },
            seed=seed,
            num_nodes=num_nodes,
            timeout=timeout,
            launcher=launcher,
            checkpoint_io=checkpoint_io or MegatronCheckpointIO(),
        )
        self.roles: dict[str, Role] = {}
        self._unread: dict[str, str] = {}  # role -> where its first weights lie
        self.use_distributed_optimizer = use_distributed_optimizer
        self._model_options = ModelOptions(
            bf16=bf16,
            recompute_granularity=recompute_granularity,
            recompute_method=recompute_method,
            recompute_num_layers=recompute_num_layers,
            log_probs_chunk_size=log_probs_chunk_size,
            seed=seed,
        )
        self._offload = offload or Offload()
        self._pending_rng: dict[str, Any] | None = None

    @classmethod
    def from_config(cls, config: PPOConfig) -> MegatronStrategy:
        """The strategy that a resolved configuration describes."""
        model, performance, cluster = config.model, config.performance, config.cluster
        launcher = None
        if cluster.launcher == "ray":
            from ppo_lightning.launchers.ray import RayLauncher

            launcher = RayLauncher.from_config(config)
        return cls(
            tensor_model_parallel_size=model.tensor_model_parallel_size,
            pipeline_model_parallel_size=model.pipeline_model_parallel_size,
            context_parallel_size=model.context_parallel_size,
            virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
            sequence_parallel=model.sequence_parallel,
            use_distributed_optimizer=model.use_distributed_optimizer,
            bf16=model.bf16,
            recompute_granularity=model.recompute_granularity,
            recompute_method=model.recompute_method,
            recompute_num_layers=model.recompute_num_layers,
            log_probs_chunk_size=performance.log_probs_chunk_size,
            seed=config.optimizer.seed,
            num_nodes=cluster.actor_num_nodes,
            timeout=timedelta(minutes=cluster.distributed_timeout_minutes),
            checkpoint_io=MegatronCheckpointIO.from_config(config),
            launcher=launcher,
            offload=Offload.from_config(config),
        )

    # ---- models ------------------------------------------------------------------------------------------

    def setup_model(
        self,
        role: str,
        hf_checkpoint: str,
        *,
        optimizer: OptimizerOptions | None = None,
        temperature: float = 1.0,
    ) -> None:
        """Build a model with the architecture of `hf_checkpoint`, a value head for "critic", its weights
        still to be loaded. Without `optimizer` it is frozen. Collective."""
        from transformers import AutoConfig

        options = replace(self._model_options, temperature=temperature)
        self.roles[role] = build_role(
            role,
            AutoConfig.from_pretrained(hf_checkpoint),
            self.topology,
            options,
            optimizer,
            use_distributed_optimizer=self.use_distributed_optimizer,
        )
        self.roles[role].hf_checkpoint = hf_checkpoint

    def load_weights(self, role: str, path: str) -> None:
        """Weights from a Hugging Face or a `torch_dist` directory (ours or Megatron-LM's). A critic keeps
        its fresh value head where `path` holds a policy. They are read when the role is first used, unless a
        checkpoint fills it before. Reading is collective."""
        self._unread[role] = path

    def weights(self, role: str) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on every rank. Collective: every rank must read all of it."""
        held = self.roles[role]
        with self.resident(role, ("weights",)):
            yield from stream(held.models, held.hf_config, self.topology)

    @contextmanager
    def resident(self, role: str, parts: Collection[Part] = PARTS) -> Iterator[None]:
        """`parts` of the role's state are on the device inside, and where they were before afterwards."""
        away = self._offload.is_away(role)
        self.activate(role, parts)
        try:
            yield
        finally:
            if away:
                self.deactivate(role)

    def activate(self, role: str, parts: Collection[Part] = ("weights",)) -> None:
        """Bring a role's weights onto the device, or other `parts`; training brings what else it needs."""
        self._offload.activate(self.roles[role], parts)
        path = self._unread.pop(role, None)
        if path is not None:
            self._offload.forget(self.roles[role])
            rank_zero_info(f"{role}: {load_weights(self.roles[role], path)}")

    def deactivate(self, role: str) -> None:
        """Let a role's state leave the device until it is needed again."""
        self._offload.deactivate(self.roles[role])

    # ---- computing ---------------------------------------------------------------------------------------

    def forward(self, role: str, batches: Sequence[Microbatch], output: Output) -> list[Tensor]:
        """Of the response tokens "logprobs", "entropy" or "values": one complete fp32 [n] a micro-batch, the
        same on all ranks of the replica. No gradient."""
        self.activate(role)
        return self.roles[role].forward(batches, output)

    def forward_backward(
        self, role: str, batches: Sequence[Microbatch], loss_fn: LossFn, *, entropy: bool = False
    ) -> dict[str, float]:
        """Gradients, from zero, of the sum of `loss_fn` over all micro-batches, data and context ranks.

        `loss_fn(outputs, fields) -> (loss, metrics)` gives sums over the tokens it is handed. Returns "loss"
        and the metrics, summed likewise, the same on every rank."""
        self.activate(role, ("weights", "gradients"))
        return self.roles[role].forward_backward(batches, loss_fn, entropy)

    def complete(self, role: str, batches: Sequence[Microbatch], parts: Sequence[Tensor]) -> list[Tensor]:
        """From the tensors [m] that `loss_fn` saw of `batches` (none on earlier stages): as by `forward`."""
        return self.roles[role].complete(batches, parts)

    def step(self, role: str) -> StepReport:
        """One optimizer step from the gradients at hand, then the next position of the schedule; nothing at
        all where a loss or gradient is NaN or inf."""
        self._offload.changing(self.roles[role])
        return self.roles[role].step()

    # ---- communication -----------------------------------------------------------------------------------

    def reduce_over_data(self, x: Tensor, op: str = "sum") -> Tensor:
        """`x` reduced ("sum", "max" or "min") over the data ranks; `x` itself is left alone."""
        if self.topology.dp == 1:
            return x
        reduced = x.clone().to(self.root_device)
        dist.all_reduce(reduced, _OPS[op], group=self.topology.dp_group)
        return reduced.to(x.device)

    def reduce_over_context(self, x: Tensor) -> Tensor:
        """`x` summed over the ranks that hold other parts of the same sequences."""
        if self.topology.cp == 1:
            return x
        reduced = x.clone()
        dist.all_reduce(reduced, group=self.topology.cp_group)
        return reduced

    def gather_objects(self, obj: Any) -> list[Any]:
        """Everyone's object in rank order, over the world."""
        if self.topology.world == 1:
            return [obj]
        box: list[Any] = [None] * self.topology.world
        dist.all_gather_object(box, obj)
        return box

    # ---- checkpoints -------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Actor, trainer and random states to the directory `filepath`, the critic to its own place.
        Collective."""
        shards = Shards(self.roles, "optimizer_states" in checkpoint, rng_state(), self.resident)
        if self.io.save_hf:
            shards.write_hf = self.save_hf
        self.io.save_checkpoint(checkpoint, filepath, shards)

    def save_hf(self, target: Path) -> None:
        """The actor as a Hugging Face directory `target`, made by rank 0. Collective."""
        if self.is_global_zero:
            target.mkdir(parents=True)
        source = self.roles["actor"].hf_checkpoint
        save_hf(self.weights("actor"), target, source, write=self.is_global_zero)

    def finish_saves(self, *, wait: bool = True) -> None:
        """Publish an asynchronous save that is written by now, or `wait` for it. Collective."""
        self.io.finish(wait=wait)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill every role from the directory and the critic's that belongs to it; Lightning's own dict. Files
        are always read safely, whatever `weights_only` says. Collective."""
        module = self.lightning_module
        fitting = module is None or module.trainer.state.fn == TrainerFn.FITTING
        trained = {name: role for name, role in self.roles.items() if role.optimizer is not None}
        places = self.io.verified(self.broadcast(str(checkpoint_path)), trained, optimizer=fitting)
        for name, directory in places.items():
            if name in trained:
                self._unread.pop(name, None)
                with self.resident(name):
                    self._offload.forget(trained[name])
                    self.io.load_role(trained[name], directory, optimizer=fitting)
                rank_zero_info(f"{name}: goes on from {directory}")
        self._pending_rng = self.io.load_rng(places["actor"])
        return self.io.load_checkpoint(places["actor"])

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self.io.remove_checkpoint(filepath)

    def on_train_start(self) -> None:
        """The last moment before the first batch: nothing draws random numbers between here and there."""
        if self._pending_rng is not None:
            set_rng_state(self._pending_rng)
            self._pending_rng = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # models are saved in shards

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing left to do: `load_checkpoint` has filled the models."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing left to do: `load_checkpoint` has filled the optimizers."""

    @property
    def io(self) -> MegatronCheckpointIO:
        io = self.checkpoint_io
        if not isinstance(io, MegatronCheckpointIO):
            raise TypeError(f"MegatronStrategy needs a MegatronCheckpointIO, not {type(io).__name__}")
        return io
