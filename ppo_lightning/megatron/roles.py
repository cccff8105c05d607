"""A role: one model of the run with its optimizer and schedule, and what it does with a list of
micro-batches.

    n  response tokens of a micro-batch      m  those of them that this context-parallel rank holds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from ppo_lightning.megatron import cpu, names
from ppo_lightning.megatron.batching import PackedBatch, pack
from ppo_lightning.megatron.model import ModelOptions, build_model
from ppo_lightning.megatron.optimizer import (
    OptimizerOptions,
    build_optimizer,
    clip_gradients,
    complete_sharded_state,
    fuse_adam,
    lr_at,
    set_lr,
)
from ppo_lightning.megatron.topology import Topology
from ppo_lightning.megatron.weights import global_parameters, unwrap
from ppo_lightning.samples import Microbatch, TokenFields, TokenOutputs

Output = Literal["logprobs", "values", "entropy"]
_TENSOR_PARALLEL_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")
LossFn = Callable[[TokenOutputs, TokenFields], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did."""

    grad_norm: float  # before clipping, over the whole model
    lr: float  # of this step
    skipped: bool  # a loss or gradient was NaN or inf: nothing has changed, the schedule has not advanced


@dataclass
class Role:
    """One model of a run. `chunks` wrap `models` for gradient reduction where there is an optimizer."""

    name: str
    hf_config: Any
    topology: Topology
    models: list[Any]  # Megatron modules, one a virtual pipeline stage
    chunks: list[Any]
    options: OptimizerOptions | None = None
    optimizer: MegatronOptimizer | None = None
    hf_checkpoint: str = ""  # where the architecture was read
    steps: int = 0  # optimizer steps done: the position in the schedule
    finite: bool = field(default=True, repr=False)  # whether the loss of the gradients at hand is

    # ---- passes --------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batches: Sequence[Microbatch], output: Output) -> list[Tensor]:
        """One fp32 tensor [n] a micro-batch, the same on every rank of the replica."""
        for chunk in self.chunks:
            chunk.eval()
        packed = [pack(batch, self.topology) for batch in self._padded(batches)]

        def step(source: Iterator[PackedBatch], chunk: nn.Module) -> tuple[Any, Callable[..., Any]]:
            outputs = chunk(next(source), entropy=output == "entropy")
            return outputs, lambda out, non_loss_data: getattr(out, output)

        local = self._run(step, packed, forward_only=True)
        return self._gathered(packed, local)[: len(batches)]

    def forward_backward(
        self, batches: Sequence[Microbatch], loss_fn: LossFn, entropy: bool
    ) -> dict[str, float]:
        """Gradients of the summed losses, from zero; "loss" and metrics summed over everything, on every
        rank."""
        self._zero_grad()
        for chunk in self.chunks:
            chunk.train()
        inputs = [(pack(b, self.topology), b.fields) for b in self._padded(batches)]

        def step(source: Iterator[Any], chunk: nn.Module) -> tuple[Any, Callable[..., Any]]:
            packed, fields = next(source)

            def objective(outputs: TokenOutputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                loss, metrics = loss_fn(outputs, _held(fields, packed))
                sums = {k: v.detach().double() for k, v in metrics.items()} | {"loss": loss.detach().double()}
                return loss, torch.zeros((), dtype=torch.int, device=loss.device), sums

            return chunk(packed, entropy=entropy), objective

        metrics = self._summed(self._run(step, inputs, forward_only=False))
        self.finite = math.isfinite(metrics["loss"])
        return metrics

    def complete(self, batches: Sequence[Microbatch], parts: Sequence[Tensor]) -> list[Tensor]:
        """What a loss function saw of `batches`, one after another, on each rank of the last stage: one
        complete [n] a micro-batch, the same on every rank of the replica."""
        packed = [pack(batch, self.topology) for batch in self._padded(batches)]
        return self._gathered(packed, parts)[: len(batches)]

    def step(self) -> StepReport:
        """Clip and apply the gradients; leave everything as it is where a loss or gradient is NaN or inf."""
        if self.optimizer is None or self.options is None:
            raise ValueError(f"{self.name} is frozen: it was set up without an optimizer")
        lr = lr_at(self.steps, self.options)
        set_lr(self.optimizer, lr)
        overflow = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if overflow or not self.finite or not math.isfinite(norm):
            self._zero_grad()
            return StepReport(norm, lr, skipped=True)
        if self.options.clip_grad > 0:
            clip_gradients(self.optimizer, self.options.clip_grad, norm)
        self.optimizer.step_with_ready_grads()
        self.steps += 1
        return StepReport(norm, lr, skipped=False)

    # ---- state ---------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """To be called when parameters were written from outside: optimizers may hold their own fp32
        copies."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def named_models(self) -> list[tuple[str, Any]]:
        """The models under Megatron-LM's names: "model", or "model0", "model1", ... with virtual stages."""
        if len(self.models) == 1:
            return [("model", self.models[0])]
        return [(f"model{i}", model) for i, model in enumerate(self.models)]

    def sharded_state(
        self, *, optimizer: bool, loading: bool = False, per_layer_keys: bool = False
    ) -> dict[str, Any]:
        """This rank's share in Megatron's form: the models, "optimizer" and "opt_param_scheduler" under
        Megatron-LM's names. Collective where the optimizer is sharded."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
            "non_homogeneous_layers": per_layer_keys,  # "layers.0.…" instead of one tensor over all layers
            "dp_cp_group": self.topology.dp_cp_group,
        }
        state: dict[str, Any] = {k: m.sharded_state_dict(metadata=metadata) for k, m in self.named_models()}
        if optimizer and self.optimizer is not None:
            shards = dict(state)
            state["optimizer"] = self.optimizer.sharded_state_dict(
                shards if len(shards) > 1 else shards["model"], is_loading=loading, metadata=metadata
            )
            complete_sharded_state(state["optimizer"])
            state["opt_param_scheduler"] = {"num_steps": self.steps}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `sharded_state(loading=True)` was filled with."""
        for key, model in self.named_models():
            model.load_state_dict(state[key])
        if "optimizer" not in state or self.optimizer is None:
            self.weights_changed()
            return
        self.optimizer.load_state_dict(state["optimizer"])
        fuse_adam(self.optimizer)
        self.steps = int(state["opt_param_scheduler"]["num_steps"])

    # ---- inner ---------------------------------------------------------------------------------------

    def _run(self, step: Callable[..., Any], inputs: Sequence[Any], *, forward_only: bool) -> list[Any]:
        """Megatron's schedule for this layout; what the last stage gave, one item a micro-batch, else
        nothing."""
        iterators = [iter(inputs) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(inputs),
            seq_length=1,  # unused: sequence lengths travel with the activations
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _padded(self, batches: Sequence[Microbatch]) -> list[Microbatch]:
        """Interleaving wants a multiple of the pipeline's stages: dummies fill it up."""
        multiple = self.topology.pp if self.topology.vpp else 1
        return [*batches, *(_dummy(batches[0]) for _ in range(-len(batches) % multiple))]

    def _gathered(self, packed: Sequence[PackedBatch], local: Sequence[Tensor]) -> list[Tensor]:
        """Complete [n] tensors from what each context rank of the last stage holds; two collectives in
        all."""
        t, sizes = self.topology, [p.num_response_tokens for p in packed]
        full = torch.zeros(sum(sizes), device=t.device)
        for part, batch, values in zip(full.split(sizes), packed, local):
            part[batch.select] = values.float()
        if t.cp > 1:
            dist.all_reduce(full, group=t.cp_group)
        if t.pp > 1:
            dist.broadcast(full, src=t.last_stage_rank, group=t.pp_group)
        return list(full.split(sizes))

    def _summed(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Sums over micro-batches, data and context ranks of the last stage, told to the other stages."""
        t = self.topology
        box: list[dict[str, float]] = [{}]
        if t.is_last_stage:
            names = sorted(parts[0])
            sums = torch.stack([torch.stack([p[k] for k in names]) for p in parts]).sum(0)
            if t.dp * t.cp > 1:
                dist.all_reduce(sums, group=t.dp_cp_group)
            box = [dict(zip(names, sums.tolist()))]
        if t.pp > 1:
            dist.broadcast_object_list(box, src=t.last_stage_rank, group=t.pp_group)
        return box[0]

    def _zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()


def build_role(
    name: str,
    hf_config: Any,
    topology: Topology,
    model_options: ModelOptions,
    optimizer: OptimizerOptions | None,
    *,
    use_distributed_optimizer: bool,
) -> Role:
    """Models, gradient buffers and optimizer of a role, weights not loaded. Collective over the world."""
    models = build_model(hf_config, topology, model_options, value_head=name == "critic")
    cpu.prepared()
    _mark_tensor_parallel(models)
    if optimizer is None:
        for parameter in (p for model in models for p in model.parameters()):
            parameter.requires_grad_(False)
        return Role(name, hf_config, topology, models, models)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,  # a step's gradients are few and the ranks do not idle: nothing to hide
        average_in_collective=False,
    )
    chunks: list[nn.Module] = [
        DistributedDataParallel(model.config, ddp_config, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]
    made = build_optimizer(
        chunks, optimizer, bf16=model_options.bf16, use_distributed_optimizer=use_distributed_optimizer
    )
    return Role(name, hf_config, topology, models, chunks, optimizer, made)


def _mark_tensor_parallel(models: Sequence[nn.Module]) -> None:
    """Tell Megatron which parameters are cut over tensor ranks, so that the gradient norm counts every part
    of these and each of the others once. Its layers do it only where they initialize their weights."""
    value_head = unwrap(models[0]).value_head
    for name, parameter in global_parameters(models).items():
        shape = tuple(parameter.shape)
        doubled = names.whole_shape(name, shape, 2, value_head=value_head)
        if doubled != shape:
            axis = next(i for i, (a, b) in enumerate(zip(shape, doubled)) if a != b)
            for attribute, value in zip(_TENSOR_PARALLEL_ATTRIBUTES, (True, axis, 1)):
                setattr(parameter, attribute, value)


def _held(fields: TokenFields, packed: PackedBatch) -> TokenFields:
    """The fields of the response tokens that this context rank holds, on its device."""
    return fields.take(packed.select.to(fields.mask.device)).to(packed.select.device)


def _dummy(like: Microbatch) -> Microbatch:
    """A micro-batch that teaches nothing, with the same fields filled as in `like`."""
    nothing = torch.empty(0, dtype=torch.int64, device=like.fields.mask.device)
    return Microbatch([], [], [], like.fields.take(nothing))
