"""Flags and YAML: precedence, messages, and the generated reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_lightning import flags
from ppo_lightning.config import ConfigError, PPOConfig, options

ROOT = Path(__file__).resolve().parent.parent


def parse(*argv: str, recipe: PPOConfig | None = None) -> flags.Arguments:
    return flags.parse(argv, prog="test", description="", recipe=lambda name: recipe or PPOConfig())


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    return caught.value.problems


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_precedence_defaults_recipe_yaml_flags(tmp_path: Path) -> None:
    recipe = PPOConfig.of(lr=1.0, critic_lr=1.0, min_lr=1.0, weight_decay=1.0)
    first = write(tmp_path / "a.yaml", "optimizer: {lr: 2.0, min_lr: 2.0}\ncritic-lr: 2.0\n")
    second = write(tmp_path / "b.yaml", "lr: 3.0\ncritic: {critic_lr: 3.0}\n")
    found = parse("--lr", "4.0", "--recipe", "r", "--config", first, "--config", second, recipe=recipe)
    o = found.config.optimizer
    assert (o.adam_beta2, o.weight_decay, o.min_lr, found.config.critic.critic_lr, o.lr) == (0.98, 1, 2, 3, 4)
    assert found.config.recipe == "r"
    assert found.recipe.optimizer.lr == 1.0


@pytest.mark.parametrize(
    ("given", "kept"), [("math", None), ("math:0.5+custom:0.5", "mine:score"), (None, "mine:score")]
)
def test_a_reward_that_is_named_replaces_the_recipes_function(given: str | None, kept: str | None) -> None:
    recipe = PPOConfig.of(custom_rm_path="mine:score")
    flags = ["--rm-type", given] if given else []
    assert parse(*flags, "--recipe", "r", recipe=recipe).config.reward.custom_rm_path == kept
    assert parse("--rm-type", "math", "--custom-rm-path", "a:b").config.reward.custom_rm_path == "a:b"


def test_every_kind_of_flag() -> None:
    config = parse(
        *["--rollout-top-k", "-1", "--lr=3e-5", "--colocate", "--no-use-tensorboard", "--eps-clip-c", "none"],
        *["--rollout-stop", "a", "b c", "--rollout-stop-token-ids", "3", "5", "--kl-loss-type", "k3"],
        *[
            "--eval-prompt-data",
            "one",
            "1.jsonl",
            "two",
            "2.jsonl",
            "--rollout-external-engine-addrs",
            "http://x",
        ],
    ).config
    assert config.rollout.rollout_top_k == -1
    assert config.optimizer.lr == 3e-5
    assert (config.cluster.colocate, config.logging.use_tensorboard) == (True, False)
    assert config.rollout.rollout_stop == ("a", "b c")
    assert config.rollout.rollout_stop_token_ids == (3, 5)
    assert config.evaluation.eval_prompt_data == ("one", "1.jsonl", "two", "2.jsonl")
    assert config.rollout.rollout_external_urls == ("http://x",)


def test_every_option_has_its_flag() -> None:
    texts = {bool: [], int: ["3"], float: ["0.5"], str: ["x"]}
    values = {bool: True, int: 3, float: 0.5, str: "x"}
    argv, expected = [], {}
    for name, option in options().items():
        choices = isinstance(option.base, tuple)
        argv += [option.flag, *([option.base[-1]] if choices else texts[option.base])]
        value = option.base[-1] if choices else values[option.base]
        expected[name] = (value,) if option.many else value
    assert parse(*argv).config.flat() == expected


def test_flags_of_the_server_are_kept_as_written() -> None:
    config = parse("--sglang-mem-fraction-static", "0.8", "--sglang-enable-metrics", "--seed", "3",
                   "--sglang-cuda-graph-bs", "1", "2", "--sglang-x=-1").config  # fmt: skip
    assert config.optimizer.seed == 3
    assert config.rollout.sglang_args == (
        *("--sglang-mem-fraction-static", "0.8", "--sglang-enable-metrics"),
        *("--sglang-cuda-graph-bs", "1", "2", "--sglang-x=-1"),
    )
    assert parse("--sglang-server-concurrency", "4").config.rollout.sglang_args == ()


def test_all_wrong_flags_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "optimizer: {lr: fast}\n")
    found = problems(
        *["--critic-lrr", "1e-5", "--rollout_batch_size", "8", "--seed", "x", "--kl-loss-type", "k4"],
        *["--config", path],
    )
    assert found == [
        "unknown flag --critic-lrr; did you mean --critic-lr?",
        "unknown flag --rollout_batch_size; did you mean --rollout-batch-size?",
        f"{path}: lr: a number is wanted, not 'fast'",
        "--seed: a whole number is wanted, not 'x'",
        "--kl-loss-type: one of k1, k2, k3, low_var_kl is wanted, not 'k4'",
    ]
    assert problems("stray") == ["unexpected argument 'stray'"]
    assert "expected one argument" in problems("--lr")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("critic_lrr: 1", "unknown option critic_lrr; did you mean critic_lr?"),
        ("optimiser: {lr: 1}", "unknown group optimiser; did you mean optimizer?"),
        ("optimizer: {gamma: 1}", "gamma belongs to algorithm, not to optimizer; move it"),
        ("lr: 1\nlr: 2", "lr is given twice; keep one"),
        ("optimizer: {lr: 1}\nlr: 2", "lr is given twice; keep one"),
        ("model: 3", "model is a group: options are wanted under it, not 3"),
        ("use_tis: 1", "use_tis: true or false is wanted, not 1"),
        ("rollout_stop: {a: 1}", "rollout_stop: a list is wanted"),
        ("data: {prompt_data: [a]}", "prompt_data: a text is wanted, not ['a']"),
        ("- lr", "options are wanted as KEY: VALUE, not list"),
        ("lr: [", "is no YAML: while parsing a flow"),
    ],
)
def test_yaml_messages_name_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "run.yaml", text)
    (found,) = problems("--config", path)
    assert found.startswith(path)
    assert message in found


def test_yaml_that_is_not_there(tmp_path: Path) -> None:
    assert problems("--config", str(tmp_path / "no.yaml")) == [
        f"--config {tmp_path / 'no.yaml'}: No such file or directory"
    ]


def test_yaml_of_every_form(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.yaml",
        "optimizer: adam\nrollout:\n  rollout-batch-size: 8\n  sglang_tp: 2\n  rollout_stop: x\nlr: 1e-5\n"
        "data: {apply_chat_template_kwargs: {enable_thinking: false}}\n"
        "critic:\nrollout_max_prompt_len: null\n",
    )
    config = parse("--config", path, "--sglang-dp", "1").config
    assert config.rollout.rollout_batch_size == 8
    assert config.rollout.sglang_args == ("--sglang-tp", "2", "--sglang-dp", "1")
    assert config.rollout.rollout_stop == ("x",)
    assert config.optimizer.lr == 1e-5
    assert config.data.apply_chat_template_kwargs == '{"enable_thinking": false}'
    assert parse("--config", write(tmp_path / "empty.yaml", "")).config == PPOConfig()


def test_a_recipe_may_be_named_in_yaml(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "recipe: mine\nlr: 2.0\n")
    config = parse("--config", path, recipe=PPOConfig.of(lr=1.0, min_lr=1.0)).config
    assert (config.recipe, config.optimizer.lr, config.optimizer.min_lr) == ("mine", 2.0, 1.0)


def test_the_reference_is_up_to_date() -> None:
    written = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert written == flags.reference(), "run: python -m ppo_lightning.flags > docs/flags.md"
    assert all(
        f"`{o.flag}" in written or f"`--[no-]{o.flag[2:]}`" in written for o in options().values() if o.group
    )
