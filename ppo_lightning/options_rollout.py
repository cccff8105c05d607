"""Options of data, rollout, reward, evaluation and logging; see `ppo_lightning.options`."""

# ruff: noqa: RUF009 -- `option` makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.option import Filled, option, switch


@dataclass(frozen=True, slots=True)
class DataOptions:
    prompt_data: str | None = option(
        None, "prompts: .jsonl, .parquet or a Hugging Face dataset directory", metavar="PATH"
    )
    input_key: str = option("input", "column of the prompt, text or chat messages")
    label_key: str | None = option(None, "column of the label given to the reward")
    metadata_key: str | None = option(None, "column of a mapping given to rewards and callbacks")
    apply_chat_template: bool = switch("make the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: str | None = option(
        None, 'JSON object for the chat template, as {"enable_thinking": false}', metavar="JSON"
    )
    rollout_shuffle: bool = switch("a new order of the prompts each epoch")
    rollout_seed: int = option(42, "seed of the prompts' order and of sampling", at_least=0)
    rollout_max_prompt_len: int | None = option(None, "longer prompts are left out, in tokens", at_least=1)


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    num_rollout: Filled[int] = option(None, "rollouts of the whole run", at_least=1)
    num_epoch: int | None = option(None, "passes over the prompts, if --num-rollout is not given", at_least=1)
    rollout_batch_size: Filled[int] = option(None, "prompts a rollout", at_least=1)
    n_samples_per_prompt: int = option(1, "responses to each prompt", at_least=1)
    global_batch_size: Filled[int] = option(
        None,
        "samples an optimizer step",
        at_least=1,
        derived="the rollout's samples / --num-steps-per-rollout",
    )
    num_steps_per_rollout: Filled[int] = option(
        None,
        "optimizer steps a rollout",
        at_least=1,
        derived="the rollout's samples / --global-batch-size, else 1",
    )
    rollout_max_response_len: Filled[int] = option(None, "longest response in tokens", at_least=1)
    rollout_temperature: float = option(1.0, "sampling temperature; log-probs of the trainer use it too")
    rollout_top_p: float = option(1.0, "nucleus sampling", above=0, at_most=1)
    rollout_top_k: int = option(-1, "draw among the k likeliest tokens; -1: all", at_least=-1)
    rollout_stop: tuple[str, ...] = option((), "strings that end a response", metavar="TEXT")
    rollout_stop_token_ids: tuple[int, ...] = option((), "tokens that end a response", metavar="ID")
    rollout_engine: Literal["hf", "sglang"] = option(
        "hf", "who generates: transformers inside the ranks, or servers"
    )
    rollout_external_urls: tuple[str, ...] = option(
        (),
        "SGLang servers already running, instead of own ones",
        metavar="URL",
        aliases=("--rollout-external-engine-addrs",),
    )
    sglang_args: tuple[str, ...] = option(
        (), "flags for the SGLang server, as written: every --sglang-NAME VALUE lands here", metavar="ARG"
    )
    sglang_server_concurrency: int = option(512, "requests at one time to one engine", at_least=1)
    rollout_health_check_interval: float = option(30.0, "seconds between health checks of an engine", above=0)
    rollout_health_check_timeout: float = option(30.0, "seconds an engine has to answer one", above=0)
    custom_generate_function_path: str | None = option(
        None, "own generation (several turns, tools), sync or async", metavar="PKG.MODULE:FUNCTION"
    )
    over_sampling_batch_size: int | None = option(
        None,
        "groups that dynamic sampling draws for a rollout, or that partial rollouts keep under way; not"
        " given: --rollout-batch-size",
        at_least=1,
    )
    dynamic_sampling_filter_path: str | None = option(
        None, "which groups to keep (DAPO), drawing on until the batch is full", metavar="PKG.MODULE:FUNCTION"
    )
    max_num_gen_batches: int = option(
        10, "times --over-sampling-batch-size: prompts after which dynamic sampling gives up", at_least=1
    )
    partial_rollout: bool = switch(
        "begin --over-sampling-batch-size prompts, train when a batch of them is whole, keep the others for"
        " the next rollout"
    )
    partial_rollout_tokens: Filled[int] = option(
        None,
        "tokens a response grows by between looks at whether the batch is whole",
        derived="a quarter of --rollout-max-response-len with partial rollouts",
        at_least=1,
    )
    mask_offpolicy_in_partial_rollout: bool = switch(
        "train only on the tokens of a kept response that the current weights wrote"
    )
    keep_aborted_samples: bool = switch(
        "train on what a response that SGLang aborted has written, instead of dropping it"
    )
    update_weight_transfer_mode: Filled[Literal["tensor", "distributed", "disk"]] = option(
        None,
        "how weights reach SGLang: same machine, broadcast, or files",
        derived="tensor on one machine, distributed to external servers or other nodes",
    )
    update_weight_buffer_size: int = option(512 * 1024**2, "bytes of weights sent at a time", at_least=1)
    update_weight_disk_dir: str | None = option(
        None, "directory both sides see, for disk transfer", derived="<output-dir>/weights with disk transfer"
    )
    check_weight_update_equal: bool = switch(
        "compare the engine's checksums with the trainer's after an update"
    )


