"""The prompts of a run as a Lightning datamodule: one batch is the whole batch of prompts of one rollout."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from jinja2 import TemplateError
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from ppo_lightning import rewards
from ppo_lightning.config import ConfigError
from ppo_lightning.engines.base import sample_seed
from ppo_lightning.prompts import Columns, DataError, read_prompts
from ppo_lightning.samples import Prompt
from ppo_lightning.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ppo_lightning.config import PPOConfig

log = logging.getLogger(__name__)

AHEAD = "tokenise-ahead"  # name of the thread that tokenises the next prompts while the trainer works


class PromptDataModule(pl.LightningDataModule):
    """Yields `list[Prompt]` of `rollout_batch_size`, the same on every rank, from an endless stream: the data
    set over and over, each epoch in an order of its own with `--rollout-shuffle`. A batch may reach from one
    epoch into the next, so no prompt is dropped.

    The position in the stream moves only when the training step calls `commit`; what was merely fetched is
    fetched again after a resume. Lightning sees one long epoch of `num_rollout` batches. Raises DataError
    (what is wrong, by file and line) and ConfigError from `setup`."""

    def __init__(self, config: PPOConfig) -> None:
        super().__init__()
        self.config = config
        self.position = 0  # prompts used by finished steps, over all epochs
        self._cursor = 0  # prompts fetched
        self._prompts: list[Prompt] | None = None
        self._eval_sets: dict[str, list[Prompt]] | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._order: tuple[int, list[int]] = (-1, [])

    # ---- Lightning -----------------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Read and check all files: a bad row ends the run before a model is built."""
        if stage in ("fit", None):
            size = self.config.rollout.rollout_batch_size
            if size is not None and size > len(self.prompts):
                log.warning(
                    "--rollout-batch-size %d is more than the %d prompts: some come twice in a rollout",
                    size,
                    len(self.prompts),
                )
        self.eval_prompts()

    def train_dataloader(self) -> PromptLoader:
        return PromptLoader(self)

    def val_dataloader(self) -> list[Any]:
        """One empty batch for `trainer.validate`, which the evaluation callback answers; none while fitting,
        where that callback comes by itself."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            return []
        return [DataLoader(range(1), batch_size=None)]  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Prompts hold no tensors; Lightning would copy them field by field."""
        return batch

    def state_dict(self) -> dict[str, int]:
        rows = len(self.prompts)
        return {"epoch": self.position // rows, "offset": self.position % rows, "rows": rows}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on after the last committed prompt. Data with another number of rows begins its next epoch."""
        rows = len(self.prompts)
        epoch, offset = state_dict["epoch"], state_dict["offset"]
        if state_dict["rows"] != rows:
            log.warning(
                "the prompt data has %d rows, the run began with %d: going on with a new epoch of it",
                rows,
                state_dict["rows"],
            )
            epoch, offset = epoch + (offset > 0), 0
        self.position = self._cursor = epoch * rows + offset

    # ---- the stream ----------------------------------------------------------------------------------------

    @property
    def prompts(self) -> list[Prompt]:
        """The data set in the order of its files, read once; prompts over the limit are left out."""
        if self._prompts is None:
            data = self.config.data
            if data.prompt_data is None:
                raise ConfigError("--prompt-data is not given: name the file or directory of the prompts")
            self._prompts = self._within_limit(read_prompts(data.prompt_data, self._columns()))
        return self._prompts

    @property
    def epoch(self) -> int:
        """Whole passes over the data that finished steps have used."""
        return self.position // len(self.prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts after those already fetched, with their tokens. Commits nothing."""
        taken = self._next(count)
        self._cursor += count
        self._tokenize(taken)
        self._tokenize_ahead()
        return taken

    def resized(self, fetched: list[Prompt], count: int) -> list[Prompt]:
        """`count` prompts instead of the `fetched` last ones: the next ones join them, or the surplus goes
        back and comes next again."""
        self._cursor -= max(0, len(fetched) - count)
        return fetched[:count] + self.take(max(0, count - len(fetched)))

    def commit(self, count: int | None = None) -> None:
        """A training step is done and has used `count` prompts (not given: a batch)."""
        self.position += self._batch_size if count is None else count

    def rewind(self) -> None:
        """Fetch from the last committed prompt on."""
        self._cursor = self.position

    def num_rollout_from_epochs(self, num_epoch: int) -> int:
        """Rollouts after which every prompt was used at least `num_epoch` times."""
        return -(-num_epoch * len(self.prompts) // self._batch_size)

    def eval_prompts(self) -> dict[str, list[Prompt]]:
        """The sets of `--eval-prompt-data` by name, with tokens."""
        if self._eval_sets is None:
            pairs = self.config.evaluation.eval_prompt_data
            self._eval_sets = {
                name: read_prompts(path, self._columns()) for name, path in zip(pairs[::2], pairs[1::2])
            }
            for prompts in self._eval_sets.values():
                self._tokenize(prompts)
        return self._eval_sets

    # ---- parts ---------------------------------------------------------------------------------------------

    @property
    def _batch_size(self) -> int:
        size = self.config.rollout.rollout_batch_size
        if size is None:
            raise ConfigError("--rollout-batch-size is not given: say how many prompts a rollout has")
        return size

    def _columns(self) -> Columns:
        data = self.config.data
        reward = _reward_with_label(self.config)
        if reward is not None and data.label_key is None:
            raise ConfigError(
                f"--rm-type {reward} compares with a label: name the column that holds it with --label-key"
            )
        return Columns(data.input_key, data.label_key, data.metadata_key, data.apply_chat_template, reward)

    def _next(self, count: int) -> list[Prompt]:
        """The `count` prompts at the cursor, which stays."""
        rows = len(self.prompts)
        places = range(self._cursor, self._cursor + count)
        return [self.prompts[self._ordered(place // rows)[place % rows]] for place in places]

    def _ordered(self, epoch: int) -> list[int]:
        """Row at each place of an epoch."""
        if self._order[0] != epoch:
            rows = len(self.prompts)
            if self.config.data.rollout_shuffle:
                seed = sample_seed(self.config.data.rollout_seed, epoch, 0, 0)
                order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
            else:
                order = list(range(rows))
            self._order = (epoch, order)
        return self._order[1]

    def _within_limit(self, prompts: list[Prompt]) -> list[Prompt]:
        limit = self.config.data.rollout_max_prompt_len
        if limit is None:
            return prompts
        self._tokenize(prompts)
        kept = [p for p in prompts if len(p.tokens) <= limit]
        dropped = len(prompts) - len(kept)
        if not kept:
            shortest = min(len(p.tokens) for p in prompts)
            raise DataError(
                f"all {dropped} prompts of {self.config.data.prompt_data} are longer than"
                f" --rollout-max-prompt-len {limit}; the shortest has {shortest} tokens"
            )
        if dropped:
            log.warning("%d of %d prompts are longer than %d tokens: left out", dropped, len(prompts), limit)
        return kept

    def _tokenize(self, prompts: Sequence[Prompt]) -> None:
        """Fill in the tokens that are not there yet; no other thread may use the tokenizer meanwhile."""
        wait_ahead()
        if todo := [p for p in prompts if not p.tokens]:
            self._write_tokens(todo)

    def _tokenize_ahead(self) -> None:
        """Let a thread tokenise as many of the next prompts as the current step has fetched."""
        count = min(self._cursor - self.position, len(self.prompts))
        if todo := [p for p in self._next(count) if not p.tokens]:
            threading.Thread(target=self._try_tokens, args=(todo,), name=AHEAD).start()

    def _try_tokens(self, todo: Sequence[Prompt]) -> None:
        try:
            self._write_tokens(todo)
        except Exception:  # noqa: BLE001 - the `take` that needs these prompts meets it again
            return

    def _write_tokens(self, todo: Sequence[Prompt]) -> None:
        if self._tokenizer is None:
            if self.config.model.hf_checkpoint is None:
                raise ConfigError("--hf-checkpoint is not given: the prompts need its tokenizer")
            self._tokenizer = load_tokenizer(
                self.config.model.hf_checkpoint, trust_remote_code=self.config.model.trust_remote_code
            )
        texts = [self._rendered(p) for p in todo]
        # a chat template writes the special tokens itself
        special = not self.config.data.apply_chat_template
        for prompt, ids in zip(todo, self._tokenizer(texts, add_special_tokens=special)["input_ids"]):
            prompt.tokens = ids

    def _rendered(self, prompt: Prompt) -> str:
        if isinstance(prompt.prompt, str):
            return prompt.prompt
        data, tokenizer = self.config.data, self._tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer of {self.config.model.hf_checkpoint} has no chat template: drop"
                " --apply-chat-template, or put a chat_template.jinja beside it"
            )
        options = json.loads(data.apply_chat_template_kwargs or "{}")
        try:
            text = tokenizer.apply_chat_template(
                prompt.prompt, tokenize=False, add_generation_prompt=True, **options
            )
        except TemplateError as error:
            raise DataError(
                f"the chat template refuses row {prompt.index} of the prompts: {error}"
            ) from error
        return str(text)


class PromptLoader:
    """A sized loader that Lightning leaves as it is: no sampler to inject, nothing fetched ahead."""

    def __init__(self, data: PromptDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        rollout = self.data.config.rollout
        if rollout.num_rollout is not None:
            return rollout.num_rollout
        return self.data.num_rollout_from_epochs(rollout.num_epoch or 1)

    def __iter__(self) -> Iterator[list[Prompt]]:
        self.data.rewind()
        for _ in range(len(self)):
            yield self.data.take(self.data._batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the datamodule keeps the position. Its presence tells Lightning that a resume is safe."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def wait_ahead() -> None:
    """Until no thread tokenises ahead."""
    for thread in threading.enumerate():
        if thread.name == AHEAD:
            thread.join()


# a child made within would find the tokenizer's locks held, by a thread that it does not have
os.register_at_fork(before=wait_ahead)


def _reward_with_label(config: PPOConfig) -> str | None:
    """The first built-in reward in use that compares with a label."""
    options = config.reward
    terms = dict(rewards.parse_rm_type(options.rm_type)) if options.rm_type else {}
    if options.custom_rm_path and "custom" not in terms:
        return None  # it takes the place of --rm-type
    built_in = (name for name in terms if name not in rewards.EXTERNAL)
    return next((name for name in built_in if rewards.get(name).needs_label), None)
