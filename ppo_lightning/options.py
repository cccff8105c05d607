"""Every option, declared once: the groups of `PPOConfig`. Flags, YAML keys, range checks and docs/flags.md
are made from these fields. A field's name is its flag's name with underscores, unique over all groups.

`None` means "not given". A `Filled[int]` is None only until `PPOConfig.resolve` derives or demands it.
"""

# ruff: noqa: RUF009 -- `option` makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.option import Filled, option, switch


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    actor_num_nodes: int = option(1, "nodes that train", at_least=1)
    actor_num_gpus_per_node: Filled[int] = option(
        None,
        "training ranks a node",
        at_least=1,
        derived="8 with CUDA (all, where fewer are visible); on CPU the ranks of torchrun, else TP x PP x CP",
    )
    critic_num_nodes: Filled[int] = option(
        None, "always the actor's", derived="--actor-num-nodes", at_least=1
    )
    critic_num_gpus_per_node: Filled[int] = option(
        None, "always the actor's", derived="--actor-num-gpus-per-node", at_least=1
    )
    rollout_num_gpus: Filled[int] = option(
        None,
        "GPUs for rollout engines, all together",
        at_least=1,
        derived="the training ranks with hf or --colocate, else one engine's (or that of each URL)",
    )
    rollout_num_gpus_per_engine: int = option(1, "tensor parallel size of one rollout engine", at_least=1)
    colocate: bool = switch("engines and training share the same GPUs and make room for each other")
    offload: bool = switch("short for --offload-train --offload-rollout")
    offload_train: Filled[bool] = option(
        None, "only the model at work stays on the device", derived="on with ppo, --colocate or --offload"
    )
    offload_rollout: Filled[bool] = option(
        None, "engines free the device while training", derived="on with --colocate or --offload"
    )
    offload_train_target: Literal["cpu", "disk"] = option("cpu", "where an idle model's state goes")
    offload_train_disk_dir: str | None = option(
        None, "directory for the disk target", derived="<output-dir>/offload with --offload-train-target disk"
    )
    launcher: Literal["local", "ray"] = option(
        "local", "who starts the ranks; torchrun and SLURM are recognised"
    )
    distributed_timeout_minutes: int = option(30, "time limit of a collective", at_least=1)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    hf_checkpoint: Filled[str] = option(
        None, "Hugging Face directory: architecture, tokenizer and first weights", metavar="DIR"
    )
    ref_load: str | None = option(
        None,
        "reference model (torch_dist or Hugging Face directory); without it --hf-checkpoint",
        metavar="DIR",
    )
    load: Filled[str] = option(None, "checkpoint to go on from", derived="--save", metavar="DIR")
    save: Filled[str] = option(
        None, "where checkpoints go", derived="<output-dir>/checkpoints", metavar="DIR"
    )
    save_interval: int | None = option(
        None, "rollouts between checkpoints; not given: one at the end", at_least=1
    )
    save_hf: bool = switch("also write a Hugging Face directory per checkpoint")
    async_save: bool = switch("write checkpoints in the background")
    ckpt_step: int | None = option(
        None, "iteration to load; not given: what the tracker file names", at_least=0
    )
    keep_checkpoints: int | None = option(None, "newest checkpoints to keep; not given: all", at_least=1)
    monitor: str | None = option(
        None, "metric that decides the best checkpoint, as eval/NAME/mean", metavar="METRIC"
    )
    monitor_mode: Literal["max", "min"] = option("max", "whether a higher or a lower --monitor is better")
    save_top_k: int = option(1, "best checkpoints to keep beside the newest, by --monitor", at_least=0)
    auto_fallback: bool = switch("a damaged newest checkpoint: take the one before it instead of stopping")
    finetune: bool = switch("take only weights from --load: fresh optimizers, schedules and loop")
    tensor_model_parallel_size: int = option(1, "ranks that share each layer (TP)", at_least=1)
    pipeline_model_parallel_size: int = option(
        1,
        "pipeline stages (PP); the last has fewer layers where it computes the output layer too",
        at_least=1,
    )
    virtual_pipeline_model_parallel_size: int | None = option(
        None, "model chunks a pipeline rank holds, interleaved (VPP)", at_least=1
    )
    context_parallel_size: int = option(1, "ranks that share each sequence (CP)", at_least=1)
    sequence_parallel: bool = switch("split norms and residuals over TP along the sequence")
    use_distributed_optimizer: bool = switch("shard optimizer state and fp32 main parameters over DP x CP")
    recompute_granularity: Literal["full", "selective"] | None = option(
        None, "recompute activations in the backward pass: whole layers, or only the attention core"
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None, "which layers --recompute-granularity full covers"
    )
    recompute_num_layers: int | None = option(
        None, "layers in one recomputed chunk (uniform) or recomputed per stage (block)", at_least=1
    )
    bf16: bool = switch(
        "bf16 weights and activations; main parameters, heads, losses and gradient sums stay fp32"
    )
    trust_remote_code: bool = switch("run Python code that comes with --hf-checkpoint")
    train_backend: Literal["megatron", "fsdp"] = option(
        "megatron", "training backend; only megatron is built"
    )
    megatron_to_hf_mode: Literal["raw", "bridge"] = option(
        "raw", "how weights become Hugging Face's; only raw (own mapping) is built"
    )


