"""One real SGLang server for all tests of a session, and what tests of the engine share."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_lightning.config import PPOConfig
from ppo_lightning.engines.base import SamplingParams
from ppo_lightning.engines.sglang import SGLangEngine
from ppo_lightning.engines.sglang_control import Control
from ppo_lightning.engines.sglang_plan import Plan
from ppo_lightning.samples import Sample
from tests.tinymodel import make_tiny_model

KV_TOKENS = 8192  # the cache of a server under test: enough, and made at once


def make_plan(checkpoint: Path, logs: Path, **changes: Any) -> Plan:
    """The plan of `--rollout-engine sglang` for a tiny model, on one rank."""
    config = PPOConfig.of(
        hf_checkpoint=str(checkpoint),
        rollout_engine="sglang",
        output_dir=str(logs),
        update_weight_transfer_mode="tensor",
        sglang_max_total_tokens=KV_TOKENS,
        keep_aborted_samples=True,
    )
    return replace(Plan.from_config(config, 1, cuda=False), **changes)


@pytest.fixture(scope="session")
def sglang_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sglang") / "model"
    make_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def sglang_engine(
    sglang_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangEngine]:
    """Owns the server of the session. Weights are the checkpoint's only until a test sends others."""
    logging.getLogger("httpx").setLevel("WARNING")
    logs = tmp_path_factory.mktemp("sglang_logs")
    engine = SGLangEngine(make_plan(sglang_checkpoint, logs, check_equal=True, bucket_size=50_000))
    yield engine
    engine.close()


def url_of(engine: SGLangEngine) -> str:
    return control_of(engine).url


def control_of(engine: SGLangEngine) -> Control:
    assert engine._fleet is not None
    return engine._fleet.servers[0].control


def server(engine: SGLangEngine) -> psutil.Process:
    assert engine._fleet is not None
    process = engine._fleet.servers[0].process
    assert process is not None
    assert process.pid is not None
    return psutil.Process(process.pid)


def scheduler(engine: SGLangEngine) -> psutil.Process:
    return next(p for p in server(engine).children(recursive=True) if "scheduler" in " ".join(p.cmdline()))


def wait_until_at_work(engine: SGLangEngine, running: Future[Any]) -> None:
    """Until the server of `engine` has a request of `running` in hand."""
    while not running.done() and not control_of(engine).get("/v1/loads")["loads"][0]["num_running_reqs"]:
        time.sleep(0.05)
    assert not running.done()


@contextmanager
def attach(
    engine: SGLangEngine, checkpoint: Path, logs: Path, seed: int, **changes: Any
) -> Iterator[tuple[SGLangEngine, PreTrainedModel]]:
    """A second engine on the session's server, which to it is a foreign one, and the model whose weights it
    has sent as version `seed`."""
    made = SGLangEngine(make_plan(checkpoint, logs, **({"urls": (url_of(engine),)} | changes)))
    try:
        model = model_with(checkpoint, seed)
        made.update_weights(weights(model), seed)
        yield made, model
    finally:
        made.close()


def forget_weights(engine: SGLangEngine, checkpoint: Path) -> None:
    """What a server knows after its keeper has started it again."""
    path = str(checkpoint)
    control_of(engine).post("/update_weights_from_disk", model_path=path, weight_version="none")


def model_with(checkpoint: Path, seed: int) -> PreTrainedModel:
    """The checkpoint's model with other weights."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()  # tied ones once, as the trainer streams them


def prompts(count: int, *, first: int = 10) -> list[Sample]:
    return [Sample(prompt="", tokens=[5, 6, first + i], group_index=i, index=i) for i in range(count)]


def run(engine: SGLangEngine, samples: Sequence[Sample], **changes: Any) -> list[Sample]:
    params = SamplingParams(**({"max_new_tokens": 12} | changes))
    engine.generate(samples, params, list(range(len(samples))))
    return list(samples)


def largest_difference(samples: Sequence[Sample], model: PreTrainedModel, temperature: float = 1.0) -> float:
    """Between the engine's log-probs and those that transformers gives the same tokens."""
    worst = 0.0
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, :-1].float()
        own = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(sample.tokens[1:])[:, None])
        given = torch.tensor(sample.rollout_log_probs)
        worst = max(worst, (own[-sample.response_length :, 0] - given).abs().max().item())
    return worst


def config_file(path: Path, checkpoint: Path, logs: Path, **changes: Any) -> Path:
    """A YAML configuration (JSON is YAML) of a run whose engine is SGLang."""
    options = {"hf_checkpoint": str(checkpoint), "rollout_engine": "sglang", "output_dir": str(logs)}
    path.write_text(json.dumps(options | {"sglang_max_total_tokens": KV_TOKENS} | changes))
    return path
