"""What is measured: random models, prompts of random tokens, and the floating point operations of a PPO
step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One PPO step: `batch` different prompts, `samples` responses to each, all of full length. The model is
    a Qwen3, or a Llama where heads are given; embeddings are tied."""

    hidden: int
    layers: int
    vocab: int
    batch: int
    response: int
    prompt: int = 16
    samples: int = 1
    llama_heads: tuple[int, int] | None = None  # of queries, of keys and values

    @property
    def heads(self) -> tuple[int, int]:
        return self.llama_heads or (4, 2)

    @property
    def intermediate(self) -> int:
        """Width of the gated MLP; Llama's is 8/3 of the hidden size."""
        return self.hidden * 8 // 3 if self.llama_heads else 2 * self.hidden

    @property
    def model(self) -> dict[str, Any]:
        """Fields of its Qwen3Config or LlamaConfig."""
        heads, groups = self.heads
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": self.hidden // heads,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": self.vocab - 1,
            "pad_token_id": self.vocab - 2,
        }

    @property
    def sequences(self) -> int:
        return self.batch * self.samples

    @property
    def response_tokens(self) -> int:
        return self.sequences * self.response

    # ---- floating point operations: two for a multiply-add; nothing that is computed again counts ----------

    @property
    def layer_weights(self) -> int:
        """Weights of the layers' products: q and o, k and v, the gated MLP."""
        heads, groups = self.heads
        each = self.hidden * (2 * self.hidden + 2 * self.hidden * groups // heads + 3 * self.intermediate)
        return self.layers * each

    def attention(self, queries: range) -> int:
        """Scores and weighted sums of the tokens at `queries` of one sequence, each over what it sees."""
        return self.layers * 4 * self.hidden * sum(position + 1 for position in queries)

    def read(self, queries: range) -> float:
        """Operations of the layers for the tokens at `queries` of one sequence."""
        return float(2 * self.layer_weights * len(queries) + self.attention(queries))

    @property
    def logits(self) -> float:
        """Operations of the head for all response tokens."""
        return float(2 * self.hidden * self.vocab * self.response_tokens)

    def forward(self, *, head: bool) -> float:
        """A pass over all sequences; logits of the response tokens alone."""
        length = self.prompt + self.response
        return self.sequences * self.read(range(length)) + head * self.logits

    def generate(self) -> float:
        """As `forward`, but the last token need not be read, and a prompt is read once for its samples."""
        responses = self.sequences * self.read(range(self.prompt, self.prompt + self.response - 1))
        return self.batch * self.read(range(self.prompt)) + responses + self.logits

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
SMOLLM2 = Case(576, 30, 49152, batch=8, response=64, samples=2, llama_heads=(9, 3))  # the shape of its 135M
STEP_CASES = CASES | {"SmolLM2": SMOLLM2}


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
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    if case.llama_heads:
        LlamaForCausalLM(LlamaConfig(**case.model)).save_pretrained(directory / "model")
    else:
        Qwen3ForCausalLM(Qwen3Config(**case.model)).save_pretrained(directory / "model")
    tokenizer(case.vocab).save_pretrained(directory / "model")
    rows = [{"input": " ".join(f"t{i}" for i in ids)} for ids in prompts(case, count)]
    data = directory / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"hf_checkpoint": str(directory / "model"), "prompt_data": str(data)}
