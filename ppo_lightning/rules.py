"""What options may not stand together, and what is needed with what: one generator a topic, each message with
its remedy. They see a configuration whose derived values are filled in."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_lightning.config import options
from ppo_lightning.option import unknown
from ppo_lightning.rewards import get, parse_rm_type

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig


def _required(config: PPOConfig) -> Iterator[str]:
    r = config.rollout
    if config.model.hf_checkpoint is None:
        yield "--hf-checkpoint is not given: name the Hugging Face directory of the model"
    if config.data.prompt_data is None and not config.debug.debug_train_only:
        yield "--prompt-data is not given: name the file of prompts"
    if r.rollout_batch_size is None:
        yield "--rollout-batch-size is not given: say how many prompts a rollout draws"
    if r.rollout_max_response_len is None and not config.debug.debug_train_only:
        yield "--rollout-max-response-len is not given: say how many tokens a response may have"
    if r.num_rollout is None and r.num_epoch is None:
        yield "neither --num-rollout nor --num-epoch is given: say how long to train"


def _backend(config: PPOConfig) -> Iterator[str]:
    m = config.model
    why = "the critic is built for it alone" if config.ppo else "no other backend is built"
    if m.train_backend != "megatron":
        yield f"--train-backend {m.train_backend}: {why}; use --train-backend megatron"
    if m.megatron_to_hf_mode != "raw":
        why = "ppo sends weights by its own mapping" if config.ppo else "no bridge is built"
        yield f"--megatron-to-hf-mode {m.megatron_to_hf_mode}: {why}; use --megatron-to-hf-mode raw"


def _estimator(config: PPOConfig) -> Iterator[str]:
    name = config.algorithm.advantage_estimator
    known = known_estimators()
    if name not in known:
        yield f"--advantage-estimator: {unknown(name, known, 'estimator')}; there are {', '.join(known)}"


def _kl(config: PPOConfig) -> Iterator[str]:
    a = config.algorithm
    if a.kl_coef and config.ppo:
        yield (
            f"--kl-coef {a.kl_coef:g} with --advantage-estimator {a.advantage_estimator}: the critic trains"
            " before the actor and never sees the reference log-probs, so its targets would leave the"
            f" penalty out; use --use-kl-loss --kl-loss-type k2 --kl-loss-coef {a.kl_coef:g} and --kl-coef 0"
        )
    if a.kl_coef and a.kl_loss_coef:
        yield (
            "--kl-coef and --kl-loss-coef are both non-zero, which counts the KL twice; set one of them to 0"
        )
    if a.kl_loss_coef and not a.use_kl_loss:
        yield (
            f"--kl-loss-coef {a.kl_loss_coef:g} has no effect without --use-kl-loss; add it, or drop the"
            " coefficient"
        )
    if a.use_unbiased_kl and not a.use_kl_loss:
        yield "--use-unbiased-kl has no effect without --use-kl-loss; add it, or drop the flag"
    if a.kl_target is not None and not a.kl_coef:
        yield "--kl-target adapts --kl-coef, which is 0: give it a first value, or drop --kl-target"


def _algorithm(config: PPOConfig) -> Iterator[str]:
    a = config.algorithm
    if a.use_rollout_logprobs and a.use_tis:
        yield (
            "--use-rollout-logprobs with --use-tis: with the engine's log-probs as the old ones there is"
            " nothing left to correct; drop one of them"
        )
    if a.tis_clip_low > a.tis_clip:
        yield f"--tis-clip-low {a.tis_clip_low:g} is above --tis-clip {a.tis_clip:g}; lower it"
    if a.eps_clip_c is not None and a.eps_clip_c <= 1:
        yield (
            f"--eps-clip-c {a.eps_clip_c:g}: the dual clip's bound must be above 1 (3 is usual); raise it"
            " or drop it"
        )
    constant = a.advantage_estimator == "dr_grpo" and not a.calculate_per_token_loss
    if constant and config.rollout.rollout_max_response_len is None and config.debug.debug_train_only:
        yield (  # _required says it of all other runs
            "--advantage-estimator dr_grpo divides the loss by --rollout-max-response-len, which is not"
            " given: give that of the run that saved the rollouts"
        )
    if config.rollout.rollout_temperature <= 0:
        yield (
            f"--rollout-temperature {config.rollout.rollout_temperature:g}: training divides logits by it,"
            " so it must be above 0; greedy decoding is for evaluation (--eval-temperature 0)"
        )


def _performance(config: PPOConfig) -> Iterator[str]:
    p, m = config.performance, config.model
    if p.use_dynamic_batch_size and p.max_tokens_per_gpu is None:
        yield (
            "--use-dynamic-batch-size needs --max-tokens-per-gpu: say how many tokens a rank takes at a time"
        )
    if m.sequence_parallel and m.tensor_model_parallel_size == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size above 1; raise it or drop the flag"
    if (m.virtual_pipeline_model_parallel_size or 1) > 1 and m.pipeline_model_parallel_size == 1:
        yield (
            f"--virtual-pipeline-model-parallel-size {m.virtual_pipeline_model_parallel_size} needs"
            " --pipeline-model-parallel-size above 1; raise it or drop the flag"
        )
    full = m.recompute_granularity == "full"
    if full and (m.recompute_method is None or m.recompute_num_layers is None):
        yield (
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; add"
            " --recompute-method uniform --recompute-num-layers 1"
        )
    if not full and (m.recompute_method or m.recompute_num_layers):
        yield (
            "--recompute-method and --recompute-num-layers belong to --recompute-granularity full; set it"
            " or drop them"
        )


def _optimizer(config: PPOConfig) -> Iterator[str]:
    o = config.optimizer
    if o.optimizer == "sgd" and config.model.use_distributed_optimizer:
        yield "--use-distributed-optimizer shards Adam only; use --optimizer adam or drop the flag"
    rates = {"--lr": o.lr} | ({"--critic-lr": config.critic.critic_lr or o.lr} if config.ppo else {})
    for flag, rate in rates.items():
        if o.min_lr > rate:
            yield f"--min-lr {o.min_lr:g} is above {flag} {rate:g}; lower it"
    warmups = {"--lr-warmup-iters": o.lr_warmup_iters}
    if config.ppo:
        warmups["--critic-lr-warmup-iters"] = config.critic.critic_lr_warmup_iters
    r = config.rollout
    decay = o.lr_decay_iters
    if decay is None and r.num_rollout is not None and r.num_steps_per_rollout is not None:
        decay = r.num_rollout * r.num_steps_per_rollout * config.algorithm.ppo_epochs
    for flag, steps in warmups.items():
        if o.lr_decay_style != "constant" and decay is not None and steps >= decay:
            yield (
                f"{flag} {steps} must end before the decay does ({decay} optimizer steps); lower it or"
                " raise --lr-decay-iters"
            )


def _engine(config: PPOConfig) -> Iterator[str]:
    c, r = config.cluster, config.rollout
    if r.rollout_top_k == 0 or config.evaluation.eval_top_k == 0:
        yield "--rollout-top-k and --eval-top-k: 0 leaves no token; use -1 for all tokens"
    if r.rollout_external_urls and r.rollout_engine != "sglang":
        yield "--rollout-external-urls are SGLang servers; add --rollout-engine sglang"
    for url in r.rollout_external_urls:
        if not re.fullmatch(r"(https?://)?([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?(/[^\s?#]*)?", url):
            yield f"--rollout-external-urls {url!r}: write it as http://HOST:PORT or HOST:PORT"
    if r.rollout_external_urls and c.colocate:
        yield (
            "--colocate with --rollout-external-urls: foreign servers cannot make room for training; drop one"
        )
    if r.rollout_engine == "sglang" and (c.rollout_num_gpus or 1) % c.rollout_num_gpus_per_engine:
        yield (
            f"--rollout-num-gpus {c.rollout_num_gpus} is no multiple of --rollout-num-gpus-per-engine"
            f" {c.rollout_num_gpus_per_engine}; change one of them"
        )
    if r.over_sampling_batch_size and r.over_sampling_batch_size < (r.rollout_batch_size or 1):
        yield (
            f"--over-sampling-batch-size {r.over_sampling_batch_size} is below --rollout-batch-size"
            f" {r.rollout_batch_size}; raise it"
        )


def _partial(config: PPOConfig) -> Iterator[str]:
    r = config.rollout
    if not r.partial_rollout:
        for name in ("partial_rollout_tokens", "mask_offpolicy_in_partial_rollout"):
            if getattr(r, name):
                flag = options()[name].flag
                yield f"{flag} has no effect without --partial-rollout; add it, or drop the flag"
        return
    if (r.over_sampling_batch_size or 0) <= (r.rollout_batch_size or 0):
        yield (
            "--partial-rollout needs more prompts under way than a rollout trains on: give"
            f" --over-sampling-batch-size above --rollout-batch-size {r.rollout_batch_size}"
        )
    if r.rollout_stop:
        yield (
            "--partial-rollout with --rollout-stop: a stop string may lie across the border of two pieces;"
            " use --rollout-stop-token-ids"
        )
    if r.custom_generate_function_path:
        yield (
            "--partial-rollout with --custom-generate-function-path: your function writes whole responses;"
            " drop one of them"
        )


def _paths(config: PPOConfig) -> Iterator[str]:
    for name, value in config.flat().items():
        of_function = options()[name].metadata.get("metavar") == "PKG.MODULE:FUNCTION"
        if of_function and value is not None and not re.fullmatch(r"[\w.]+[:.]\w+", value):
            yield f"{options()[name].flag} {value!r}: write it as pkg.module:function"
    text = config.data.apply_chat_template_kwargs
    if text is not None and not _is_json_object(text):
        yield (
            f"--apply-chat-template-kwargs {text!r} is no JSON object; write it as"
            f" '{{\"enable_thinking\": false}}'"
        )
    if config.ppo and config.critic.critic_save == config.model.save:
        yield "--critic-save and --save are the same directory: one would overwrite the other; change one"


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _reward(config: PPOConfig) -> Iterator[str]:
    r = config.reward
    if r.group_rm and r.custom_rm_path is None:
        yield "--group-rm hands whole groups to your own reward; give --custom-rm-path, or drop the flag"
    if r.rm_type is None:
        return
    try:
        names = [name for name, _ in parse_rm_type(r.rm_type)]
    except ValueError as error:
        yield f"--rm-type: {error}"
        return
    for name, needed, value in (
        ("remote_rm", "--rm-url", r.rm_url),
        ("model", "--reward-model-path", r.reward_model_path),
        ("custom", "--custom-rm-path", r.custom_rm_path),
    ):
        if name in names and value is None:
            yield f"--rm-type {name} needs {needed}; add it"
    graded = [
        name for name in names if name not in ("remote_rm", "model", "custom") and get(name).needs_label
    ]
    if graded and config.data.label_key is None:
        yield f"--rm-type {graded[0]} compares with a label; give --label-key, the column that holds it"


def _evaluation(config: PPOConfig) -> Iterator[str]:
    e = config.evaluation
    names = e.eval_prompt_data[::2]
    if len(e.eval_prompt_data) % 2:
        yield (
            f"--eval-prompt-data wants pairs of NAME PATH, not {' '.join(e.eval_prompt_data)}; name every set"
        )
    elif len(set(names)) < len(names):
        yield f"--eval-prompt-data gives a name twice ({' '.join(names)}); rename one set"
    if e.eval_interval is not None and not e.eval_prompt_data:
        yield "--eval-interval without --eval-prompt-data: give the sets as NAME PATH, or drop the interval"
    if (config.model.monitor or "").startswith("eval/") and not e.eval_prompt_data:
        yield f"--monitor {config.model.monitor} needs evaluation; give --eval-prompt-data NAME PATH"


def _evaluate_needs(config: PPOConfig) -> Iterator[str]:
    if config.model.hf_checkpoint is None:
        yield "--hf-checkpoint is not given: name the Hugging Face directory of the model"
    if not config.evaluation.eval_prompt_data:
        yield "--eval-prompt-data is not given: name the sets as NAME PATH"
    if config.evaluation.eval_max_response_len is None:
        yield "--eval-max-response-len is not given: say how many tokens a response may have"


def _debug(config: PPOConfig) -> Iterator[str]:
    d = config.debug
    if d.debug_rollout_only and (d.debug_train_only or d.load_debug_rollout_data):
        yield "--debug-rollout-only excludes --debug-train-only and --load-debug-rollout-data; keep one side"
    if d.debug_train_only and d.load_debug_rollout_data is None:
        yield "--debug-train-only needs --load-debug-rollout-data: say where the saved rollouts lie"
    saved = d.save_debug_rollout_data
    if saved is not None and "{rollout_id}" not in saved:
        yield (
            f"--save-debug-rollout-data {saved}: every rollout would overwrite the one before; write"
            " {rollout_id} into the name where its number belongs"
        )


def known_estimators() -> list[str]:
    """Names registered with `@advantage_estimator("name")`: in advantages.py, read from its text so that
    torch stays out, and in the user's own modules where those are already imported."""
    text = (Path(__file__).parent / "advantages.py").read_text(encoding="utf-8")
    names = set(re.findall(r'^@advantage_estimator\(\s*"(\w+)"', text, re.MULTILINE))
    loaded = sys.modules.get("ppo_lightning.advantages")
    return sorted(names | set(loaded.REGISTRY if loaded else ()))


Rule = Callable[["PPOConfig"], Iterator[str]]
SHARED: tuple[Rule, ...] = (_backend, _performance, _engine, _paths, _reward, _evaluation)
TRAINING: tuple[Rule, ...] = (_required, _estimator, _kl, _algorithm, _optimizer, _partial, _debug)
EVALUATION: tuple[Rule, ...] = (_evaluate_needs,)
