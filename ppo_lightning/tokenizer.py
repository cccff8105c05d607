"""The tokenizer of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(checkpoint: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the Hugging Face directory `checkpoint`; code in it is run only where it is trusted.
    ValueError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(checkpoint), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer can be loaded from {checkpoint}: {error}; --hf-checkpoint must name a Hugging Face"
            " directory with tokenizer.json and tokenizer_config.json"
        ) from error
