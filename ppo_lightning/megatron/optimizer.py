"""Optimizers of Megatron-Core and the learning-rate schedule, both made from a frozen set of options."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer

    from ppo_lightning.config import PPOConfig


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """How one model is trained. Adam is AdamW (decoupled decay); norms, biases and other vectors are not
    decayed."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    lr_warmup_iters: int = 0  # optimizer steps
    lr_decay_iters: int | None = None  # optimizer steps, warm-up included; unless constant
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    clip_grad: float = 1.0  # largest global gradient norm; 0: none
    head_lr_mult: float = 1.0  # learning-rate factor of a value head

    def __post_init__(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}; lower it")
        if self.lr_decay_style == "constant":
            return
        if self.lr_decay_iters is None:
            raise ValueError(f"lr_decay_style {self.lr_decay_style} needs lr_decay_iters: steps until min_lr")
        if self.lr_warmup_iters >= self.lr_decay_iters:
            raise ValueError(
                f"lr_warmup_iters {self.lr_warmup_iters} must be below lr_decay_iters {self.lr_decay_iters}"
            )

    @classmethod
    def from_config(cls, config: PPOConfig, role: str) -> OptimizerOptions:
        """Options of "actor" or "critic", which differ in learning rate, warm-up and head."""
        given, critic = config.optimizer, config.critic
        lr = given.lr if role == "actor" or critic.critic_lr is None else critic.critic_lr
        return cls(
            optimizer=given.optimizer,
            lr=lr,
            min_lr=min(given.min_lr, lr),
            lr_decay_style=given.lr_decay_style,
            lr_warmup_iters=given.lr_warmup_iters if role == "actor" else critic.critic_lr_warmup_iters,
            lr_decay_iters=given.lr_decay_iters or _steps_of_run(config),
            weight_decay=given.weight_decay,
            adam_beta1=given.adam_beta1,
            adam_beta2=given.adam_beta2,
            adam_eps=given.adam_eps,
            sgd_momentum=given.sgd_momentum,
            clip_grad=given.clip_grad,
            head_lr_mult=1.0 if role == "actor" else critic.head_lr_mult,
        )


def _steps_of_run(config: PPOConfig) -> int | None:
    """Optimizer steps of the whole run, where its length is known."""
    rollout = config.rollout
    if rollout.num_rollout is None or rollout.num_steps_per_rollout is None:
        return None
    return rollout.num_rollout * rollout.num_steps_per_rollout * config.algorithm.ppo_epochs


def lr_at(step: int, options: OptimizerOptions) -> float:
    """Learning rate of the optimizer step that follows `step` steps; as `OptimizerParamScheduler` of
    Megatron-Core has it.

    The warm-up is a line from 0 (the very first step has learning rate 0) to `lr` after `lr_warmup_iters`
    steps; past `lr_decay_iters` the rate stays `min_lr`.
    """
    o = options
    if o.lr_warmup_iters > 0 and step <= o.lr_warmup_iters:
        return o.lr * step / o.lr_warmup_iters
    if o.lr_decay_style == "constant":
        return o.lr
    assert o.lr_decay_iters is not None
    if step > o.lr_decay_iters:
        return o.min_lr
    if o.lr_decay_style == "inverse-square-root":
        return max(o.min_lr, o.lr * math.sqrt(max(o.lr_warmup_iters, 1)) / math.sqrt(max(step, 1)))
    done = (step - o.lr_warmup_iters) / (o.lr_decay_iters - o.lr_warmup_iters)
    left = 1.0 - done if o.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
    return o.min_lr + left * (o.lr - o.min_lr)


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    options: OptimizerOptions,
    *,
    bf16: bool = False,
    use_distributed_optimizer: bool = False,
) -> MegatronOptimizer:
    """Megatron's optimizer over a model's (wrapped) pipeline chunks, with its state already there, all zero.

    Collective over the world. Raises ValueError for the distributed optimizer with anything but Adam, which
    is all that Megatron can shard.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey

    if use_distributed_optimizer and options.optimizer != "adam":
        raise ValueError(f"the distributed optimizer shards Adam only, not {options.optimizer}; leave it off")
    config = OptimizerConfig(
        optimizer=options.optimizer,
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        sgd_momentum=options.sgd_momentum,
        clip_grad=options.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    overrides: dict[Any, Any] | None = None
    if options.head_lr_mult != 1.0:
        from megatron.core.optimizer import get_standard_config_overrides

        head = ParamKey(name="*output_layer.*")
        overrides = get_standard_config_overrides(config) | {head: {"lr_mult": options.head_lr_mult}}
    optimizer = get_megatron_optimizer(
        config, list(chunks), overrides, use_gloo_process_groups=torch.cuda.is_available()
    )
    for group in optimizer.param_groups:  # Megatron leaves this to its scheduler
        group["weight_decay"] = options.weight_decay * group["wd_mult"]
    for part in parts(optimizer):
        part.init_state_fn = create_state
        if part.optimizer is not None:
            create_state(part.optimizer)
    fuse_adam(optimizer)
    return optimizer


def fuse_adam(optimizer: MegatronOptimizer) -> None:
    """Let torch's Adam update a parameter on a processor in one walk over memory instead of seven. A state
    that was loaded brings the choice of the run that saved it."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            if isinstance(inner, torch.optim.Adam) and all(p.device.type == "cpu" for p in group["params"]):
                group["fused"] = True


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that a chained optimizer is made of, or itself alone."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def create_state(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Give every parameter the state that its first step would make: a model that has not stepped yet is then
    saved and loaded like any other. `config` is there for Megatron, which calls this before loading."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            if isinstance(optimizer, torch.optim.SGD):
                if group["momentum"] != 0:
                    # without dampening a momentum of zero equals torch's start from the first gradient
                    state.setdefault("momentum_buffer", torch.zeros_like(p))
                continue
            if isinstance(optimizer, torch.optim.Adam):
                state.setdefault("step", torch.zeros(()))
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(p)


def complete_sharded_state(state: dict[str, Any]) -> None:
    """Add to an optimizer's sharded state the Adam step count that Megatron leaves out while it is zero;
    torch cannot load without."""
    for part in (state, state.get("optimizer")):
        states = part.get("state") if isinstance(part, dict) else None
        if states and any("exp_avg" in s for s in states.values() if isinstance(s, dict)):
            states.setdefault("common_step", torch.zeros(()))


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers inside; a pipeline stage without parameters has none."""
    for part in parts(optimizer):
        if part.optimizer is not None:
            yield part.optimizer


def set_lr(optimizer: MegatronOptimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)


def clip_gradients(optimizer: MegatronOptimizer, max_norm: float, norm: float) -> None:
    """Scale all gradients so that their global norm, which is `norm`, does not exceed `max_norm`."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for part in parts(optimizer):
        parameters = [] if part.is_stub_optimizer else part.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=norm)


def kind_of(optimizer: MegatronOptimizer) -> str:
    """Which of Megatron's optimizers it is; their checkpoints differ."""
    return "+".join(type(part).__name__ for part in parts(optimizer))
