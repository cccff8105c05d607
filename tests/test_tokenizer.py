"""Code that comes with a model runs only where --trust-remote-code says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from ppo_lightning.config import PPOConfig
from ppo_lightning.data import PromptDataModule
from ppo_lightning.engines import build_engine
from ppo_lightning.tokenizer import load_tokenizer
from tests.tinymodel import make_tiny_model

CODE = """
from transformers import PreTrainedTokenizerFast

class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    make_tiny_model(folder)
    (folder / "mine.py").write_text(CODE)
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text()) | {
        "tokenizer_class": "MyTokenizer",
        "auto_map": {"AutoTokenizer": [None, "mine.MyTokenizer"]},
    }
    path.write_text(json.dumps(told))
    return folder


def test_code_of_a_tokenizer_runs_only_where_it_is_trusted(model: Path) -> None:
    assert type(load_tokenizer(model)).__name__ != "MyTokenizer"
    assert type(load_tokenizer(model, trust_remote_code=True)).__name__ == "MyTokenizer"


def test_the_flag_reaches_prompts_and_engine(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"input": "hello"}\n')
    config = PPOConfig.of(
        hf_checkpoint=model, prompt_data=tmp_path / "prompts.jsonl", rollout_batch_size=1,
        rollout_max_response_len=4, num_rollout=1, advantage_estimator="ppo", trust_remote_code=True,
    ).resolve()[0]  # fmt: skip
    engine = build_engine(config)
    assert type(engine.tokenizer).__name__ == "MyTokenizer"
    assert engine.end_ids == (258,)
    data = PromptDataModule(config)
    data.setup("fit")
    assert [len(p.tokens) for p in data.take(1)] == [len("hello")]
    assert type(data._tokenizer).__name__ == "MyTokenizer"
