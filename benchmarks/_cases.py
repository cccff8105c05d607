"""What is measured: random Qwen3 models, prompts of random tokens, and the floating point operations of a PPO
step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One PPO step: `batch` different prompts, one response each, all of full length."""

    hidden: int
    layers: int
    vocab: int
    batch: int
    response: int
    prompt: int = 16

    @property
    def model(self) -> dict[str, Any]:
        """Fields of its Qwen3Config: four heads, two of keys and values, embeddings tied."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.hidden // 4,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": self.vocab - 1,
            "pad_token_id": self.vocab - 2,
        }

    @property
    def response_tokens(self) -> int:
        return self.batch * self.response

    # ---- floating point operations: two for a multiply-add; nothing that is computed again counts ----------

    @property
    def layer_weights(self) -> int:
        """Weights of the layers' products: q and o, k and v, the gated MLP."""
        return self.layers * self.hidden * self.hidden * (2 + 2 // 2 + 3 * 2)

    def attention(self, queries: range) -> int:
        """Scores and weighted sums of the tokens at `queries` of one sequence, each over what it sees."""
        return self.layers * 4 * self.hidden * sum(position + 1 for position in queries)

    def forward(self, *, head: bool) -> float:
        """A pass over all sequences; logits of the response tokens alone."""
        length = self.prompt + self.response
        each = 2 * self.layer_weights * length + self.attention(range(length))
        return float(self.batch * (each + head * 2 * self.hidden * self.vocab * self.response))

    def generate(self) -> float:
        """As `forward`, but the last token need not be read."""
        length = self.prompt + self.response - 1
        each = 2 * self.layer_weights * length + self.attention(range(length))
        return float(self.batch * (each + 2 * self.hidden * self.vocab * self.response))

    def flops(self, phase: str) -> float:
        """Operations of a phase of one step; 0 where they do not count."""
        critic, actor = self.forward(head=False), self.forward(head=True)
        return {
            "generate": self.generate(),
            "old values": critic,
            "old log-probs": actor,
            "critic": 3 * critic,
            "actor": 3 * actor,
        }.get(phase, 0.0)


CASES = {
    "S": Case(hidden=64, layers=2, vocab=512, batch=32, response=64),
    "M": Case(hidden=128, layers=4, vocab=4096, batch=16, response=128),
    "L": Case(hidden=384, layers=8, vocab=8192, batch=16, response=128),
}


def tokenizer(vocab: int) -> Any:
    """A token a word: t0, t1, ...; then <pad> and <eos>."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(vocab - 2)} | {"<pad>": vocab - 2, "<eos>": vocab - 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="t0", padding_side="left"
    )


def prompts(case: Case, count: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, case.vocab - 2, (count, case.prompt), generator=generator).tolist()


def write(case: Case, directory: Path, count: int) -> dict[str, str]:
    """Model, tokenizer and `count` prompts under `directory`; the options that use them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**case.model)).save_pretrained(directory / "model")
    tokenizer(case.vocab).save_pretrained(directory / "model")
    rows = [{"input": " ".join(f"t{i}" for i in ids)} for ids in prompts(case, count)]
    data = directory / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"hf_checkpoint": str(directory / "model"), "prompt_data": str(data)}
