"""The embedded engine: a transformers model in the training rank's own process."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppo_lightning.engines.base import EngineError, Finished, SamplingParams
from ppo_lightning.engines.decoding import Decoded, decode
from ppo_lightning.engines.dense import DenseDecoder
from ppo_lightning.engines.hf_model import StopStrings, empty_model, end_of_sequence, read_model
from ppo_lightning.engines.sampling import uniforms
from ppo_lightning.samples import Sample, Status
from ppo_lightning.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ppo_lightning.config import PPOConfig

CACHE_BYTES = 4 << 30  # keys and values of one batch, if every response grew to its limit
MAX_ROWS = 256  # of one batch: bounds the logits, [rows, vocabulary] several times


class HFEngine:
    """Generates with the model of a Hugging Face directory. Weights come through `update_weights`; before the
    first ones, they are read from the directory (version 0). Every rank has its own and shares nothing.

    `seeds[i]` alone decides the draws of sample i: results do not depend on the batch or the number of ranks,
    up to the rounding of the matrix products. `end_ids` None: the end-of-sequence tokens of the checkpoint;
    an empty tuple: none. Raises EngineError for a directory that holds no usable model."""

    def __init__(
        self,
        checkpoint: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        end_ids: Sequence[int] | None = None,
        cache_bytes: int = CACHE_BYTES,
        max_rows: int = MAX_ROWS,
        trust_remote_code: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = torch.device(device)
        self.cache_bytes = cache_bytes
        self.max_rows = max_rows
        self.trust_remote_code = trust_remote_code
        self.version: int | None = 0  # of the weights in use; None while there are none
        self._end_ids = None if end_ids is None else tuple(end_ids)
        self._model: PreTrainedModel | None = None
        self._dense: DenseDecoder | None = None  # decodes the model, where it can
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._unusable: str | None = None  # why `generate` must refuse
        self._shapes: list[torch.Size] | None = None  # of the parameters, while asleep
        self._abort = threading.Event()

    @classmethod
    def from_config(cls, config: PPOConfig, device: torch.device | str = "cpu") -> HFEngine:
        if config.model.hf_checkpoint is None:
            raise EngineError("the hf engine needs --hf-checkpoint: a Hugging Face directory")
        return cls(
            config.model.hf_checkpoint,
            torch.bfloat16 if config.model.bf16 else torch.float32,
            device,
            trust_remote_code=config.model.trust_remote_code,
        )

    # ---- the contract --------------------------------------------------------------------------------------

    def generate(
        self,
        samples: Sequence[Sample],
        params: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> None:
        """See `Engine.generate`. A response ends at the model's length limit at the latest (`truncated`). At
        temperature 0 log-probs are those of temperature 1."""
        if len(seeds) != len(samples):
            raise ValueError(f"{len(samples)} samples but {len(seeds)} seeds: give one seed each")
        if self._unusable is not None:
            raise EngineError(self._unusable)
        self._abort.clear()
        model = self._loaded()
        if self._dense is None and DenseDecoder.fits(model):
            self._dense = DenseDecoder(model)
        limits = [self._room(sample, params) for sample in samples]
        ends = (*self.end_ids, *params.stop_token_ids)
        stop = StopStrings(self.tokenizer, params.stop) if params.stop else None
        for rows in self._batches(samples, limits):
            outputs = decode(
                model,
                [samples[i].tokens for i in rows],
                [limits[i] for i in rows],
                params,
                uniforms([seeds[i] for i in rows], max(limits[i] for i in rows)),
                ends,
                stop,
                self._abort.is_set,
                self._dense,
            )
            for row, output in outputs:
                sample = samples[rows[row]]
                self._fill(sample, output, limits[rows[row]], params)
                if finished is not None:
                    finished(sample)

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy full tensors into place. All are taken from the iterator before an error is raised; after one,
        the weights are a mixture and `generate` refuses to run until a whole set has come."""
        self.wake()
        model = self._model or empty_model(
            self.checkpoint, self.dtype, self.device, trust_remote_code=self.trust_remote_code
        )
        targets = dict(model.named_parameters(remove_duplicate=False))
        filled: set[int] = set()
        problems: list[str] = []
        seen: set[str] = set()
        with torch.no_grad():
            for name, tensor in tensors:
                target = targets.get(name)
                if target is None:
                    problems.append(f"{name} is no weight of {type(model).__name__}")
                elif target.shape != tensor.shape:
                    problems.append(f"{name} is {tuple(tensor.shape)}, it must be {tuple(target.shape)}")
                elif name in seen:
                    problems.append(f"{name} came twice")
                else:
                    target.copy_(tensor)
                    filled.add(id(target))
                    seen.add(name)
        problems += [f"{name} is missing" for name, target in targets.items() if id(target) not in filled]
        self._model = model
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else "")
            self.version = None
            self._unusable = (
                f"weights of version {version} do not fit the model of {self.checkpoint}: {shown}"
            )
            raise EngineError(self._unusable)
        self.version, self._unusable = version, None

    def sleep(self) -> None:
        """Give the weights' memory back, wherever they lie."""
        if self._model is None or self._shapes is not None:
            return
        self._dense = None
        self._shapes = [parameter.shape for parameter in self._model.parameters()]
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)
        self.version, self._unusable = (
            None,
            "the engine was put to sleep; send it weights before it generates",
        )

    def wake(self) -> None:
        if self._model is None or self._shapes is None:
            return
        for parameter, shape in zip(self._model.parameters(), self._shapes):
            parameter.data = parameter.data.new_empty(shape)
        self._shapes = None

    def health(self) -> bool:
        return self._unusable is None

    def abort(self) -> None:
        """End a running `generate` after its current token, from another thread. What was written is kept
        (`aborted`); samples without a token are `failed`."""
        self._abort.set()

    def close(self) -> None:
        self._model = self._dense = self._tokenizer = None
        self.version, self._unusable = None, "the engine is closed"

    # ---- parts ---------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.checkpoint, trust_remote_code=self.trust_remote_code)
        return self._tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end every response."""
        if self._end_ids is None:
            self._end_ids = end_of_sequence(
                self.checkpoint, self.tokenizer, trust_remote_code=self.trust_remote_code
            )
        return self._end_ids

    def _loaded(self) -> PreTrainedModel:
        """The model, with the directory's weights if none came before."""
        if self._model is None:
            self._model = read_model(
                self.checkpoint, self.dtype, self.device, trust_remote_code=self.trust_remote_code
            )
        return self._model

    def _room(self, sample: Sample, params: SamplingParams) -> int:
        """Tokens that the response may have."""
        config = self._loaded().config
        if not sample.tokens:
            raise ValueError(f"sample {sample.index} has an empty prompt; give it at least one token")
        if not 0 <= min(sample.tokens) <= max(sample.tokens) < config.vocab_size:
            raise ValueError(
                f"sample {sample.index} has a token outside of the vocabulary of {config.vocab_size}:"
                " the tokenizer is not this model's"
            )
        room = config.max_position_embeddings - len(sample.tokens)
        if room < 1:
            raise ValueError(
                f"the prompt of sample {sample.index} has {len(sample.tokens)} tokens and leaves no room for"
                f" a response: the model's limit is {config.max_position_embeddings}; drop long prompts with"
                " --rollout-max-prompt-len"
            )
        return min(params.max_new_tokens, room)

    def _batches(self, samples: Sequence[Sample], limits: Sequence[int]) -> Iterator[list[int]]:
        """Rows that are decoded together: prompts of like length, equal ones side by side, as many as fit."""
        order = sorted(range(len(samples)), key=lambda i: (len(samples[i].tokens), i))
        batch: list[int] = []
        longest = 0
        for i in order:
            # sorted: the newest prompt is the longest
            grown = max(longest, limits[i])
            if batch and (
                len(batch) == self.max_rows
                or (len(batch) + 1) * (len(samples[i].tokens) + grown) * self._token_bytes()
                > self.cache_bytes
            ):
                yield batch
                batch, grown = [], limits[i]
            batch.append(i)
            longest = grown
        if batch:
            yield batch

    def _token_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        config = self._loaded().config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * config.num_key_value_heads * width * self.dtype.itemsize

    def _fill(self, sample: Sample, output: Decoded, limit: int, params: SamplingParams) -> None:
        if not all(map(math.isfinite, output.logprobs)):
            raise EngineError(
                f"sample {sample.index}: the model's logits are NaN or infinite"
                f" (weights of version {self.version})"
            )
        sample.tokens = sample.tokens + output.tokens
        sample.response_length = len(output.tokens)
        sample.rollout_log_probs = output.logprobs
        sample.response = self._text(output, params)
        sample.weight_versions = [self.version] if self.version is not None else []
        cut = Status.TRUNCATED if len(output.tokens) == limit else Status.ABORTED
        sample.status = Status.COMPLETED if output.ended else cut

    def _text(self, output: Decoded, params: SamplingParams) -> str:
        """The response without what ended it."""
        ids = output.tokens
        by_token = output.ended and ids[-1] in (*self.end_ids, *params.stop_token_ids)
        text = str(self.tokenizer.decode(ids[:-1] if by_token else ids, skip_special_tokens=True))
        if not output.ended or by_token:
            return text
        return text[: min((at for s in params.stop if (at := text.find(s)) >= 0), default=len(text))]
