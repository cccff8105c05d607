"""`model`: a reward model, a Hugging Face sequence classifier with one output, scored in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lightning.samples import Sample


class RewardModel:
    """Scores prompt + response with the classifier at `path` (a directory or a hub name).

    A classifier of several classes needs `index`, the logit that is the reward. Chat prompts go through the
    tokenizer's chat template; text longer than the model's context loses its beginning. Every rank holds a
    copy of the model.
    """

    def __init__(
        self, path: str, *, index: int | None = None, batch_size: int = 16, device: str | None = None
    ) -> None:
        self.path, self.batch_size, self.index = path, batch_size, index
        self.device = device
        self.tokenizer: Any = None
        self.model: Any = None

    def load(self) -> None:
        """Read the model; done once, by the first `score` at the latest."""
        if self.model is not None:
            return
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(
            self.path, truncation_side="left", padding_side="right"
        )
        model, info = AutoModelForSequenceClassification.from_pretrained(self.path, output_loading_info=True)
        if info["missing_keys"]:  # transformers would go on with random numbers in their place
            raise ValueError(
                f"{self.path} is no trained sequence classifier: it holds no"
                f" {', '.join(sorted(info['missing_keys']))}"
            )
        outputs = model.config.num_labels
        if self.index is None and outputs != 1:
            raise ValueError(
                f"the reward model {self.path} has {outputs} outputs; choose one:"
                f" RewardCallback(RewardModel({self.path!r}, index=0))"
            )
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model = model.to(self.device).eval()

    def encode(self, sample: Sample) -> list[int]:
        """The token ids that the model reads of a sample."""
        if isinstance(sample.prompt, str):
            text = sample.prompt + sample.response
        else:
            turns = [*sample.prompt, {"role": "assistant", "content": sample.response}]
            text = self.tokenizer.apply_chat_template(turns, tokenize=False)
        text = text.encode("utf-8", "replace").decode("utf-8")  # tokenizers refuse lone surrogates
        begun = text.startswith(self.tokenizer.bos_token or "\0")  # a template writes its own first token
        limit = min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings)
        options = {"truncation": True, "max_length": limit, "add_special_tokens": not begun}
        return self.tokenizer(text, **options)["input_ids"]

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One logit a sample, in order; batches hold texts of like length."""
        import torch

        self.load()
        encoded = [self.encode(sample) for sample in samples]
        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))
        scores = [0.0] * len(encoded)
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            batch: Any = self.tokenizer.pad({"input_ids": [encoded[r] for r in rows]}, return_tensors="pt")
            with torch.inference_mode():
                logits = self.model(**batch.to(self.device)).logits[:, self.index or 0].float().tolist()
            for row, logit in zip(rows, logits):
                scores[row] = logit
        return scores