@dataclass(frozen=True, slots=True)
class PerformanceOptions:
    micro_batch_size: int = option(1, "samples a forward pass, unless batches are dynamic", at_least=1)
    use_dynamic_batch_size: bool = switch("fill each forward pass up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = option(
        None, "token budget of a rank; times CP for the sequence", at_least=1
    )
    balance_data: bool = switch("give every data rank about the same number of tokens")
    skip_redundant_passes: bool = switch(
        "leave out a forward pass where another one gives its result exactly", default=True
    )
    log_probs_chunk_size: int | None = option(
        None, "response tokens whose logits exist at one time; not given: the head's own choice", at_least=1
    )


@dataclass(frozen=True, slots=True)
class RewardOptions:
    rm_type: str | None = option(
        None,
        "reward: deepscaler, math, math_verify, dapo, dapo_strict_box, gsm8k, f1, random, remote_rm, model,"
        " custom; several with weights as math,f1:0.5",
        metavar="NAME",
    )
    rm_url: str | None = option(None, "address of --rm-type remote_rm", metavar="URL")
    custom_rm_path: str | None = option(None, "own reward, sync or async", metavar="PKG.MODULE:FUNCTION")
    group_rm: bool = switch("the own reward gets all samples of a prompt as one list")
    reward_key: str | None = option(None, "entry that counts when a reward returns a mapping")
    reward_model_path: str | None = option(
        None, "Hugging Face sequence classifier of --rm-type model", metavar="DIR"
    )
    reward_model_batch_size: int = option(16, "responses it scores at a time", at_least=1)
    overlong_buffer_len: int | None = option(
        None, "tokens before the maximal length over which a penalty grows (DAPO)", at_least=1
    )
    overlong_penalty_factor: float = option(1.0, "penalty at the maximal length", at_least=0)


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    eval_interval: int | None = option(None, "rollouts between evaluations", at_least=1)
    eval_prompt_data: tuple[str, ...] = option((), "evaluation sets, by name", metavar="NAME PATH")
    skip_eval_before_train: bool = switch("no evaluation before the first rollout")
    n_samples_per_eval_prompt: int = option(1, "responses to each evaluation prompt", at_least=1)
    eval_temperature: Filled[float] = option(None, "0 is greedy", derived="--rollout-temperature", at_least=0)
    eval_top_p: Filled[float] = option(
        None, "nucleus sampling", derived="--rollout-top-p", above=0, at_most=1
    )
    eval_top_k: Filled[int] = option(None, "as --rollout-top-k", derived="--rollout-top-k", at_least=-1)
    eval_max_response_len: Filled[int] = option(
        None, "longest response in tokens", derived="--rollout-max-response-len", at_least=1
    )
    eval_solved_at: float = option(1.0, "least reward of a response that counts as right in pass@k")


@dataclass(frozen=True, slots=True)
class LoggingOptions:
    output_dir: Filled[str] = option(
        None, "everything the run writes; the same place resumes", derived="outputs/<recipe>", metavar="DIR"
    )
    use_wandb: bool = switch("log to Weights & Biases")
    wandb_project: str | None = option(None, "its project", derived="ppo-lightning with --use-wandb")
    use_tensorboard: bool = switch("log to <output-dir>/tensorboard", default=True)


@dataclass(frozen=True, slots=True)
class DebugOptions:
    max_skipped_steps: int = option(
        10, "optimizer steps skipped in a row (NaN or inf) that end the run", at_least=1
    )
    save_debug_rollout_data: str | None = option(
        None, "write each rollout's samples there; {rollout_id} in the name is its number", metavar="PATH"
    )
    load_debug_rollout_data: str | None = option(
        None, "train from such files without an engine (sets --debug-train-only)", metavar="PATH"
    )
    debug_rollout_only: bool = switch("generate and score, with the weights of --load; no training")
    debug_train_only: bool = switch("train from --load-debug-rollout-data, no engine")
