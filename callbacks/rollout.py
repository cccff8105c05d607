"""Prompts in, this rank's responses out."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from ppo_lightning.engines import Engine, Finished, SamplingParams, build_engine, sample_seed
from ppo_lightning.engines.pieces import write_piece
from ppo_lightning.hooks import PPOCallback, emit, listens
from ppo_lightning.rewards import custom
from ppo_lightning.samples import Prompt, Sample, Status, require
from ppo_lightning.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from transformers import PreTrainedTokenizerBase

    from ppo_lightning.config import PPOConfig
    from ppo_lightning.module import PPOModule

Generate = Callable[[Sequence[Sample], Engine, SamplingParams, Sequence[int]], Any]


class RolloutError(RuntimeError):
    """A sample came back from generation in a state that cannot be trained on."""


class RolloutCallback(PPOCallback):
    """Generates: each rank `n_samples_per_prompt` responses to its contiguous share of the prompts. The
    engine is made from the configuration, and closed in the end, or given, and left to its owner.

    `generate(samples, engine, params, seeds)`, sync or async, replaces `engine.generate` (several turns,
    tools): it fills the samples as an engine does and may set `loss_mask` to 0 on tokens that the model did
    not write."""

    def __init__(self, engine: Engine | None = None, generate: Generate | None = None) -> None:
        self.engine = engine
        self.generate = generate
        self._own = engine is None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        module = cast("PPOModule", pl_module)
        config = module.config
        if self.engine is None:
            self.engine = build_engine(
                config,
                device=module.strategy.root_device,
                rank=trainer.global_rank,
                world=trainer.world_size,
                share=module.strategy.gather_objects,
            )
        path = config.rollout.custom_generate_function_path
        if self.generate is None and path is not None:
            self.generate = custom.load(path, flag="--custom-generate-function-path")
        module.engine, module.write = self.engine, self.write

    def on_rollout_start(self, trainer: pl.Trainer, module: PPOModule, prompts: list[Prompt]) -> None:
        rollout = require(module.rollout, "module.rollout", "PPOModule")
        config = module.config
        samples = share_of_samples(
            prompts, config.rollout.n_samples_per_prompt, trainer.global_rank, trainer.world_size
        )
        if module.sampling is not None:
            waiting = module.sampling.waiting
            samples += share_of_waiting(waiting, len(prompts), trainer.global_rank, trainer.world_size)
        seeds = [seed_of(config, rollout.index, rollout.draw, s) for s in samples]
        if config.rollout.partial_rollout:
            self.write_pieces(samples, config, seeds)
        else:
            with reports(trainer) as finished:
                self.write(samples, training_params(config), seeds, finished)
        rollout.samples = samples

    def write(
        self,
        samples: list[Sample],
        params: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> None:
        """Let the engine, or the own function, write the responses, and check them."""
        if self.generate is None:
            self._engine.generate(samples, params, seeds, finished)
        else:
            result = self.generate(samples, self._engine, params, seeds)
            if inspect.iscoroutine(result):
                custom.run(result)
        for sample in samples:
            check(sample)

    def write_pieces(self, samples: list[Sample], config: PPOConfig, seeds: Sequence[int]) -> None:
        """Let the engine go on with each unfinished response by `--partial-rollout-tokens`."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(
                require(config.model.hf_checkpoint, "--hf-checkpoint", "the configuration"),
                trust_remote_code=config.model.trust_remote_code,
            )
        decode = self._tokenizer.decode
        write_piece(
            self._engine,
            samples,
            training_params(config),
            seeds,
            piece=require(config.rollout.partial_rollout_tokens, "--partial-rollout-tokens", "resolve"),
            mask_older=config.rollout.mask_offpolicy_in_partial_rollout,
            text=lambda ids: str(decode(list(ids), skip_special_tokens=True)),
        )
        for sample in samples:
            if sample.status is not Status.PENDING:
                check(sample)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._own and self.engine is not None:
            self.engine.close()
            self.engine = None

    @property
    def _engine(self) -> Engine:
        return require(self.engine, "the rollout engine", "RolloutCallback.setup")


