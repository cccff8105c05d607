"""Checkpoints pass between this package and Megatron-Core alone, in both directions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_lightning import PPOConfig
from ppo_lightning.megatron.heads import fresh_value_head
from ppo_lightning.run import build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import TP2, run_and_save
from tests.fitting import DigitShare, prepare
from tests.tinymodel import make_tiny_model

# a process with Megatron-Core and torch, and nothing of ours: argv = verb, checkpoint, results
MEGATRON = """
import contextlib, sys, torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig

def main():
    verb, directory, results = sys.argv[1:]
    dist.init_process_group("gloo", f"file://{results}.store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2,
        kv_channels=16, add_bias_linear=False, gated_linear_unit=True, normalization="RMSNorm",
        activation_func=torch.nn.functional.silu, qk_layernorm=True, layernorm_epsilon=1e-6,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, init_method_std=0.1,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"), vocab_size=320,
        max_sequence_length=64, share_embeddings_and_output_weights=True, position_embedding_type="rope",
        rotary_base=10000,
    ).eval()
    if verb == "load":
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, directory)
        model.load_state_dict(state["model"])
        assert state["iteration"] == 2
    torch.cuda.synchronize = lambda *_: None  # all that its writer and its rotary embedding need to do
    torch.cuda.current_device = lambda: torch.device("cpu")  # without CUDA: these two
    if verb == "save":
        dist_checkpointing.save(model.sharded_state_dict(), directory)
    tokens = torch.arange(24)[None] * 7 % 320
    places = torch.arange(24)[None]
    later = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
    get_cuda_rng_tracker().fork = contextlib.nullcontext  # for a dropout of 0
    with torch.no_grad():
        logits = model(tokens, places, later)
    weights = {k: v for k, v in model.state_dict().items() if torch.is_tensor(v)}
    torch.save({"logits": logits, "weights": weights}, results)
    assert not [name for name in sys.modules if name.startswith("ppo_lightning")]

if __name__ == "__main__":  # its writer spawns processes that import this file
    main()
"""


def megatron(verb: str, directory: Path, folder: Path) -> dict[str, Any]:
    """Run Megatron alone; logits of a fixed sequence and the weights."""
    script, results = folder / "megatron_alone.py", folder / f"{verb}.pt"
    script.write_text(MEGATRON)
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, script, verb, directory, results], cwd=folder, env=environment, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(results, weights_only=True)


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(24)[None] * 7 % 320).logits


@pytest.mark.parametrize("layout", [pytest.param((1, {}), id="one", marks=pytest.mark.slow), (2, TP2)])
def test_megatron_alone_reads_ours(tmp_path: Path, layout: tuple[int, dict[str, Any]]) -> None:
    """A trained actor with its optimizer beside it, saved by two tensor ranks, read by one process."""
    make_tiny_model(tmp_path / "model")
    world, sizes = layout
    run_ranks(run_and_save, world, str(tmp_path / "model"), sizes, str(tmp_path / "save"), 0)
    read = megatron("load", tmp_path / "save" / "iter_0000002", tmp_path)
    (found,) = run_ranks(as_hf, 1, str(tmp_path / "model"), str(tmp_path / "save" / "iter_0000002"))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    before = logits_of(trained)
    trained.load_state_dict(found, strict=False)
    assert torch.equal(
        read["weights"]["embedding.word_embeddings.weight"], found["model.embed_tokens.weight"]
    )
    assert (read["logits"] - logits_of(trained)).abs().max() < 1e-4 < (read["logits"] - before).abs().max()


def as_hf(rank: int, world: int, model: str, directory: str) -> dict[str, torch.Tensor]:
    from tests.distributed.test_checkpoint import make_strategy

    strategy = make_strategy(world)
    strategy.setup_model("actor", model)
    strategy.load_weights("actor", directory)
    return {name: tensor.clone() for name, tensor in strategy.weights("actor")}


class FirstWeights(pl.Callback):
    """What the roles of a run begin with."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, torch.Tensor]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for role in trainer.strategy.roles:
            stream = trainer.strategy.weights(role)
            self.seen[role] = {name: tensor.clone() for name, tensor in stream}
        trainer.should_stop = True


def first_weights(rank: int, world: int, options: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    first = FirstWeights()
    config = PPOConfig.of(**{"actor_num_gpus_per_node": world, **options})
    trainer, module, data = build(config, [DigitShare(), first])
    trainer.fit(module, data)
    return first.seen


def test_megatrons_own_layout_loads_by_load_ref_load_and_critic_load(tmp_path: Path) -> None:
    """Written by Megatron's own `save`, weights only, below a tracker as Megatron-LM leaves it."""
    options = prepare(tmp_path) | {"num_rollout": 1, "use_kl_loss": True}
    (tmp_path / "written").mkdir()
    kept = megatron("save", tmp_path / "written", tmp_path)["weights"]["embedding.word_embeddings.weight"]
    for flag, told in (("load", "3"), ("ref_load", "release"), ("critic_load", "9")):
        name = f"iter_{int(told):07d}" if told.isdigit() else told
        shutil.copytree(tmp_path / "written", tmp_path / flag / name)
        (tmp_path / flag / "latest_checkpointed_iteration.txt").write_text(told + "\n")
        options[flag] = str(tmp_path / flag)
    (found,) = run_ranks(first_weights, 1, options, group=False, timeout=200)
    assert found.keys() == {"actor", "critic", "reference"}
    assert all(torch.equal(weights["model.embed_tokens.weight"], kept) for weights in found.values())
    assert torch.equal(found["critic"]["score.weight"], fresh_value_head(64, 1234))
