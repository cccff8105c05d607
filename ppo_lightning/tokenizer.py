"""The tokenizer of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the Hugging Face directory `checkpoint`; nothing in it is run as code. ValueError
    where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(checkpoint))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer can be loaded from {checkpoint}: {error}; --hf-checkpoint must name a Hugging Face"
            " directory with tokenizer.json and tokenizer_config.json"
        ) from error