@dataclass(frozen=True, slots=True)
class AlgorithmOptions:
    advantage_estimator: str = option(
        "grpo", "how rewards become advantages; ppo builds the critic and selects GAE", metavar="NAME"
    )
    gamma: float = option(1.0, "discount per trainable token", at_least=0, at_most=1)
    lambd: float = option(1.0, "GAE lambda", at_least=0, at_most=1)
    critic_lambd: float | None = option(
        None, "GAE lambda of the critic's returns; not given: those of --lambd", at_least=0, at_most=1
    )
    length_adaptive_lambd_alpha: float | None = option(
        None, "actor's lambda = 1 - 1 / (alpha x response length), as VAPO (0.05 there)", above=0
    )
    eps_clip: float = option(0.2, "lower clip range of the probability ratio", above=0)
    eps_clip_high: Filled[float] = option(None, "upper clip range", derived="--eps-clip", above=0)
    eps_clip_c: float | None = option(None, "dual clip: bound of the ratio where the advantage is negative")
    policy_loss_type: Literal["ppo", "cispo"] = option("ppo", "clipped surrogate, or clipped weights (CISPO)")
    value_clip: float = option(0.2, "clip range of the critic around its old values", above=0)
    normalize_advantages: bool = switch("whiten advantages over all trainable tokens of the rollout")
    kl_coef: float = option(0.0, "KL penalty inside the reward (not with ppo)", at_least=0)
    kl_target: float | None = option(None, "adapt --kl-coef towards this KL (Ziegler 2019)", above=0)
    kl_horizon: int = option(10000, "samples over which --kl-target adapts", at_least=1)
    use_kl_loss: bool = switch("add KL to the reference model to the loss")
    kl_loss_coef: float = option(0.0, "weight of the KL loss; 0 only monitors", at_least=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option("k1", "KL estimator")
    use_unbiased_kl: bool = switch(
        "weight the KL loss by the probability ratio: an unbiased gradient off-policy"
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus", at_least=0)
    observe_training_entropy: bool = switch("log the entropy even with --entropy-coef 0")
    calculate_per_token_loss: bool = switch("mean over trainable tokens instead of over samples, then tokens")
    use_tis: bool = switch("weight by clipped trainer / engine probability (truncated importance sampling)")
    tis_clip: float = option(2.0, "upper bound of the --use-tis weight", above=0)
    tis_clip_low: float = option(0.0, "lower bound of the --use-tis weight", at_least=0)
    use_opsm: bool = switch("drop samples with negative advantage that are far off-policy (sequence masking)")
    opsm_delta: float = option(1e-4, "mean KL of a sample beyond which --use-opsm drops it", above=0)
    use_rollout_logprobs: bool = switch("take the engine's log-probs as the old ones")
    ppo_epochs: int = option(1, "passes over each rollout", at_least=1)
    mask_truncated_samples: bool = switch("samples cut at the maximal length do not train")


@dataclass(frozen=True, slots=True)
class CriticOptions:
    critic_lr: float | None = option(None, "learning rate of the critic", derived="--lr", above=0)
    critic_load: str | None = option(
        None,
        "critic checkpoint; not given: <load>_critic, else fresh from the policy's weights",
        metavar="DIR",
    )
    critic_save: str | None = option(
        None, "where critic checkpoints go", derived="--save + _critic", metavar="DIR"
    )
    critic_lr_warmup_iters: int = option(0, "optimizer steps of linear warm-up of the critic", at_least=0)
    num_critic_only_steps: int = option(0, "first rollouts in which only the critic trains", at_least=0)
    head_lr_mult: float = option(1.0, "learning-rate factor of the value head", above=0)


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    optimizer: Literal["adam", "sgd"] = option("adam", "Adam is AdamW: decay is decoupled")
    lr: float = option(1e-6, "learning rate of the actor", above=0)
    min_lr: float = option(0.0, "where decay ends", at_least=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = option(
        "constant", "learning-rate schedule"
    )
    lr_decay_iters: int | None = option(
        None,
        "optimizer steps until --min-lr, warm-up included; not given: those of the whole run",
        at_least=1,
    )
    lr_warmup_iters: int = option(0, "optimizer steps of linear warm-up", at_least=0)
    weight_decay: float = option(0.1, "weight decay; norms and biases have none", at_least=0)
    adam_beta1: float = option(0.9, "Adam's first moment", at_least=0, at_most=1)
    adam_beta2: float = option(0.98, "Adam's second moment", at_least=0, at_most=1)
    adam_eps: float = option(1e-8, "Adam's epsilon", above=0)
    sgd_momentum: float = option(0.9, "momentum of sgd", at_least=0, at_most=1)
    clip_grad: float = option(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    seed: int = option(1234, "seed of initial weights and dropout", at_least=0)
