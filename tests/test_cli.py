"""The command line as a user meets it: real processes for exit codes, real models for the plan's numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ppo_lightning import cli
from ppo_lightning.architecture import ModelShape, layout_problems
from ppo_lightning.checks import check_files, visible_gpus
from ppo_lightning.config import ConfigError, PPOConfig
from ppo_lightning.dryrun import batch_arithmetic, memory, places
from ppo_lightning.failures import Guard, describe

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
RECIPE = """
import sys, time
from ppo_lightning.config import PPOConfig

def config():
    return PPOConfig.of(
        hf_checkpoint="prepared/model", prompt_data="prepared/train.jsonl", rollout_batch_size=4,
        rollout_max_response_len=8, num_rollout=2, advantage_estimator="ppo", rm_type="random",
        tensor_model_parallel_size=2)

def model_config():
    return {shape}

def prepare(config):
    print("ready", config.logging.output_dir, flush=True)
    if config.optimizer.seed == 1:
        raise RuntimeError("no network" + chr(10) + "second line")
    if config.optimizer.seed == 2:
        time.sleep(60)
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(RECIPE.replace("{shape}", repr(SHAPE)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return path


def command(*argv: str, **kwargs: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ppo_lightning", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def config(**flat: Any) -> PPOConfig:
    enough = {
        "hf_checkpoint": "m",
        "prompt_data": "p",
        "rollout_batch_size": 8,
        "rollout_max_response_len": 64,
    }
    return PPOConfig.of(**enough | {"num_rollout": 10, "advantage_estimator": "ppo"} | flat).resolve()[0]


# --------------------------------------------------------------------------------- parsing and printing
def test_nothing_before_a_run_imports_torch(recipe: Path) -> None:
    script = (
        "import sys\n"
        "from ppo_lightning.cli import main\n"
        "def run(*argv):\n"
        "    try: return main(list(argv))\n"
        "    finally: assert not {'torch', 'lightning', 'transformers'} & set(sys.modules), argv\n"
        f"recipe = ('--recipe', {str(recipe)!r})\n"
        "assert run('fit', '--help') == 0\n"
        "assert run('--help') == 0\n"
        "assert run('fit', *recipe, '--print-config') == 0\n"
        "assert run('fit', *recipe, '--dry-run') == 0\n"
        "assert run('fit', *recipe, '--lr', '0') == 2\n"
        "assert run('fit', '--recipe', 'nothing') == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--num-critic-only-steps" in done.stdout


def test_printed_configuration_runs_again_to_itself(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        cli.main(["fit", "--recipe", str(recipe), "--lr", "1e-5", "--sglang-tp", "2", "--print-config"]) == 0
    )
    first = capsys.readouterr()
    assert "--sglang-tp is ignored" in first.err
    (tmp_path / "run.yaml").write_text(first.out, encoding="utf-8")
    assert cli.main(["fit", "--config", "run.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == first.out
    assert "outputs/mine/checkpoints_critic" in first.out


@pytest.mark.parametrize("name", cli.recipe_names())
def test_recipes_print_their_configuration_before_anything_is_prepared(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--recipe", name, "--print-config"]) == 0
    first = capsys.readouterr().out
    Path("run.yaml").write_text(first, encoding="utf-8")
    assert cli.main(["fit", "--config", "run.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == first
    assert f"output_dir: outputs/{name}\n" in first
    # the name with dashes is the same run
    assert cli.main(["fit", "--recipe", name.replace("_", "-"), "--print-config"]) == 0
    assert capsys.readouterr().out == first


def test_a_recipe_file_runs_once_also_as_a_script(tmp_path: Path, recipe: Path) -> None:
    """What it registers is registered once, and its functions can be named as those of a module."""
    source = recipe.read_text().replace("rm_type=", "custom_rm_path='mine:reward', rm_type=")
    recipe.write_text(
        f"{source}\nprint('executed')\n\ndef reward(sample):\n    return 1.0\n\n"
        "if __name__ == '__main__':\n"
        "    from ppo_lightning.cli import run_recipe\n"
        "    raise SystemExit(run_recipe(__file__))\n"
    )
    (tmp_path / "elsewhere").mkdir()
    for start in (["../mine.py"], ["-m", "ppo_lightning", "fit", "--recipe", "../mine.py"]):
        done = subprocess.run(
            [sys.executable, *start, "--dry-run"], cwd=tmp_path / "elsewhere", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("executed") == 1


def test_a_function_that_is_not_there_is_told_with_all_else_before_torch(recipe: Path) -> None:
    script = (
        "import sys\n"
        "from ppo_lightning.cli import main\n"
        f"code = main(['fit', '--recipe', {str(recipe)!r}, '--custom-rm-path', 'no_such:f', '--lr', '0'])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "--custom-rm-path 'no_such:f': No module named 'no_such'" in done.stderr
    assert "--lr 0" in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fitt"], "unknown command fitt; did you mean fit?"),
        (["fit", "--recipe", "no_such"], "unknown recipe no_such"),
        (["fit", "--recipe", "no_such.py"], "--recipe no_such.py: there is no such file"),
        (["fit", "--critic-lrr", "1"], "did you mean --critic-lr?"),
        (["fit"], "--hf-checkpoint is not given"),
        (["evaluate"], "--eval-prompt-data is not given"),
        (["prepare", "--seed", "1"], "prepare needs a recipe"),
        (["report"], "report needs a run's directory"),
        (["report", "nowhere"], "nowhere holds no metrics.csv"),
        (["convert", "--form", "hf"], "unknown flag --form; did you mean --from?"),
        (["convert", "--from", "hf", "--to", "torch_dist"], "required: --source, --target"),
        (["convert", "--from", "hf", "--to", "hf", "--source", "no", "--target", "x"], "give one hf and one"),
        (["convert", "--from", "hf", "--to", "hf", "--source", "no", "--target", "x"], "no is no directory"),
        (
            ["convert", "--from", "torch_dist", "--to", "hf", "--source", ".", "--target", "x"],
            "--from torch_dist needs --hf-checkpoint",
        ),
    ],
)
def test_bad_usage_is_one_message_and_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err


def test_an_unknown_recipe_lists_those_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.recipe_names() == sorted(
        p.stem for p in Path(cli.__file__).parent.parent.glob("recipes/[!_]*.py")
    )
    monkeypatch.setattr(cli, "recipe_names", lambda: ["tiny_ppo", "other"])
    assert cli.main(["fit", "--recipe", "tiny_po"]) == 2
    assert "did you mean tiny_ppo?; there are tiny_ppo, other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n1 / 0\n", "ZeroDivisionError: division by zero (line 2)"),
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it' (line 1)"),
        ("x = (", "SyntaxError: '(' was never closed (faulty.py, line 1)"),
    ],
)
def test_a_faulty_recipe_is_named_with_the_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(text)
    assert cli.main(["fit", "--recipe", str(file)]) == 2
    assert capsys.readouterr().err == f"error: --recipe {file} does not run: {message}\n"


def test_a_run_without_a_reward_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_directory(tmp_path / "prepared" / "model")
    (tmp_path / "prepared" / "train.jsonl").write_text('{"input": "x"}\n')
    assert cli.run_recipe(str(recipe), ["--rm-type", "none"]) == 2
    assert "nothing scores the responses" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ how a run ends
def test_a_failure_is_one_line_with_its_traceback_in_the_log(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "mine").mkdir(parents=True)
    process = command("prepare", "--recipe", str(recipe), "--seed", "1")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == "ready outputs/mine\n"
    assert err.splitlines() == ["error: RuntimeError: no network", "traceback: outputs/mine/log.txt"]
    log = (tmp_path / "outputs" / "mine" / "log.txt").read_text()
    assert "in prepare" in log
    assert "second line" in log


def test_traceback_on_the_screen_when_asked_for(recipe: Path) -> None:
    given = ["prepare", "--recipe", str(recipe), "--seed", "1"]
    environment = os.environ | {"PPO_LIGHTNING_TRACEBACK": "1"}
    for process in (command(*given, "--debug-traceback"), command(*given, env=environment)):
        assert "in prepare" in process.communicate(timeout=60)[1]
        assert process.returncode == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(recipe: Path, number: int, code: int) -> None:
    process = command("prepare", "--recipe", str(recipe), "--seed", "2")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.endswith("what is whole stays, and the same command makes what is missing\n")
    assert "Traceback" not in err


def test_an_exit_after_ctrl_c_still_counts_as_interrupted() -> None:
    def lightning() -> None:  # its Trainer ends so when Ctrl-C arrives
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            sys.exit(1)

    before = signal.getsignal(signal.SIGINT)
    assert Guard().run(lightning) == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_every_command_says_what_becomes_of_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: Any, guard: Guard) -> None:
        raise KeyboardInterrupt

    for name in cli.COMMANDS:
        monkeypatch.setitem(cli.COMMANDS, name, interrupted)
        assert cli.main([name]) == 130
        said = capsys.readouterr().err
        assert ("the last checkpoint" in said) == (name == "fit")
        assert "the same command" in said


def test_exits_of_a_command() -> None:
    assert Guard().run(lambda: None) == 0
    assert Guard().run(lambda: sys.exit(0)) == 0
    assert Guard().run(lambda: sys.exit(3)) == 3
    assert Guard().run(lambda: sys.exit("said")) == 1


def test_messages_of_errors_from_below() -> None:
    import socket

    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen()
        with pytest.raises(OSError, match="in use") as caught:
            second.bind(first.getsockname())
    assert "a port is in use" in describe(caught.value)
    assert "MASTER_PORT" in describe(caught.value)
    with pytest.raises(OSError, match="nowhere") as missing:
        Path("nowhere/x").read_text()
    assert describe(missing.value) == "nowhere/x: No such file or directory"
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert describe(ConfigError(["a", "b"])).endswith("1. a\n  2. b")


def test_only_the_first_rank_repeats_a_bad_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli.main(["fit"]) == 2
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------ files
def make_directory(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(SHAPE | changes))
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_files_that_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_directory(tmp_path / "m")
    (tmp_path / "p").write_text("{}\n")
    assert check_files(config()) == []
    assert not (tmp_path / "outputs").exists()


def test_every_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    found = check_files(
        config(
            eval_prompt_data=("a", "file"), output_dir="file/out", load="elsewhere", save="s", recipe="tiny"
        )
    )
    assert [line.split(";")[0] for line in found] == [
        "--hf-checkpoint m is no directory",
        "--load elsewhere holds no checkpoint",
        "--prompt-data p does not exist",
        "--eval-prompt-data file is empty",
        f"--output-dir file/out cannot be written: {tmp_path / 'file'} is a file",
    ]
    assert "`ppo-lightning prepare --recipe tiny` makes it" in found[0]


def test_a_model_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").write_text("{}\n")
    (make_directory(tmp_path / "m") / "model.safetensors").unlink()
    assert ["has no weights" in line for line in check_files(config())] == [True]
    (tmp_path / "outputs/ppo/checkpoints/iter_0000003").mkdir(parents=True)
    assert check_files(config()) == []
    assert check_files(config(ckpt_step=2)) == [
        "--ckpt-step 2: outputs/ppo/checkpoints has no such iteration; there are 3"
    ]


UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform"}


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (
            {"tensor_model_parallel_size": 4},
            "TP 4 does not divide 6 attention heads and 6 key/value heads; use 1, 2, 3 or 6",
        ),
        (
            {"pipeline_model_parallel_size": 6},
            "PP 6 leaves stages without a layer: the model has 4; use at most 4",
        ),
        (
            UNIFORM | {"recompute_num_layers": 3},
            "3 layers recomputed together do not divide 4 layers; use 1, 2 or 4",
        ),
        (
            UNIFORM | {"recompute_num_layers": 2, "pipeline_model_parallel_size": 3},
            "PP 3 leaves stages without a layer: the model has 4, recomputed 2 at a time; use at most 2",
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
            "PP 2 x VPP 4 does not divide 4 layers; use VPP 1 or 2",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_model(flat: dict[str, Any], message: str) -> None:
    assert [m for _, m in layout_problems(ModelShape.of(SHAPE), config(**flat))] == [message]


def test_an_unsupported_architecture_is_named() -> None:
    ((_, message),) = layout_problems(ModelShape.of(SHAPE | {"model_type": "mamba"}), config())
    assert "'mamba' is not supported; supported are llama, qwen2, qwen3" in message


def test_visible_gpus_agrees_with_torch() -> None:
    import torch

    assert visible_gpus() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


# ------------------------------------------------------------------------------------------ the plan
@pytest.mark.parametrize("arch", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameter_counts_are_those_of_transformers(arch: str, tied: bool, tmp_path: Path) -> None:
    from tests.tinymodel import make_tiny_model

    model = make_tiny_model(tmp_path, arch, tie_word_embeddings=tied)
    shape = ModelShape.read(tmp_path)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert shape.parameters() == sum(sizes.values())
    critic = sum(size for name, size in sizes.items() if "lm_head" not in name) + 64 + 1
    assert shape.parameters(value_head=True) == critic
    # two tensor ranks halve every matrix (the vocabulary of 320 divides) and share every norm
    halved = sum(p.numel() // (2 if p.dim() == 2 else 1) for p in model.parameters())
    assert shape.parameters_on(0, tp=2, pp=1) == halved
    # two stages hold it all, a tied embedding twice
    both = sum(shape.parameters_on(stage, tp=1, pp=2) for stage in (0, 1))
    assert both == sum(sizes.values()) + (320 * 64 if tied else 0)


@pytest.mark.parametrize(
    ("layers", "vocab", "pp", "actor", "critic"),
    [
        (8, 8192, 2, (5, 3), (4, 4)),  # the output layer is as much as 2.4 layers: 5 and 5.4, not 4 and 6.4
        (8, 512, 2, (4, 4), (4, 4)),  # as 0.15 layers: 4 and 4.15
        (8, 8192, 4, (2, 2, 3, 1), (2, 2, 2, 2)),
        (7, 512, 2, (4, 3), (3, 4)),
        (10, 8192, 3, (4, 4, 2), (3, 4, 3)),
        (3, 100_000, 3, (1, 1, 1), (1, 1, 1)),
    ],
)
def test_stages_have_as_much_to_multiply(
    layers: int, vocab: int, pp: int, actor: tuple[int, ...], critic: tuple[int, ...]
) -> None:
    shape = ModelShape("qwen3", layers, 384, 768, 4, 2, 96, vocab, True, 1024)
    assert shape.stage_layers(pp) == actor
    assert shape.stage_layers(pp, value_head=True) == critic


def test_layers_that_are_recomputed_together_stay_on_one_stage() -> None:
    shape = ModelShape("qwen3", 8, 384, 768, 4, 2, 96, 8192, True, 1024)
    assert shape.stage_layers(2, chunk=2) == (6, 2)  # 6 and 4.4 rather than 4 and 6.4
    assert shape.stage_layers(2, chunk=4) == (4, 4)


def test_stages_of_every_size_hold_every_layer() -> None:
    for layers in range(1, 30):
        for pp in range(1, layers + 1):
            shape = ModelShape("qwen3", layers, 64, 128, 4, 2, 16, 2048, True, 1024)
            for value_head in (False, True):
                stages = shape.stage_layers(pp, value_head=value_head)
                assert sum(stages) == layers
                assert min(stages) >= 1
                assert len(stages) == pp


def test_ranks_stand_where_megatron_puts_them() -> None:
    from megatron.core.parallel_state import RankGenerator

    plan = places(
        config(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            context_parallel_size=2,
            actor_num_gpus_per_node=8,
            actor_num_nodes=2,
        )
    )
    megatron = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=2, order="tp-cp-ep-dp-pp")
    for axis in ("tp", "cp", "dp", "pp"):
        for group in megatron.get_ranks(axis):
            assert [getattr(plan[rank], axis) for rank in group] == list(range(2)), axis
    assert [p.node for p in plan] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("flat", "bytes_each"),
    [
        ({}, 4 + 4 + 8),  # fp32: weights, gradients, two moments
        ({"bf16": True}, 2 + 4 + 4 + 8),  # and fp32 main weights
        ({"optimizer": "sgd"}, 4 + 4 + 4),
        (
            {"bf16": True, "use_distributed_optimizer": True, "actor_num_gpus_per_node": 4},
            2 + 4 + (4 + 8) / 4,
        ),
    ],
)
def test_memory_of_a_trained_model(flat: dict[str, Any], bytes_each: float) -> None:
    shape = ModelShape.of(SHAPE)
    assert memory(config(**flat), shape, 0, "actor").total == bytes_each * shape.parameters()
    weights = 2 if "bf16" in flat else 4
    assert memory(config(**flat), shape, 0, "reference").total == weights * shape.parameters()


def test_batch_arithmetic() -> None:
    lines = dict(
        batch_arithmetic(
            config(
                n_samples_per_prompt=8,
                global_batch_size=32,
                actor_num_gpus_per_node=4,
                context_parallel_size=2,
                micro_batch_size=3,
                num_critic_only_steps=1,
                ppo_epochs=2,
            )
        )
    )
    assert lines["samples a rollout"] == "8 prompts x 8 = 64"
    assert lines["optimizer steps a rollout"] == "2 x 2 epochs = 4, of 32 samples"
    assert lines["samples a step and data rank"] == "16"
    assert lines["micro-batches a step"] == "6 of 3 samples"
    assert lines["the run"] == "10 rollouts, 640 samples, 36 actor steps"
    assert lines["critic steps"].startswith("40 ")


def test_dry_run_plans_a_recipe_that_is_not_prepared(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["fit", "--recipe", str(recipe), "--dry-run"]
    assert cli.main(flags) == 0
    out = capsys.readouterr().out
    assert "World: 2 ranks = TP 2 x PP 1 x CP 1 x DP 1" in out
    assert f"{ModelShape.of(SHAPE).parameters():,}" in out
    assert "not there yet: --hf-checkpoint prepared/model is no directory" in out
    assert not Path("outputs").exists()


def test_dry_run_refuses_what_the_user_got_wrong(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "--recipe", str(recipe), "--dry-run", "--prompt-data", "typo.jsonl"]) == 2
    assert "--prompt-data typo.jsonl does not exist" in capsys.readouterr().err
    assert cli.main(["fit", "--recipe", str(recipe), "--dry-run", "--tensor-model-parallel-size", "4"]) == 2
    assert "use 1, 2, 3 or 6" in capsys.readouterr().err
