"""The embedded engine: the contract of all engines, and what only it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_lightning.config import PPOConfig
from ppo_lightning.engines import build_engine
from ppo_lightning.engines.base import EngineError, SamplingParams
from ppo_lightning.engines.hf import HFEngine
from ppo_lightning.engines.sampling import draw, uniforms
from ppo_lightning.samples import Sample, Status
from tests.engine_contract import TEXTS, EngineContract, make_samples, named_weights
from tests.tinymodel import make_tiny_model


class TestContract(EngineContract):
    @pytest.fixture(scope="class")
    def raw_engine(self, checkpoint: Path) -> HFEngine:
        return HFEngine(str(checkpoint))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "model"
    make_tiny_model(directory)
    return directory


def responses(
    engine: HFEngine, samples: list[Sample], params: SamplingParams, seeds: list[int]
) -> list[list[int]]:
    engine.generate(samples, params, seeds)
    return [s.tokens for s in samples]


def test_seeds_alone_decide(checkpoint: Path) -> None:
    """The same draws alone, in another order, in small batches and in a process that used random numbers."""
    params = SamplingParams(8, temperature=0.9, top_p=0.9)
    samples = make_samples(TEXTS, 3)
    seeds = [1000 + 7 * i for i in range(len(samples))]
    whole = responses(HFEngine(str(checkpoint)), make_samples(TEXTS, 3), params, seeds)
    torch.rand(1000)
    backwards = responses(HFEngine(str(checkpoint)), samples[::-1], params, seeds[::-1])
    assert backwards == whole[::-1]
    small = HFEngine(str(checkpoint), max_rows=4)
    assert responses(small, make_samples(TEXTS, 3), params, seeds) == whole
    tight = HFEngine(str(checkpoint), cache_bytes=1)
    assert responses(tight, make_samples(TEXTS, 3), params, seeds) == whole


def test_a_response_is_reported_while_others_are_written(checkpoint: Path) -> None:
    """Early enough to cut them."""
    engine, samples = HFEngine(str(checkpoint)), make_samples(TEXTS, 3)
    params = SamplingParams(60, stop_token_ids=tuple(range(30)))
    engine.generate(samples, params, list(range(len(samples))), lambda sample: engine.abort())
    assert {s.status for s in samples} == {Status.COMPLETED, Status.ABORTED}


def test_generating_leaves_the_random_state_alone(checkpoint: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    responses(HFEngine(str(checkpoint)), make_samples(TEXTS), SamplingParams(4), list(range(len(TEXTS))))
    assert torch.equal(torch.get_rng_state(), before)


def test_greedy_equals_transformers_generate(checkpoint: Path) -> None:
    """The whole decoding loop (padding, cache, dropped rows) against `model.generate` on single prompts."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = responses(
        HFEngine(str(checkpoint)), make_samples(TEXTS), SamplingParams(40, temperature=0), [0] * 6
    )
    for text, got in zip(TEXTS, tokens):
        ids = torch.tensor([list(text.encode())])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
        assert got == expected[0].tolist()


@pytest.mark.parametrize("heads", [(4, 1), (4, 4)])
def test_llama_and_other_head_groups(tmp_path: Path, heads: tuple[int, int]) -> None:
    model = make_tiny_model(tmp_path, "llama", num_attention_heads=heads[0], num_key_value_heads=heads[1])
    tokens = responses(
        HFEngine(str(tmp_path)), make_samples(TEXTS[:3]), SamplingParams(20, temperature=0), [0] * 3
    )
    for text, got in zip(TEXTS, tokens):
        ids = torch.tensor([list(text.encode())])
        expected = model.generate(ids, do_sample=False, max_new_tokens=20, pad_token_id=0)
        assert got == expected[0].tolist()


def test_directory_weights_serve_without_an_update(checkpoint: Path) -> None:
    engine = HFEngine(str(checkpoint))
    samples = make_samples(TEXTS)
    responses(engine, samples, SamplingParams(4), [0] * 6)
    assert [s.weight_versions for s in samples] == [[0]] * 6


def test_weights_in_half_precision_are_kept_in_it(checkpoint: Path) -> None:
    engine = HFEngine.from_config(PPOConfig.of(hf_checkpoint=str(checkpoint), bf16=True))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    engine.update_weights(named_weights(model), 1)
    samples = make_samples(TEXTS)
    responses(engine, samples, SamplingParams(4), [0] * 6)
    assert {p.dtype for p in engine._model.parameters()} == {torch.bfloat16}


def test_a_directory_without_weights_takes_them_from_the_trainer(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(EngineError, match="no model can be loaded from"):
        HFEngine(str(tmp_path)).generate(make_samples(["a"]), SamplingParams(2), [0])
    engine = HFEngine(str(tmp_path))
    engine.update_weights(
        named_weights(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)), 5
    )
    want = responses(HFEngine(str(checkpoint)), make_samples(TEXTS), SamplingParams(6), [1] * 6)
    assert responses(engine, make_samples(TEXTS), SamplingParams(6), [1] * 6) == want


