"""PPO in plain PyTorch and transformers: the oracle of the layout matrix.

One process, one padded sample after another, a loop over tokens for the advantages, fp32 models and float64
sums. It shares no code with the package; it reads like the formulas, and nothing here is fast.

    T  response tokens of one sample
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

# Log-probs of size 5 are known to a few times 5 x 2^-24 = 3e-7 in fp32. A metric that is a difference of two
# of them is known to about 1e-6, however small it is: it is judged as if its terms had this size at least.
LOGPROB_DIFFERENCE = 0.1


@dataclass(frozen=True)
class Options:
    """The flags that a PPO step's numbers depend on, under their names."""

    gamma: float = 1.0
    lambd: float = 1.0
    critic_lambd: float | None = None
    normalize_advantages: bool = False
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    value_clip: float = 0.2
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    entropy_coef: float = 0.0
    calculate_per_token_loss: bool = False
    mask_truncated_samples: bool = False
    ppo_epochs: int = 1
    num_steps_per_rollout: int = 1
    rollout_temperature: float = 1.0
    lr: float = 1e-6
    critic_lr: float = 1e-6
    lr_warmup_iters: int = 0
    critic_lr_warmup_iters: int = 0
    head_lr_mult: float = 1.0
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass
class Result:
    """What the run gave. `scales`, beside each metric, is the size of the terms that it adds up: where they
    cancel, that size and not the metric's own says how well fp32 knows it."""

    rows: list[dict[str, float]] = field(default_factory=list)  # metrics, one dictionary a rollout
    scales: list[dict[str, float]] = field(default_factory=list)
    tokens: list[dict[str, list[Tensor]]] = field(default_factory=list)  # per rollout: name -> [T] a sample
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # role -> name -> parameter
    margin: float = float("inf")  # how near a token came to a clip boundary, where the loss has a kink


@dataclass
class Sample:
    tokens: Tensor  # prompt and response
    mask: Tensor  # [T] bool
    reward: float
    rollout_logprobs: Tensor  # [T]
    truncated: bool

    @property
    def length(self) -> int:
        return self.mask.numel()


