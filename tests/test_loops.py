"""Compiled loops against float64, transformers' modules and their torch twins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import TypingError
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ppo_lightning.compiled import exp, loop, spread
from ppo_lightning.engines.base import SamplingParams
from ppo_lightning.engines.dense import DenseDecoder
from ppo_lightning.engines.hf import HFEngine
from ppo_lightning.engines.products import LANES, linear
from ppo_lightning.engines.sampling import draw
from ppo_lightning.samples import Sample
from tests.tinymodel import make_tiny_model, make_tokenizer


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@loop
def exp_of(x, out, low, high):  # type: ignore[no-untyped-def]
    for i in range(low, high):
        out[i] = exp(x[i])


def test_exp_is_that_of_float64() -> None:
    x = np.concatenate([np.linspace(-86.9, 87.9, 100_001), [0.0, -0.0]]).astype(np.float32)
    out = np.empty_like(x)
    exp_of(x, out, 0, x.size)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    assert out[-1] == 1


def test_exp_at_its_ends() -> None:
    x = np.array([-np.inf, -1e30, -88, 100, np.nan], np.float32)
    out = np.empty_like(x)
    exp_of(x, out, 0, x.size)
    assert out[:3].tolist() == [0, 0, 0]
    assert out[3] > 1e38
    assert np.isnan(out[4])


def test_a_loop_that_cannot_be_kept_is_compiled_all_the_same() -> None:
    """As in an installation that nobody may write to."""
    home: dict[str, Any] = {}
    exec("def twice(x):\n    return x + x", home)
    assert loop(home["twice"])(np.float32(2)) == 4


def test_kept_loops_are_made_anew_when_one_that_they_call_has_changed(tmp_path: Path) -> None:
    """`outer` holds the compiled `inner`, whose file alone changes."""
    head = "from ppo_lightning.compiled import loop\n"
    (tmp_path / "inner.py").write_text(head + "@loop\ndef inner(x):\n    return x + 1\n")
    (tmp_path / "outer.py").write_text(
        head + "from inner import inner\n@loop\ndef outer(x):\n    return inner(x)\n"
        "print(outer(1), 'kept' if outer.stats.cache_hits else 'made')\n"
    )

    def says() -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", "import outer"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert says() == "2 made"
    assert says() == "2 kept"
    text = (tmp_path / "inner.py").read_text()
    (tmp_path / "inner.py").write_text(text.replace("x + 1", "x + 10"))
    assert says() == "11 made"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rows", [1, 4, 7, 30])
def test_spread_gives_every_row_to_one_call(threads: Any, count: int, rows: int) -> None:
    threads(count)
    x, out = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    parts: list[tuple[int, int]] = []

    def note(low: int, high: int) -> None:
        parts.append((low, high))
        exp_of(x, out, low, high)

    spread(note, rows, multiple=4)
    assert (out > 2.7).all()
    assert sorted(parts)[0][0] == 0
    assert all(low % 4 == 0 for low, _ in parts)
    assert sum(high - low for low, high in parts) == rows


def test_threads_are_made_anew_in_a_forked_process(threads: Any) -> None:
    threads(2)
    x, out = np.zeros(8, np.float32), np.zeros(8, np.float32)
    spread(exp_of, 8, x, out)
    child = os.fork()
    if child == 0:
        try:
            spread(exp_of, 8, x, out)
        finally:
            os._exit(0)
    deadline = 100
    while os.waitpid(child, os.WNOHANG) == (0, 0) and deadline:
        deadline -= 1
        torch.sum(torch.ones(2_000_000))
    if not deadline:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert deadline


# products ---------------------------------------------------------------------------------------------


def panels(x: np.ndarray) -> np.ndarray:
    """[8 p, k] -> [p, k, 8] fp32"""
    return np.array(x.reshape(-1, LANES, x.shape[1]).transpose(0, 2, 1), np.float32, order="C")


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("columns", "inputs"), [(1, 1), (2, 7), (6, 64), (11, 5000), (64, 1025)])
def test_products_are_those_of_float64(columns: int, inputs: int, count: int, add: bool) -> None:
    random = np.random.default_rng(0)
    x, w = random.normal(size=(LANES * count, inputs)), random.normal(size=(columns, inputs))
    before = random.normal(size=(LANES * count, columns)).astype(np.float32)
    out, x, w = panels(before), x.astype(np.float32), w.astype(np.float32)
    linear(panels(x), w, out, 0, count, add)
    expected = x.astype(np.float64) @ w.astype(np.float64).T + add * before
    assert np.abs(out.transpose(0, 2, 1).reshape(expected.shape) - expected).max() < 1e-6 * inputs


def test_products_touch_no_other_panels() -> None:
    x, w, out = np.ones((4, 5, LANES)), np.ones((7, 5)), np.full((4, 7, LANES), 7.0)
    x, w, out = (a.astype(np.float32) for a in (x, w, out))
    linear(x, w, out, 1, 3, False)
    assert out[:, 0, 0].tolist() == [7, 5, 5, 7]
    assert (out == out[:, :1, :1]).all()


@pytest.mark.parametrize(
    "arrays",
    [
        [np.ones((1, 5)), np.ones((7, 5)), np.ones((1, 7))],
        [np.ones((1, 5, LANES)), np.ones((5, 7)).T, np.ones((1, 7, LANES))],
        [np.ones((1, 5, LANES)), np.ones((7, 6)), np.ones((1, 7, LANES))],
        [np.ones((1, 5, LANES)), np.ones((7, 5)), np.ones((1, 6, LANES))],
        [np.ones((1, 5, LANES + 1)), np.ones((7, 5)), np.ones((1, 7, LANES + 1))],
    ],
)
def test_products_take_nothing_but_panels_and_whole_weights(arrays: list[np.ndarray]) -> None:
    """An array that lies otherwise would be read beyond its end."""
    with pytest.raises((TypingError, ValueError)):
        linear(*(np.array(x, np.float32, order="K", copy=True) for x in arrays), 0, 1, False)


# sampling ---------------------------------------------------------------------------------------------


def reference_draw(logits: torch.Tensor, uniform: torch.Tensor, temperature: float) -> tuple[Any, Any]:
    weights = (logits.double() / temperature).softmax(-1)
    cumulative = weights.cumsum(-1)
    tokens = torch.searchsorted(cumulative, uniform.double()[:, None], right=True)[:, 0]
    distance = (cumulative - uniform.double()[:, None]).abs().amin(-1)
    return tokens, (weights.log().gather(-1, tokens[:, None])[:, 0], distance)


@pytest.mark.parametrize("vocabulary", [2, 255, 256, 257, 5000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draw_is_the_inverse_of_the_distribution_in_float64(vocabulary: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(200, vocabulary, generator=generator)
    logits[:, ::3] = -torch.inf
    uniform = torch.rand(200, generator=generator)
    tokens, logprobs = draw(logits, uniform, SamplingParams(max_new_tokens=1, temperature=temperature))
    expected, (expected_logprobs, distance) = reference_draw(logits, uniform, temperature)
    clear = distance > 1e-5  # a draw at the edge of two tokens may fall on either side
    assert clear.float().mean() > 0.9
    assert tokens[clear].tolist() == expected[clear].tolist()
    torch.testing.assert_close(logprobs[clear].double(), expected_logprobs[clear], rtol=1e-5, atol=1e-5)


def test_the_ends_of_a_draw_fall_on_tokens_that_can_be() -> None:
    logits = torch.full((2, 700), -torch.inf)
    logits[:, 300:310] = 0.0
    tokens, logprobs = draw(logits, torch.tensor([0.0, 1 - 2.0**-24]), SamplingParams(max_new_tokens=1))
    assert tokens.tolist() == [300, 309]
    torch.testing.assert_close(logprobs.exp(), torch.full((2,), 0.1))


def test_nan_logits_give_nan_logprobs() -> None:
    logits = torch.zeros(2, 600)
    logits[1, 5] = torch.nan
    _, logprobs = draw(logits, torch.tensor([0.3, 0.3]), SamplingParams(max_new_tokens=1))
    assert logprobs.isfinite().tolist() == [True, False]


# steps ------------------------------------------------------------------------------------------------


def biased_model(directory: Path, family: str) -> None:
    fields: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(3)
    if family == "qwen2":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**fields))
    else:
        model = LlamaForCausalLM(LlamaConfig(**fields, attention_bias=True, mlp_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter.data)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


@pytest.fixture(params=["qwen3", "qwen2", "llama"])
def checkpoint(request: Any, tmp_path: Path) -> Path:
    if request.param == "qwen3":
        make_tiny_model(tmp_path, "qwen3")
    else:
        biased_model(tmp_path, request.param)
    return tmp_path


def generated(checkpoint: Path, prompts: list[list[int]], length: int = 12) -> list[Sample]:
    engine = HFEngine(str(checkpoint), end_ids=())
    samples = [Sample(prompt="", tokens=list(p), index=i) for i, p in enumerate(prompts)]
    seeds = [sum(p) for p in prompts]
    engine.generate(samples, SamplingParams(max_new_tokens=length), seeds)
    assert engine._dense is not None
    return samples


PROMPTS = [[5, 9, 31], [7], [1, 2, 3, 4, 5, 6, 7, 8], [40, 41], [99, 98, 97, 96, 95], [12, 250]]


def test_steps_are_those_of_the_modules(checkpoint: Path) -> None:
    samples = generated(checkpoint, PROMPTS)
    model = HFEngine(str(checkpoint))._loaded().double()
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, -sample.response_length - 1 : -1]
        response = torch.tensor(sample.tokens[-sample.response_length :])
        expected = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        got = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_the_others_nor_on_threads(checkpoint: Path, threads: Any) -> None:
    """Bit for bit."""
    tokens = torch.arange(38).view(2, 19)
    model = HFEngine(str(checkpoint))._loaded()
    decoder = DenseDecoder(model)

    def logits(rows: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        shape = (19, decoder.groups, 3, decoder.width)
        layers = len(decoder.head_norms)
        read = [torch.randn(shape, generator=generator)[rows] for _ in range(2 * layers)]
        starts = torch.tensor([0, 1, 2] * 6 + [0])[rows]
        cache = decoder.cache(read[:layers], read[layers:], starts, 2)
        angles = decoder.angles(5)
        with torch.inference_mode():
            decoder.step(tokens[0, rows], cache, angles)
            return decoder.step(tokens[1, rows], cache, angles).clone()

    everything = logits(list(range(19)))
    assert torch.equal(logits([6, 2, 18]), everything[[6, 2, 18]])
    threads(3)
    assert torch.equal(logits(list(range(19))), everything)


def test_rows_come_and_go_and_one_that_is_nan_stays_alone(checkpoint: Path) -> None:
    """Buffers are those of the largest batch so far."""
    decoder = DenseDecoder(HFEngine(str(checkpoint))._loaded())
    layers = len(decoder.head_norms)

    def logits(rows: int, spoilt: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        shape = (20, decoder.groups, 3, decoder.width)
        read = [torch.randn(shape, generator=generator)[:rows] for _ in range(2 * layers)]
        if spoilt is not None:
            read[layers][spoilt] = torch.nan
        cache = decoder.cache(read[:layers], read[layers:], torch.zeros(rows, dtype=torch.int64), 1)
        with torch.inference_mode():
            return decoder.step(torch.arange(rows), cache, decoder.angles(4)).clone()

    few = logits(3)
    many = logits(20)
    assert torch.equal(many[:3], few)
    spoilt = logits(20, spoilt=17)
    assert spoilt[17].isnan().all()
    assert torch.equal(spoilt[:17], many[:17])
    assert torch.equal(logits(18)[:17], many[:17])
    assert torch.equal(logits(3), few)


def test_models_whose_layers_differ_are_left_to_their_modules(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "qwen3")
    assert DenseDecoder.fits(model)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert not DenseDecoder.fits(model)
    assert not DenseDecoder.fits(make_tiny_model(tmp_path, "qwen3").bfloat16())