def test_wrong_weights_are_named_and_not_used(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    engine = HFEngine(str(checkpoint))
    rows = dict(named_weights(model))
    rows["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    rows["model.norm.weight"] = torch.zeros(3)
    del rows["model.layers.0.mlp.up_proj.weight"]
    stream = iter(rows.items())
    with pytest.raises(EngineError) as caught:
        engine.update_weights(stream, 2)
    assert next(stream, None) is None  # collective: drained all the same
    text = str(caught.value)
    assert "model.layers.7.mlp.up_proj.weight is no weight" in text
    assert "model.norm.weight is (3,), it must be (64,)" in text
    assert "model.layers.0.mlp.up_proj.weight is missing" in text
    assert not engine.health()
    with pytest.raises(EngineError, match="version 2 do not fit"):
        engine.generate(make_samples(["a"]), SamplingParams(2), [0])
    engine.update_weights(named_weights(model), 3)
    assert engine.health()


def test_a_weight_that_comes_twice_is_an_error(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = [*named_weights(model), ("model.norm.weight", torch.ones(64))]
    with pytest.raises(EngineError, match=r"model\.norm\.weight came twice"):
        HFEngine(str(checkpoint)).update_weights(iter(rows), 2)


def test_a_tied_head_may_be_sent_or_left_out(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    engine = HFEngine(str(checkpoint))
    engine.update_weights(iter([*named_weights(model), ("lm_head.weight", model.lm_head.weight.detach())]), 2)
    assert engine._model.lm_head.weight is engine._model.model.embed_tokens.weight


def test_sleep_frees_the_weights_and_refuses_to_generate(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    engine = HFEngine(str(checkpoint))
    engine.update_weights(named_weights(model), 1)
    engine.sleep()
    assert sum(p.untyped_storage().nbytes() for p in engine._model.parameters()) == 0
    engine.wake()
    with pytest.raises(EngineError, match="put to sleep"):
        engine.generate(make_samples(["a"]), SamplingParams(2), [0])


def test_a_closed_engine_says_so(checkpoint: Path) -> None:
    engine = HFEngine(str(checkpoint))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(make_samples(["a"]), SamplingParams(2), [0])


def test_weights_that_are_nan_are_found(checkpoint: Path) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    engine = HFEngine(str(checkpoint))
    engine.update_weights(named_weights(model), 4)
    for temperature in (0.0, 1.0):
        with pytest.raises(EngineError, match=r"NaN or infinite \(weights of version 4\)"):
            engine.generate(make_samples(["a"]), SamplingParams(2, temperature=temperature), [0])


def test_a_foreign_tokenizer_is_found(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="token outside of the vocabulary of 320"):
        HFEngine(str(checkpoint)).generate([Sample(prompt="", tokens=[1, 320])], SamplingParams(2), [0])


def test_no_end_of_sequence_when_told_so(checkpoint: Path) -> None:
    engine = HFEngine(str(checkpoint), end_ids=())
    samples = make_samples(TEXTS, 20)
    responses(engine, samples, SamplingParams(30, temperature=1.5), list(range(len(samples))))
    assert {s.status for s in samples} == {Status.TRUNCATED}
    assert any(258 in s.tokens for s in samples)


def test_every_end_of_sequence_token_that_is_named_counts(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [256, 7]}))
    assert set(HFEngine(str(tmp_path)).end_ids) == {258, 256, 7}


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(EngineError, match="sliding_attention"):
        HFEngine(str(tmp_path)).generate(make_samples(["a"]), SamplingParams(2), [0])


def test_build_engine_makes_what_the_flag_names(checkpoint: Path) -> None:
    engine = build_engine(PPOConfig.of(hf_checkpoint=str(checkpoint)))
    assert isinstance(engine, HFEngine)
    with pytest.raises(EngineError, match="--hf-checkpoint"):
        build_engine(PPOConfig())


def test_uniforms_are_splitmix64() -> None:
    """Published first outputs of splitmix64 with seed 1234567 (Rosetta Code), upper 24 bits."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms([1234567], 3)[0].double() * 2**24
    assert got.tolist() == [x >> 40 for x in published]
    assert torch.equal(uniforms([5, 9], 50)[:, :7], uniforms([5, 9], 7))
    many = uniforms(range(200), 200)
    assert 0 <= many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005


@pytest.mark.parametrize(
    ("uniform", "params", "expected"),
    [
        (0.0, SamplingParams(1), 1),  # token 0 has no weight
        (0.24, SamplingParams(1), 1),
        (0.26, SamplingParams(1), 2),
        (0.99999994, SamplingParams(1), 3),  # the last token with weight, not the vocabulary's last
        (0.99, SamplingParams(1, top_k=1), 2),
        (0.0, SamplingParams(1, top_p=0.5), 2),
        (0.99, SamplingParams(1, top_p=0.51), 2),  # 0.5 + 0.25: token 1 stands before token 2
        (0.0, SamplingParams(1, top_p=0.51), 1),
        (0.0, SamplingParams(1, top_k=2, top_p=0.6), 2),  # 2/3 of what top-k left is over 0.6 at once
    ],
)
def test_draw_is_the_inverse_of_the_distribution(
    uniform: float, params: SamplingParams, expected: int
) -> None:
    probs = torch.tensor([[0.0, 0.25, 0.5, 0.25, 0.0]])
    token, logprob = draw(probs.log(), torch.tensor([uniform]), params)
    assert token.item() == expected
    assert logprob.item() == pytest.approx(probs[0, expected].log().item(), abs=1e-6)