def run(directories: Mapping[str, Path], rollouts: Sequence[Sequence[Any]], options: Options) -> Result:
    """All of PPO over the scored `rollouts`. `directories` holds Hugging Face models for "actor",
    "reference" and "critic", the latter a token classifier with one label."""
    actor, reference = (
        AutoModelForCausalLM.from_pretrained(directories[role], dtype=torch.float32).eval()
        for role in ("actor", "reference")
    )
    critic = AutoModelForTokenClassification.from_pretrained(
        directories["critic"], dtype=torch.float32, num_labels=1
    ).eval()
    trainers = {
        "actor": Trainer(actor, options.lr, options.lr_warmup_iters, options),
        "critic": Trainer(critic, options.critic_lr, options.critic_lr_warmup_iters, options),
    }
    result = Result()
    for scored in rollouts:
        samples = [read(s, options) for s in scored]
        iteration(
            samples, {"actor": actor, "reference": reference, "critic": critic}, trainers, options, result
        )
    result.weights = {
        role: {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        for role, trainer in trainers.items()
    }
    return result


def read(sample: Any, options: Options) -> Sample:
    """From a sample as it is stored: a plain dictionary."""
    length = sample["response_length"]
    mask = [1] * length if sample["loss_mask"] is None else sample["loss_mask"]
    truncated = sample["status"] == "truncated"
    failed = sample["status"] == "failed"
    if failed or (truncated and options.mask_truncated_samples):
        mask = [0] * length
    return Sample(
        torch.tensor(sample["tokens"]),
        torch.tensor(mask, dtype=torch.bool),
        0.0 if failed else sample["reward"],
        torch.tensor(sample["rollout_log_probs"], dtype=torch.float32),
        truncated,
    )


def iteration(
    samples: list[Sample],
    models: dict[str, Any],
    trainers: dict[str, Trainer],
    options: Options,
    result: Result,
) -> None:
    """One rollout: experience, advantages, critic updates, actor updates."""
    temperature = options.rollout_temperature
    longest = max(s.tokens.numel() for s in samples)
    with torch.no_grad():
        values = [token_values(models["critic"], s, longest) for s in samples]
        ref = [token_logprobs(models["reference"], s, longest, temperature)[0] for s in samples]
        old = [token_logprobs(models["actor"], s, longest, temperature)[0] for s in samples]
    lambd, gamma = options.lambd, options.gamma
    critic_lambd = lambd if options.critic_lambd is None else options.critic_lambd
    advantages = [gae(s.reward, v, s.mask, gamma, lambd)[0] for s, v in zip(samples, values)]
    returns = [gae(s.reward, v, s.mask, gamma, critic_lambd)[1] for s, v in zip(samples, values)]
    if options.normalize_advantages:
        advantages = whiten(advantages, samples)
    result.tokens.append(
        {"values": values, "ref": ref, "old": old, "advantages": advantages, "returns": returns}
    )

    row, scale = rollout_metrics(samples)
    for name, (value, size) in critic_metrics(samples, values, returns).items():
        row[name], scale[name] = value, size
    for role, prefix in (("critic", "critic"), ("actor", "train")):
        steps = []
        for _ in range(options.ppo_epochs):
            for batch in optimizer_batches(len(samples), options):
                weights = token_weights([samples[i] for i in batch], options)
                total = Sums()
                for i, weight in zip(batch, weights):
                    sample = samples[i]
                    if role == "critic":
                        new = token_values(models["critic"], sample, longest)
                        terms = value_terms(new, values[i], returns[i], sample, options, result)
                    else:
                        new, entropy = token_logprobs(models["actor"], sample, longest, temperature)
                        terms = policy_terms(
                            new, old[i], ref[i], entropy, advantages[i], sample, options, result
                        )
                    total.add(terms, sample.mask, weight)
                steps.append(trainers[role].step(total))
        for name in steps[0][0]:
            row[f"{prefix}/{name}"] = sum(s[0][name] for s in steps) / len(steps)
            scale[f"{prefix}/{name}"] = sum(s[1][name] for s in steps) / len(steps)
    result.rows.append(row)
    result.scales.append(scale)


# ---- models --------------------------------------------------------------------------------------------


def padded(sample: Sample, longest: int) -> dict[str, Tensor]:
    pad = longest - sample.tokens.numel()
    return {
        "input_ids": torch.nn.functional.pad(sample.tokens, (0, pad))[None],
        "attention_mask": (torch.arange(longest) < sample.tokens.numel()).long()[None],
    }


def token_logprobs(model: Any, sample: Sample, longest: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token, and the entropy of the distribution it was drawn from: [T]."""
    logits = model(**padded(sample, longest)).logits[0] / temperature
    first = sample.tokens.numel() - sample.length
    logp = torch.log_softmax(logits[first - 1 : first - 1 + sample.length], dim=-1)
    return logp.gather(1, sample.tokens[first:, None])[:, 0], -(logp.exp() * logp).sum(1)


def token_values(model: Any, sample: Sample, longest: int) -> Tensor:
    """Value of the state before each response token: [T]."""
    first = sample.tokens.numel() - sample.length
    return model(**padded(sample, longest)).logits[0, first - 1 : first - 1 + sample.length, 0]


# ---- advantages ----------------------------------------------------------------------------------------


def gae(reward: float, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """From the last trainable token to the first; masked tokens are no transitions. [T] each."""
    advantages, returns = torch.zeros(len(values)), torch.zeros(len(values))
    next_value, carry, reward_here = 0.0, 0.0, reward
    for t in reversed(range(len(values))):
        if not mask[t]:
            continue
        delta = reward_here + gamma * next_value - values[t].item()
        carry = delta + gamma * lambd * carry
        advantages[t], returns[t] = carry, carry + values[t].item()
        next_value, reward_here = values[t].item(), 0.0
    return advantages, returns


def whiten(advantages: list[Tensor], samples: list[Sample]) -> list[Tensor]:
    """Over all trainable tokens of the rollout."""
    kept = torch.cat([a[s.mask] for a, s in zip(advantages, samples)]).double()
    mean = kept.sum() / max(len(kept), 1)
    variance = ((kept - mean) ** 2).sum() / max(len(kept) - 1, 1)
    scale = 1.0 / torch.sqrt(variance + 1e-8)
    return [
        torch.where(s.mask, ((a.double() - mean) * scale).float(), torch.zeros(()))
        for a, s in zip(advantages, samples)
    ]


# ---- losses --------------------------------------------------------------------------------------------


def optimizer_batches(count: int, options: Options) -> Iterator[list[int]]:
    size = count // options.num_steps_per_rollout
    for first in range(0, count, size):
        yield list(range(first, first + size))


def token_weights(batch: list[Sample], options: Options) -> list[float]:
    """The share of one trainable token of each sample in the mean over the optimizer batch."""
    counts = [int(s.mask.sum()) for s in batch]
    if options.calculate_per_token_loss:
        return [1.0 / max(sum(counts), 1) for _ in counts]
    with_tokens = sum(n > 0 for n in counts)
    return [1.0 / (with_tokens * n) if n else 0.0 for n in counts]


def policy_terms(
    new: Tensor,
    old: Tensor,
    ref: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    sample: Sample,
    o: Options,
    result: Result,
) -> dict[str, Tensor]:
    """[T] each."""
    low, high = 1 - o.eps_clip, 1 + (o.eps_clip if o.eps_clip_high is None else o.eps_clip_high)
    ratio = torch.exp(torch.clamp(new - old, -20, 20))
    plain, clipped = -ratio * advantages, -torch.clamp(ratio, low, high) * advantages
    policy = torch.maximum(plain, clipped)
    if o.eps_clip_c is not None:
        bound = torch.minimum(policy, -o.eps_clip_c * advantages)
        policy = torch.where(advantages < 0, bound, policy)
    terms = {"pg_loss": policy, "pg_clipfrac": (clipped > plain).float(), "ppo_kl": old - new}
    terms["entropy"] = entropy
    loss = policy - o.entropy_coef * entropy
    if o.use_kl_loss:
        d = new - ref
        small = torch.clamp(d, -20, 20)
        terms["kl_loss"] = {
            "k1": d,
            "k2": d**2 / 2,
            "k3": torch.exp(-d) - 1 + d,
            "low_var_kl": torch.clamp(torch.exp(-small) - 1 + small, -10, 10),
        }[o.kl_loss_type]
        loss = loss + o.kl_loss_coef * terms["kl_loss"]
    terms["train_rollout_logprob_abs_diff"] = torch.abs(old - sample.rollout_logprobs)
    terms["loss"] = loss
    note_margin(result, ratio, [low, high], sample.mask)
    return terms


def value_terms(
    new: Tensor, old: Tensor, returns: Tensor, sample: Sample, o: Options, result: Result
) -> dict[str, Tensor]:
    """[T] each."""
    limited = old + torch.clamp(new - old, -o.value_clip, o.value_clip)
    loss = torch.maximum((new - returns) ** 2, (limited - returns) ** 2)
    note_margin(result, torch.abs(new - old), [o.value_clip], sample.mask)
    return {
        "value_loss": loss,
        "value_clipfrac": (torch.abs(new - old) > o.value_clip).float(),
        "loss": loss,
    }


def note_margin(result: Result, x: Tensor, boundaries: list[float], mask: Tensor) -> None:
    for boundary in boundaries:
        distance = torch.abs(x[mask] - boundary)
        if distance.numel():
            result.margin = min(result.margin, distance.min().item())


@dataclass
class Sums:
    """A loss with its graph, the metrics, and the size of what was added up."""

    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    metrics: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    def add(self, terms: dict[str, Tensor], mask: Tensor, weight: float) -> None:
        for name, term in terms.items():
            kept = weight * term[mask]
            self.metrics[name] = self.metrics.get(name, 0.0) + kept.detach().double().sum().item()
            self.sizes[name] = self.sizes.get(name, 0.0) + kept.detach().double().abs().sum().item()
        self.loss = self.loss + (weight * terms["loss"][mask]).sum()


# ---- optimizer -----------------------------------------------------------------------------------------


class Trainer:
    """AdamW, decay on matrices only, the global gradient norm clipped; a warm-up that starts at 0, and a
    learning rate of its own for the value head."""

    def __init__(self, model: Any, lr: float, warmup: int, options: Options) -> None:
        self.model, self.lr, self.warmup, self.options, self.steps = model, lr, warmup, options, 0
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p], "weight_decay": options.weight_decay if p.dim() > 1 else 0.0}
                | {"factor": options.head_lr_mult if name.startswith("score.") else 1.0}
                for name, p in model.named_parameters()
            ],
            lr=lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
        )

    def step(self, sums: Sums) -> tuple[dict[str, float], dict[str, float]]:
        """One update; the metrics of the step and their sizes."""
        lr = self.lr * min(self.steps / self.warmup, 1.0) if self.warmup else self.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        self.optimizer.zero_grad()
        sums.loss.backward()
        limit = self.options.clip_grad or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
        self.optimizer.step()
        self.steps += 1
        metrics = sums.metrics | {"grad_norm": norm, "lr": lr, "skipped": 0.0}
        sizes = {name: abs(value) for name, value in metrics.items()} | sums.sizes
        for name in ("ppo_kl", "kl_loss", "train_rollout_logprob_abs_diff"):
            if name in sizes:
                sizes[name] = max(sizes[name], LOGPROB_DIFFERENCE)
        return metrics, sizes


# ---- metrics of the rollout ----------------------------------------------------------------------------


def rollout_metrics(samples: list[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    row = {
        "rollout/reward": rewards.mean().item(),
        "rollout/reward_std": ((rewards - rewards.mean()) ** 2).mean().sqrt().item(),
        "rollout/response_length": sum(s.length for s in samples) / len(samples),
        "rollout/truncated": sum(s.truncated for s in samples) / len(samples),
    }
    return row, {name: abs(value) for name, value in row.items()} | {
        "rollout/reward": rewards.abs().mean().item()
    }


def critic_metrics(
    samples: list[Sample], values: list[Tensor], returns: list[Tensor]
) -> dict[str, tuple[float, float]]:
    """Over all trainable tokens of the rollout, before the critic's update: (metric, size)."""
    v = torch.cat([x[s.mask] for x, s in zip(values, samples)]).double()
    r = torch.cat([x[s.mask] for x, s in zip(returns, samples)]).double()
    share = ((r - v).var() / r.var()).item()
    return {
        "critic/value_mean": (v.mean().item(), v.abs().mean().item()),
        "critic/return_mean": (r.mean().item(), r.abs().mean().item()),
        "critic/explained_variance": (1.0 - share, max(1.0, share)),
    }
