"""The small Qwen3 of `tiny_ppo`: its tokenizer, and supervised training that leaves PPO something to find.

Plain torch and transformers. The model learns both ways of answering, then, in the last part of the training,
mostly to answer at once, which it does badly. It can work in steps and rarely does: PPO has to find out that
this pays.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ppo_lightning.recipes._arithmetic import Problem, by_first_result

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IGNORED = -100  # the label of tokens that are not learned, as in transformers


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How the model is trained before PPO."""

    steps: int = 480
    batch_size: int = 32
    matrix_lr: float = 0.04  # Muon, of the matrices inside the layers
    other_lr: float = 5e-3  # AdamW, of embeddings and norms
    lr_warmup_steps: int = 20
    last_part: float = 0.15  # share of the steps in which direct answers dominate
    stepwise_first: float = 0.95  # share of stepwise answers before the last part
    stepwise_last: float = 0.2


def build_tokenizer(pool: Sequence[Problem]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, trained on stepwise answers to `pool`, in the ChatML format."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"user\n{p.question}\nassistant\n{p.stepwise}\n" for p in pool)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, padding_side="left", model_max_length=256
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, architecture: Mapping[str, Any]) -> Qwen3ForCausalLM:
    """A fresh Qwen3, from torch's global generator."""
    config = Qwen3Config(
        **architecture,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    if len(tokenizer) != config.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}")
    return Qwen3ForCausalLM(config)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pool: Sequence[Problem],
    settings: WarmStart,
    seed: int,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train `model` in place on answers to problems of `pool`. `progress(step, loss)` hears of every step."""
    optimizers = _optimizers(model, settings)
    encode = _Encoder(tokenizer)
    model.train()
    for step, answers in enumerate(_answers(pool, settings, random.Random(seed))):
        tokens, labels = encode.batch(answers)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        learned = labels[:, 1:] != IGNORED
        loss = F.cross_entropy(logits[learned], labels[:, 1:][learned])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * _schedule(step, settings)
            optimizer.step()
            optimizer.zero_grad()
        progress(step, loss.item())
    model.eval()


def _schedule(step: int, settings: WarmStart) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(1.0, (step + 1) / settings.lr_warmup_steps)
    return warmup * (0.55 + 0.45 * math.cos(math.pi * step / settings.steps))


def _answers(
    pool: Sequence[Problem], settings: WarmStart, rng: random.Random
) -> Iterator[list[tuple[Problem, str]]]:
    """Batches of problems with one of their answers. Half the problems are drawn so that every first result
    is as frequent: left to chance, -9 and 18 are seen too seldom to be learned, and a warm start that gets
    its steps wrong is a ceiling that PPO does not lift."""
    groups = list(by_first_result([p for p in pool if len(p.terms) == 3]).values())
    for step in range(settings.steps):
        last = step >= settings.steps * (1 - settings.last_part)
        share = settings.stepwise_last if last else settings.stepwise_first
        batch = []
        for row in range(settings.batch_size):
            problem = rng.choice(rng.choice(groups) if row % 2 else pool)
            batch.append((problem, problem.stepwise if rng.random() < share else problem.direct))
        yield batch


class _Encoder:
    """Chats as padded batches; keeps what it has encoded."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}

    def batch(self, answers: Sequence[tuple[Problem, str]]) -> tuple[Tensor, Tensor]:
        """Tokens and labels, int64 [b, longest], padded on the right: a causal model needs no mask then."""
        prompts = [self._ids(self._prompt(problem)) for problem, _ in answers]
        responses = [self._ids(answer + END) for _, answer in answers]
        rows = list(zip(prompts, responses))
        width = max(len(p) + len(r) for p, r in rows)
        padding = [width - len(p) - len(r) for p, r in rows]
        tokens = [p + r + [self.tokenizer.pad_token_id] * n for (p, r), n in zip(rows, padding)]
        labels = [[IGNORED] * len(p) + r + [IGNORED] * n for (p, r), n in zip(rows, padding)]
        return torch.tensor(tokens), torch.tensor(labels)

    def _prompt(self, problem: Problem) -> str:
        messages = [{"role": "user", "content": problem.question}]
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def _ids(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.known[text]


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is made orthogonal (Jordan 2024). In half the steps of Adam the small
    model gets its arithmetic right. `torch.optim.Muon` computes in bf16, slow on CPUs; this one in fp32."""

    def __init__(
        self, matrices: Sequence[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in by_shape.items():  # one batched product for all matrices of a shape
                updates = orthogonal(torch.stack([self._direction(m, group["momentum"]) for m in matrices]))
                size = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, update in zip(matrices, updates):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-size)

    def _direction(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        assert matrix.grad is not None, "step() comes after backward()"
        mean: Tensor = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
        mean.lerp_(matrix.grad, 1 - momentum)
        return torch.lerp(matrix.grad, mean, momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """[k, m, n] with all singular values brought near 1, by five Newton-Schulz steps."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonal(matrices.mT).mT
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def _optimizers(model: Qwen3ForCausalLM, settings: WarmStart) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each with its highest learning rate."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=settings.other_lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    return [(Muon(matrices, settings.matrix_lr), settings.matrix_lr), (adam, settings.other_lr)]
