"""`PPOConfig`: conversion, derived values, and a message for every rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_lightning.config import ConfigError, PPOConfig, options
from ppo_lightning.rules import known_estimators

ENOUGH: dict[str, Any] = {
    "hf_checkpoint": "model",
    "prompt_data": "prompts.jsonl",
    "label_key": "label",
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 64,
    "num_rollout": 10,
    "advantage_estimator": "ppo",
}


def resolved(**flat: Any) -> PPOConfig:
    return PPOConfig.of(**ENOUGH | flat).resolve()[0]


def problems(**flat: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        PPOConfig.of(**ENOUGH | flat).resolve()
    return caught.value.problems


def problem(**flat: Any) -> str:
    (only,) = problems(**flat)
    return only


def warnings(**flat: Any) -> str:
    return "\n".join(PPOConfig.of(**ENOUGH | flat).resolve()[1])


# ------------------------------------------------------------------------------------------ the public table
DEFAULTS = """
actor_num_nodes=1 rollout_num_gpus_per_engine=1 offload_train_target=cpu launcher=local
tensor_model_parallel_size=1 pipeline_model_parallel_size=1 context_parallel_size=1
train_backend=megatron megatron_to_hf_mode=raw advantage_estimator=grpo gamma=1.0 lambd=1.0 eps_clip=0.2
value_clip=0.2 kl_coef=0.0 kl_loss_coef=0.0 kl_loss_type=k1 entropy_coef=0.0 tis_clip=2.0
tis_clip_low=0.0 ppo_epochs=1 critic_lr_warmup_iters=0 num_critic_only_steps=0 optimizer=adam lr=1e-06
min_lr=0.0 lr_decay_style=constant lr_warmup_iters=0 weight_decay=0.1 adam_beta1=0.9 adam_beta2=0.98
adam_eps=1e-08 clip_grad=1.0 seed=1234 input_key=input rollout_seed=42 n_samples_per_prompt=1
rollout_temperature=1.0 rollout_top_p=1.0 rollout_top_k=-1 rollout_engine=hf micro_batch_size=1
n_samples_per_eval_prompt=1 max_skipped_steps=10 update_weight_buffer_size=536870912
"""
OFF_OR_ABSENT = """
critic_num_nodes critic_num_gpus_per_node rollout_num_gpus colocate offload offload_train offload_rollout
offload_train_disk_dir hf_checkpoint ref_load load save save_interval save_hf async_save ckpt_step
keep_checkpoints virtual_pipeline_model_parallel_size sequence_parallel use_distributed_optimizer
recompute_granularity recompute_method recompute_num_layers bf16 eps_clip_high eps_clip_c
normalize_advantages use_kl_loss use_unbiased_kl calculate_per_token_loss use_tis use_rollout_logprobs
critic_lr critic_load critic_save prompt_data label_key metadata_key apply_chat_template rollout_shuffle
rollout_max_prompt_len num_rollout num_epoch rollout_batch_size global_batch_size num_steps_per_rollout
rollout_max_response_len rollout_stop rollout_stop_token_ids rollout_external_urls use_dynamic_batch_size
max_tokens_per_gpu balance_data log_probs_chunk_size rm_type rm_url custom_rm_path group_rm reward_key
eval_interval eval_prompt_data eval_temperature eval_top_p eval_max_response_len output_dir use_wandb
wandb_project save_debug_rollout_data load_debug_rollout_data debug_rollout_only debug_train_only
critic_lambd observe_training_entropy over_sampling_batch_size dynamic_sampling_filter_path
update_weight_transfer_mode check_weight_update_equal auto_fallback
"""


@pytest.mark.parametrize("entry", DEFAULTS.split())
def test_default_of_the_public_table(entry: str) -> None:
    name, _, value = entry.partition("=")
    assert str(options()[name].default) == value


@pytest.mark.parametrize("name", OFF_OR_ABSENT.split())
def test_flag_of_the_public_table_without_a_default(name: str) -> None:
    assert not options()[name].default


# ------------------------------------------------------------------------------------------ conversion
def test_flat_names_reach_their_group_and_come_back() -> None:
    config = PPOConfig.of(lr=1e-5, rollout_stop=["a", "b"], rollout_stop_token_ids=(3,))
    assert (config.optimizer.lr, config.rollout.rollout_stop) == (1e-5, ("a", "b"))
    assert PPOConfig.of(**config.flat()) == config
    assert config.replace(lr=1e-6).optimizer.lr == 1e-6
    assert config.optimizer.lr == 1e-5


def test_unknown_names_and_wrong_types_are_listed_together() -> None:
    with pytest.raises(ConfigError) as caught:
        PPOConfig.of(critic_lrr=1, gamma="high", seed=1.5, colocate="yes", kl_loss_type="k4", lr=float("nan"))
    assert caught.value.problems == [
        "unknown option critic_lrr; did you mean critic_lr?",
        "gamma: a number is wanted, not 'high'",
        "seed: a whole number is wanted, not 1.5",
        "colocate: true or false is wanted, not 'yes'",
        "kl_loss_type: one of k1, k2, k3, low_var_kl is wanted, not 'k4'",
        "lr: a number is wanted, not nan",
    ]
    assert "6 problems" in str(caught.value)


def test_numbers_written_as_text_are_read_by_the_declared_type() -> None:
    config = PPOConfig.of(lr="1e-5", update_weight_buffer_size="1e9", seed=7.0, num_rollout="none")
    assert (config.optimizer.lr, config.rollout.update_weight_buffer_size) == (1e-5, 1_000_000_000)
    assert type(config.optimizer.seed) is int
    assert config.rollout.num_rollout is None


def test_large_whole_numbers_stay_exact() -> None:
    assert PPOConfig.of(seed="9007199254740993").optimizer.seed == 9007199254740993


def test_a_true_is_no_number_and_an_empty_value_no_text() -> None:
    with pytest.raises(ConfigError, match="lr: a number is wanted, not True"):
        PPOConfig.of(lr=True)
    with pytest.raises(ConfigError, match="input_key: a text is wanted, not an empty value"):
        PPOConfig.of(input_key=None)


def test_server_options_are_passed_on() -> None:
    config = PPOConfig.of(
        sglang_mem_fraction_static=0.8, sglang_enable_metrics=True, sglang_disable_radix_cache=False
    )
    assert config.rollout.sglang_args == ("--sglang-mem-fraction-static", "0.8", "--sglang-enable-metrics")
    more = config.replace(sglang_tp=2).rollout.sglang_args
    assert more == (*config.rollout.sglang_args, "--sglang-tp", "2")


def test_yaml_gives_the_same_configuration_back(tmp_path: Path) -> None:
    config = resolved(rollout_stop=("\n", "é: #"), eval_prompt_data=("a", "x.jsonl"), lr=3e-7, sglang_tp=2)
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert PPOConfig.from_yaml(path) == config
    assert PPOConfig.from_yaml(path).resolve()[0] == config


# ------------------------------------------------------------------------------------------ derived values
def test_derived_values_of_ppo() -> None:
    config = resolved(lr=2e-6, recipe="tiny_ppo", global_batch_size=16, rollout_temperature=0.8)
    assert config.logging.output_dir == "outputs/tiny_ppo"
    assert config.model.save == config.model.load == "outputs/tiny_ppo/checkpoints"
    assert config.critic.critic_save == "outputs/tiny_ppo/checkpoints_critic"
    assert config.critic.critic_lr == 2e-6
    assert config.algorithm.eps_clip_high == 0.2
    assert config.rollout.num_steps_per_rollout == 4
    assert config.evaluation.eval_temperature == 0.8
    assert config.evaluation.eval_max_response_len == 64


def test_given_values_are_kept() -> None:
    config = resolved(save="here", load="there", critic_lr=1e-3, eps_clip_high=0.28, num_steps_per_rollout=2)
    assert (config.model.load, config.critic.critic_save) == ("there", "here_critic")
    assert (config.critic.critic_lr, config.algorithm.eps_clip_high) == (1e-3, 0.28)
    assert config.rollout.global_batch_size == 32


@pytest.mark.parametrize(
    "flat",
    [
        {},
        {"context_parallel_size": 2, "colocate": True, "rollout_engine": "sglang", "rollout_num_gpus": 7},
        {"advantage_estimator": "grpo", "critic_num_nodes": 3, "offload_train_target": "disk"},
        {"load_debug_rollout_data": "x", "use_wandb": True, "update_weight_transfer_mode": "disk"},
    ],
)
def test_resolving_twice_changes_nothing(flat: dict[str, Any]) -> None:
    once = resolved(**flat)
    assert once.resolve()[0] == once
    assert once.resolve(cuda=True, device_count=4)[0] == once


def test_ranks_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    small = PPOConfig.of(**ENOUGH)
    layout = small.replace(pipeline_model_parallel_size=2, context_parallel_size=2)
    assert small.resolve()[0].cluster.actor_num_gpus_per_node == 1
    assert layout.resolve()[0].cluster.actor_num_gpus_per_node == 4
    assert small.resolve(cuda=True)[0].cluster.actor_num_gpus_per_node == 8
    assert small.resolve(cuda=True, device_count=2)[0].cluster.actor_num_gpus_per_node == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = small.resolve()[0]
    assert (config.cluster.actor_num_gpus_per_node, config.world_size, config.data_parallel_size) == (4, 4, 4)


def test_engines_a_run_starts() -> None:
    assert resolved(actor_num_gpus_per_node=4).cluster.rollout_num_gpus == 4
    server: dict[str, Any] = {"rollout_engine": "sglang", "rollout_num_gpus_per_engine": 2}
    assert resolved(**server).cluster.rollout_num_gpus == 2
    far = resolved(**server, rollout_external_urls=("http://a", "http://b"))
    assert (far.cluster.rollout_num_gpus, far.rollout.update_weight_transfer_mode) == (4, "distributed")


# ------------------------------------------------------------------------------------------ the ten rules
def test_rule_1_the_estimator_alone_builds_the_critic() -> None:
    assert resolved().ppo
    grpo = resolved(advantage_estimator="grpo")
    assert not grpo.ppo
    assert grpo.critic.critic_save is None
    assert "--critic-lr ignored: only --advantage-estimator ppo has a critic" in warnings(
        advantage_estimator="grpo", critic_lr=1e-5
    )


def test_unknown_estimator_names_the_nearest() -> None:
    message = problem(advantage_estimator="reinforce_plus")
    assert "did you mean reinforce_plus_plus?" in message
    assert "grpo" in message


def test_estimators_are_those_that_are_registered() -> None:
    from ppo_lightning.advantages import REGISTRY

    assert known_estimators() == sorted(REGISTRY)


def test_rule_2_backend() -> None:
    assert "use --train-backend megatron" in problem(train_backend="fsdp")
    assert "use --megatron-to-hf-mode raw" in problem(megatron_to_hf_mode="bridge")


def test_rule_3_kl_in_the_reward_of_ppo() -> None:
    message = problem(kl_coef=0.05)
    assert "the critic trains before the actor and never sees the reference log-probs" in message
    assert "--use-kl-loss --kl-loss-type k2 --kl-loss-coef 0.05" in message  # k1 would be no penalty at all
    resolved(kl_coef=0.05, advantage_estimator="grpo")


def test_rule_4_the_critic_lives_with_the_actor() -> None:
    flat = {"actor_num_gpus_per_node": 2, "critic_num_gpus_per_node": 1, "critic_num_nodes": 1}
    assert resolved(**flat).cluster.critic_num_gpus_per_node == 2
    said = warnings(**flat)
    assert "--critic-num-gpus-per-node 1 is overwritten with --actor-num-gpus-per-node 2" in said
    assert "--critic-num-nodes" not in said


def test_rule_5_layout_must_divide_the_world() -> None:
    message = problem(tensor_model_parallel_size=2, context_parallel_size=2, actor_num_gpus_per_node=6)
    assert "TP 2 x PP 1 x CP 2 = 4 does not divide the world of 6 ranks" in message
    assert "use 4 or 8 ranks" in message


def test_rule_6_offload() -> None:
    assert resolved().cluster.offload_train is True
    assert resolved(advantage_estimator="grpo").cluster.offload_train is False
    assert resolved(offload_train=False).cluster.offload_train is False
    assert "both stay resident" in warnings(offload_train=False)
    assert "resident" not in warnings()
    both = resolved(offload=True, advantage_estimator="grpo").cluster
    assert (both.offload_train, both.offload_rollout) == (True, True)


@pytest.mark.parametrize(
    ("flat", "cures"),
    [
        ({"global_batch_size": 30}, ["--global-batch-size 16 or 32", "--rollout-batch-size 15"]),
        ({"num_steps_per_rollout": 3}, ["--num-steps-per-rollout 2 or 4"]),
        (
            {"global_batch_size": 16, "num_steps_per_rollout": 2},
            ["--num-steps-per-rollout 4 or --global-batch-size 32"],
        ),
        ({"global_batch_size": 128}, ["--global-batch-size 64", "--rollout-batch-size 16"]),
        ({"global_batch_size": 24, "num_steps_per_rollout": 3}, ["--global-batch-size 16 or 32"]),
    ],
)
def test_rule_7_the_rollout_divides_into_optimizer_batches(flat: dict[str, Any], cures: list[str]) -> None:
    message = problem(**flat)
    assert "--rollout-batch-size 8 x --n-samples-per-prompt 8 = 64 samples" in message
    for cure in cures:
        assert cure in message


def test_rule_7_each_of_the_two_derives_the_other() -> None:
    assert resolved(global_batch_size=32).rollout.num_steps_per_rollout == 2
    assert resolved(num_steps_per_rollout=4).rollout.global_batch_size == 16
    assert resolved().rollout.global_batch_size == 64
    resolved(global_batch_size=16, num_steps_per_rollout=4)


def test_rule_8_critic_load(tmp_path: Path) -> None:
    save = str(tmp_path / "critic")
    resolved(critic_load=save, critic_save=save)  # the place of a first run, still empty
    message = problem(critic_load=str(tmp_path / "other"), critic_save=save)
    assert "other holds no checkpoint" in message
    assert "drop the flag" in message
    (tmp_path / "other" / "iter_0000020").mkdir(parents=True)
    resolved(critic_load=str(tmp_path / "other"))
    (tmp_path / "tracked").mkdir()
    (tmp_path / "tracked" / "latest_checkpointed_iteration.txt").write_text("20")
    resolved(critic_load=str(tmp_path / "tracked"))


def test_rule_8_ref_load_where_kl_is_used(tmp_path: Path) -> None:
    flat = {"ref_load": str(tmp_path), "kl_loss_coef": 0.1}
    assert "--ref-load" in problem(**flat, use_kl_loss=True)
    resolved(ref_load=str(tmp_path))  # nothing reads it
    (tmp_path / "model.safetensors").write_bytes(b"")
    resolved(**flat, use_kl_loss=True)


@pytest.mark.parametrize(
    ("flat", "part"),
    [
        (
            {"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True, "advantage_estimator": "grpo"},
            "set one of them to 0",
        ),
        ({"use_rollout_logprobs": True, "use_tis": True}, "--use-rollout-logprobs with --use-tis"),
        ({"use_dynamic_batch_size": True}, "needs --max-tokens-per-gpu"),
        ({"eps_clip_c": 1.0}, "--eps-clip-c 1: the dual clip's bound must be above 1"),
        ({"rollout_temperature": 0.0}, "must be above 0"),
        ({"rollout_temperature": -1.0}, "must be above 0"),
        ({"num_rollout": None}, "neither --num-rollout nor --num-epoch"),
    ],
)
def test_rule_9(flat: dict[str, Any], part: str) -> None:
    assert part in problem(**flat)


def test_rule_10_monitoring_kl_says_so() -> None:
    assert "only monitors the KL; it costs a forward pass" in warnings(use_kl_loss=True)
    assert "monitors" not in warnings(use_kl_loss=True, kl_loss_coef=0.1)


@pytest.mark.parametrize(
    ("kind", "unbiased", "said"),
    [
        ("k1", False, "gradient is 0 on average"),
        ("k3", False, "the other direction"),
        ("low_var_kl", False, "the other direction"),
        ("k2", False, ""),
        ("k2", True, "biases its gradient"),
        ("k3", True, ""),
    ],
)
def test_a_kl_loss_with_a_biased_gradient_is_named(kind: str, unbiased: bool, said: str) -> None:
    text = warnings(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=kind, use_unbiased_kl=unbiased)
    assert said in text
    assert bool(text) == bool(said)


# ------------------------------------------------------------------------------------------ further rules
@pytest.mark.parametrize(
    ("flat", "part"),
    [
        ({"sequence_parallel": True}, "needs --tensor-model-parallel-size above 1"),
        ({"virtual_pipeline_model_parallel_size": 2}, "needs --pipeline-model-parallel-size above 1"),
        ({"recompute_granularity": "full"}, "add --recompute-method uniform --recompute-num-layers 1"),
        ({"recompute_num_layers": 1}, "belong to --recompute-granularity full"),
        ({"optimizer": "sgd", "use_distributed_optimizer": True}, "use --optimizer adam"),
        ({"min_lr": 1e-3, "critic_lr": 1.0}, "--min-lr 0.001 is above --lr 1e-06"),
        ({"lr_decay_style": "cosine", "lr_warmup_iters": 10}, "must end before the decay does (10"),
        ({"lr_decay_style": "cosine", "critic_lr_warmup_iters": 99}, "--critic-lr-warmup-iters 99"),
        ({"rollout_top_k": 0}, "use -1 for all tokens"),
        ({"rollout_external_urls": ("http://a",)}, "add --rollout-engine sglang"),
        (
            {"rollout_engine": "sglang", "rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
            "--rollout-num-gpus 3 is no multiple",
        ),
        ({"over_sampling_batch_size": 4}, "is below --rollout-batch-size 8"),
        ({"custom_rm_path": "f/x.py"}, "pkg.module:function"),
        ({"apply_chat_template_kwargs": "[1]"}, "is no JSON object"),
        ({"critic_save": "a", "save": "a"}, "one would overwrite the other"),
        ({"group_rm": True}, "give --custom-rm-path"),
        ({"rm_type": "maths"}, "did you mean 'math'"),
        ({"rm_type": "remote_rm"}, "needs --rm-url"),
        ({"rm_type": "model"}, "needs --reward-model-path"),
        ({"rm_type": "random,math:0.5", "label_key": None}, "--rm-type math compares with a label"),
        ({"eval_prompt_data": ("a",)}, "pairs of NAME PATH"),
        ({"eval_prompt_data": ("a", "x", "a", "y")}, "gives a name twice"),
        ({"eval_interval": 5}, "without --eval-prompt-data"),
        ({"monitor": "eval/a/mean"}, "needs evaluation"),
        ({"kl_loss_coef": 0.1}, "without --use-kl-loss"),
        ({"use_unbiased_kl": True}, "without --use-kl-loss"),
        ({"kl_target": 6.0}, "--kl-target adapts --kl-coef"),
        ({"tis_clip_low": 3.0}, "is above --tis-clip 2"),
        ({"debug_train_only": True}, "needs --load-debug-rollout-data"),
        ({"debug_rollout_only": True, "load_debug_rollout_data": "x"}, "keep one side"),
        ({"save_debug_rollout_data": "all.pt"}, "write {rollout_id} into the name"),
        (
            {
                "advantage_estimator": "dr_grpo",
                "load_debug_rollout_data": "{rollout_id}.pt",
                "rollout_max_response_len": None,
            },
            "dr_grpo divides the loss by --rollout-max-response-len, which is not given",
        ),
        ({"hf_checkpoint": None}, "--hf-checkpoint is not given"),
        ({"prompt_data": None}, "--prompt-data is not given"),
        ({"rollout_batch_size": None}, "--rollout-batch-size is not given"),
        ({"rollout_max_response_len": None}, "--rollout-max-response-len is not given"),
    ],
)
def test_what_does_not_go_together(flat: dict[str, Any], part: str) -> None:
    assert part in problem(**flat)


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"lr": 0.0}, "--lr 0.0: must be above 0"),
        ({"gamma": 1.01}, "--gamma 1.01: must be at most 1"),
        ({"lambd": -0.1}, "--lambd -0.1: must be at least 0"),
        ({"n_samples_per_prompt": 0}, "--n-samples-per-prompt 0: must be at least 1"),
        ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 0: must be at least 1"),
        ({"rollout_top_p": 0.0}, "--rollout-top-p 0.0: must be above 0"),
        ({"eval_temperature": -1.0}, "--eval-temperature -1.0: must be at least 0"),
    ],
)
def test_ranges(flat: dict[str, Any], message: str) -> None:
    assert problem(**flat) == message


def test_every_number_has_a_bound() -> None:
    numbers = [o for o in options().values() if o.base in (int, float) and not o.many]
    free = [o.name for o in numbers if not {"above", "at_least", "at_most"} & set(o.metadata)]
    # two with rules of their own, and one that may be any reward
    assert free == ["eps_clip_c", "rollout_temperature", "eval_solved_at"]
    for text in ("nan", "inf"):
        with pytest.raises(ConfigError, match="a number is wanted"):
            PPOConfig.of(eval_solved_at=text)


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        PPOConfig.of(advantage_estimator="ppo", lr=-1.0, kl_coef=0.1, sequence_parallel=True).resolve()
    assert len(caught.value.problems) == 8
    assert str(caught.value).startswith("8 problems in the configuration:\n  1. ")


def test_warnings_about_what_has_no_effect() -> None:
    assert "--num-epoch is ignored" in warnings(num_epoch=1)
    assert "--sglang-tp is ignored" in warnings(sglang_tp=2)
    assert "the actor never trains" in warnings(num_critic_only_steps=10)
    assert "every advantage is 0" in warnings(advantage_estimator="grpo", n_samples_per_prompt=1)
    assert "--rollout-num-gpus 3 is overwritten with 1" in warnings(rollout_num_gpus=3)
    assert warnings() == ""


@pytest.mark.parametrize(
    ("flat", "part"),
    [
        ({"policy_loss_type": "cispo", "advantage_estimator": "gspo"}, "not gspo's of the sequence"),
        ({"policy_loss_type": "cispo", "eps_clip_c": 3.0}, "--eps-clip-c 3 is ignored"),
        ({"overlong_buffer_len": 65}, "above --rollout-max-response-len 64: every response is punished"),
        ({"over_sampling_batch_size": 16}, "--over-sampling-batch-size 16 is ignored"),
    ],
)
def test_an_option_that_another_one_makes_idle_is_named(flat: dict[str, Any], part: str) -> None:
    (said,) = PPOConfig.of(**ENOUGH | flat).resolve()[1]
    assert part in said


def test_no_word_where_the_options_fit() -> None:
    assert warnings(policy_loss_type="cispo", advantage_estimator="grpo") == ""
    assert warnings(advantage_estimator="gspo", eps_clip_c=3.0) == ""
    assert warnings(overlong_buffer_len=64) == ""
    assert warnings(over_sampling_batch_size=16, dynamic_sampling_filter_path="a:b") == ""
    assert warnings(over_sampling_batch_size=16, partial_rollout=True) == ""


def test_evaluation_asks_for_its_own_needs_only() -> None:
    flat = {"hf_checkpoint": "m", "eval_prompt_data": ("a", "x"), "eval_max_response_len": 8}
    PPOConfig.of(**flat).resolve(command="evaluate")
    with pytest.raises(ConfigError) as caught:
        PPOConfig().resolve(command="evaluate")
    assert [p.split()[0] for p in caught.value.problems] == [
        "--hf-checkpoint",
        "--eval-prompt-data",
        "--eval-max-response-len",
    ]