@contextmanager
def reports(trainer: pl.Trainer) -> Iterator[Finished | None]:
    """What tells the callbacks of finished responses; None where none listens. Silent after the block,
    whatever an interrupted engine's threads still do."""
    if not listens(trainer, "on_response_end"):
        yield None
        return
    lock, closed = threading.Lock(), threading.Event()

    def finished(sample: Sample) -> None:
        with lock:
            if not closed.is_set():
                emit(trainer, "on_response_end", sample)

    try:
        yield finished
    finally:
        with lock:
            closed.set()


def share_of_samples(prompts: Sequence[Prompt], n: int, rank: int, world: int) -> list[Sample]:
    """`n` empty samples to each prompt of this rank. Shares are contiguous and differ by one prompt at most;
    with fewer prompts than ranks some are empty."""
    first, last = rank * len(prompts) // world, (rank + 1) * len(prompts) // world
    return [
        Sample(
            prompt=prompts[group].prompt,
            label=prompts[group].label,
            metadata=dict(prompts[group].metadata),
            tokens=list(prompts[group].tokens),
            group_index=group,
            index=group * n + number,
        )
        for group in range(first, last)
        for number in range(n)
    ]


def share_of_waiting(
    waiting: Sequence[list[Sample]], first_group: int, rank: int, world: int
) -> list[Sample]:
    """This rank's share of the groups that an earlier draw left unfinished, numbered behind the new ones."""
    for place, group in enumerate(waiting, first_group):
        for number, sample in enumerate(group):
            sample.group_index, sample.index = place, place * len(group) + number
    first, last = rank * len(waiting) // world, (rank + 1) * len(waiting) // world
    return [sample for group in waiting[first:last] for sample in group]


def seed_of(config: PPOConfig, rollout: int, draw: int, sample: Sample) -> int:
    """By the sample's place in the whole rollout, so that the number of ranks has no part in it. `draw`
    counts the further draws of dynamic sampling."""
    base = sample_seed(config.optimizer.seed, config.data.rollout_seed, 0, 0)
    return sample_seed(base, rollout | draw << 32, sample.group_index, sample.index)


def training_params(config: PPOConfig) -> SamplingParams:
    """How the flags `--rollout-...` say to draw."""
    r = config.rollout
    return SamplingParams(
        max_new_tokens=require(r.rollout_max_response_len, "--rollout-max-response-len", "the configuration"),
        temperature=r.rollout_temperature,
        top_p=r.rollout_top_p,
        top_k=r.rollout_top_k,
        stop=r.rollout_stop,
        stop_token_ids=r.rollout_stop_token_ids,
    )


def check(sample: Sample) -> None:
    """Raise RolloutError, naming sample and slot, where lengths disagree or a log-prob is not finite."""
    if sample.failed:
        return
    n = sample.response_length
    faults = []
    if sample.status is Status.PENDING:
        faults.append("status was not set")
    if not 0 < n < len(sample.tokens):
        faults.append(f"response_length is {n} of {len(sample.tokens)} tokens; both parts need a token")
    if sample.loss_mask is not None and len(sample.loss_mask) != n:
        faults.append(f"loss_mask has {len(sample.loss_mask)} entries for {n} response tokens")
    logprobs = sample.rollout_log_probs
    if logprobs is not None and len(logprobs) != n:
        faults.append(f"rollout_log_probs has {len(logprobs)} entries for {n} response tokens")
    elif logprobs is not None and not faults:
        wrong = [t for t in range(n) if sample.trainable[t] and not math.isfinite(logprobs[t])]
        if wrong:
            faults.append(f"rollout_log_probs[{wrong[0]}] is {logprobs[wrong[0]]}")
    if faults:
        raise RolloutError(f"sample {sample.index} after generation: {'; '.join(faults)}")
