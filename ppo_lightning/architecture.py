"""The numbers of a model's architecture from its config.json alone, what layouts they allow, and how many
parameters each rank holds. No torch: this answers before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig

SUPPORTED = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense Llama- or Qwen-style decoder."""

    model_type: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    positions: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a transformers configuration as a mapping; KeyError names an entry that is missing."""
        heads = config["num_attention_heads"]
        return cls(
            model_type=config["model_type"],
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            positions=config.get("max_position_embeddings", 0),
        )

    @classmethod
    def read(cls, directory: str | Path) -> ModelShape:
        """From DIRECTORY/config.json. Raises OSError, or ValueError that names the file and what is wrong."""
        path = Path(directory) / "config.json"
        try:
            return cls.of(json.loads(path.read_text(encoding="utf-8")))
        except KeyError as error:
            raise ValueError(f"{path} has no entry {error}") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no model configuration: {error}") from error

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer that tensor parallelism divides."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = queries + 2 * keys if self.model_type == "qwen2" else 0
        return self.hidden * (2 * queries + 2 * keys) + bias + 3 * self.hidden * self.ffn

    @property
    def layer_norms(self) -> int:
        """Parameters of one layer that every tensor rank holds."""
        return 2 * self.hidden + (2 * self.head_dim if self.model_type == "qwen3" else 0)

    def parameters(self, *, value_head: bool = False) -> int:
        """Of the whole model; a value head stands in place of the output layer."""
        head = self.hidden + 1 if value_head else 0 if self.tied else self.vocab * self.hidden
        layers = self.layers * (self.layer_matrices + self.layer_norms)
        return self.vocab * self.hidden + layers + self.hidden + head

    def stage_layers(
        self, pp: int, vpp: int = 1, *, value_head: bool = False, chunk: int = 1
    ) -> tuple[int, ...]:
        """Layers of each of at most `layers` pipeline stages. The last one has the output layer too and gets
        fewer, so that the slowest stage has as few weights to multiply with as can be, as if every token
        passed through the output layer. All have as many where that is no slower, and where stages are
        interleaved. `chunk` layers stay together."""
        if pp == 1 or vpp > 1:
            return (self.layers // pp,) * pp
        output = 0.0 if value_head else self.vocab * self.hidden / self.layer_matrices
        chunks = self.layers // chunk
        few = range(1, chunks - pp + 2)  # on the last stage, with one at least on each of the others
        most = {n: max(math.ceil((chunks - n) / (pp - 1)), n + output / chunk) for n in few}
        # a stage near the beginning keeps activations of more micro-batches: if any, it has the fewer layers
        last = min(most, key=lambda n: (most[n], abs(n - chunks / pp), -n))
        each, more = divmod(chunks - last, pp - 1)
        counts = (*(each + (stage >= pp - 1 - more) for stage in range(pp - 1)), last)
        return tuple(n * chunk for n in counts)

    def parameters_on(
        self, stage: int, tp: int, pp: int, vpp: int = 1, *, value_head: bool = False, chunk: int = 1
    ) -> int:
        """Of a rank on pipeline stage `stage`, as `stage_layers` has them. A tied embedding lies on the first
        and on the last stage."""
        vocabulary = math.ceil(self.vocab / tp) * self.hidden
        layers = self.stage_layers(pp, vpp, value_head=value_head, chunk=chunk)[stage]
        count = layers * (self.layer_matrices // tp + self.layer_norms)
        if stage == 0:
            count += vocabulary
        if stage == pp - 1:
            output = 0 if self.tied and pp == 1 else vocabulary
            count += self.hidden + (self.hidden + 1 if value_head else output)
        return count


def layout_problems(shape: ModelShape, config: PPOConfig) -> Iterator[tuple[str, str]]:
    """(option, message) for each size of the layout that does not fit the model."""
    if shape.model_type not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        yield (
            "hf_checkpoint",
            f"the architecture {shape.model_type!r} is not supported; supported are {known} (dense)",
        )
        return
    m = config.model
    tp, pp, vpp = (
        m.tensor_model_parallel_size,
        m.pipeline_model_parallel_size,
        m.virtual_pipeline_model_parallel_size or 1,
    )
    counts = {"attention heads": shape.heads, "key/value heads": shape.kv_heads, "MLP columns": shape.ffn}
    wrong = [f"{count} {what}" for what, count in counts.items() if count % tp]
    if wrong:
        fitting = _divisors(math.gcd(*counts.values()))
        yield (
            "tensor_model_parallel_size",
            f"TP {tp} does not divide {' and '.join(wrong)}; use {_listed(fitting)}",
        )
    chunk = recomputed_together(m.recompute_method, m.recompute_num_layers)
    if shape.layers % chunk:
        fitting = _divisors(shape.layers)
        yield (
            "recompute_num_layers",
            f"{chunk} layers recomputed together do not divide {shape.layers} layers; use {_listed(fitting)}",
        )
    elif pp * chunk > shape.layers:
        together = "" if chunk == 1 else f", recomputed {chunk} at a time"
        yield (
            "pipeline_model_parallel_size",
            f"PP {pp} leaves stages without a layer: the model has {shape.layers}{together}; use at most"
            f" {shape.layers // chunk}",
        )
    elif vpp > 1 and shape.layers % (pp * vpp * chunk):
        fitting = _divisors(shape.layers // (pp * chunk)) if shape.layers % (pp * chunk) == 0 else [1]
        together = "" if chunk == 1 else f", recomputed {chunk} at a time"
        yield (
            "virtual_pipeline_model_parallel_size",
            f"PP {pp} x VPP {vpp} does not divide {shape.layers} layers{together}; use VPP"
            f" {_listed(fitting)}",
        )


def recomputed_together(method: str | None, count: int | None) -> int:
    """Layers that are recomputed as one, and so must be on one stage."""
    return count if method == "uniform" and count else 1


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(values: list[int]) -> str:
    """[1, 2, 3, 6] as '1, 2, 3 or 6'."""
    *most, last = [str(v) for v in values]
    return f"{', '.join(most)} or {last}" if most else last
