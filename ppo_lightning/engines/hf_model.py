"""What the embedded engine takes from a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ppo_lightning.engines.base import EngineError
from ppo_lightning.engines.decoding import ATTENTION

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def read_model(
    checkpoint: str, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with the weights of its directory. EngineError if they are not there or not complete."""
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=dtype, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise EngineError(f"no model can be loaded from {checkpoint}: {error}") from error
    model, report = loaded
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise EngineError(f"{checkpoint} lacks {len(names)} weights of its model, as {', '.join(names[:3])}")
    return _prepared(model.to(device))


def empty_model(
    checkpoint: str, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of `config.json` with weights of no meaning, made without the time it takes to draw them."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise EngineError(f"no model configuration can be read from {checkpoint}: {error}") from error
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return _prepared(model)


def _prepared(model: PreTrainedModel) -> PreTrainedModel:
    """Ready to decode. EngineError for layers that do not see the whole past."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise EngineError(
            f"{type(model).__name__} has layers of {', '.join(sorted(kinds))}: the hf engine decodes full"
            " attention only; use --rollout-engine sglang"
        )
    model.set_attn_implementation(ATTENTION)
    return model.eval().requires_grad_(False)


def end_of_sequence(checkpoint: str, tokenizer: Any, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """The end-of-sequence tokens that the generation config, the model config and the tokenizer name."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    named = [config.eos_token_id, tokenizer.eos_token_id]
    if (Path(checkpoint) / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(checkpoint).eos_token_id)
    ids = [i for entry in named for i in (entry if isinstance(entry, list) else [entry])]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


class StopStrings:
    """Whether a response holds a stop string: looked for in the text of its last tokens, so that one that
    lies across several tokens is found at the token that completes it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        # a token writes at least one byte; some more, as a tokenizer may strip what begins a text
        self.window = max(len(s.encode()) for s in strings) + 4

    def __call__(self, responses: list[list[int]]) -> list[bool]:
        texts = self.tokenizer.batch_decode([ids[-self.window :] for ids in responses])
        return [any(s in text for s in self.strings) for text in texts]
