"""`--dry-run`: what a configuration would do, from the configuration and the model's config.json alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppo_lightning.architecture import ModelShape, layout_problems, recomputed_together
from ppo_lightning.checks import checkpoint_problems, file_problems
from ppo_lightning.config import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from ppo_lightning.config import PPOConfig

MIB, GIB = 1024**2, 1024**3
MOST_RANKS_SHOWN = 32


def dry_run(
    config: PPOConfig,
    recipe: PPOConfig,
    *,
    model_config: Callable[[], Mapping[str, Any]] | None = None,
    command: str = "fit",
) -> None:
    """Print the plan of a resolved configuration. What is missing on disk is an error, unless the recipe
    itself asks for it (`prepare` makes it then). `model_config` gives the recipe's architecture while
    `hf_checkpoint` is not there. Raises ConfigError."""
    notes: list[str] = []
    problems: list[str] = []
    for option, message in (*file_problems(config, command), *checkpoint_problems(config)):
        own = config.flat()[option] == recipe.flat()[option] and recipe.flat()[option] is not None
        (notes if own else problems).append(message)
    if problems:
        raise ConfigError(problems)
    shape = _shape(config, model_config)
    wrong = [message for _, message in layout_problems(shape, config)]
    if wrong:
        raise ConfigError(wrong)
    _print(config, shape, notes)


def _shape(config: PPOConfig, model_config: Callable[[], Mapping[str, Any]] | None) -> ModelShape:
    try:
        return ModelShape.read(config.model.hf_checkpoint)
    except OSError as error:
        if model_config is None:
            raise ConfigError(
                f"no plan without an architecture: {error.filename}: {error.strerror}"
            ) from error
        return ModelShape.of(model_config())


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands. Megatron's order: tensor ranks side by side, pipeline stages farthest apart."""

    rank: int
    node: int
    tp: int
    cp: int
    dp: int
    pp: int


def places(config: PPOConfig) -> list[Place]:
    """Every training rank's coordinates."""
    m = config.model
    tp, cp, pp = m.tensor_model_parallel_size, m.context_parallel_size, m.pipeline_model_parallel_size
    dp = config.world_size // (tp * cp * pp)
    return [
        Place(
            rank=rank,
            node=rank // config.cluster.actor_num_gpus_per_node,
            tp=rank % tp,
            cp=rank // tp % cp,
            dp=rank // (tp * cp) % dp,
            pp=rank // (tp * cp * dp),
        )
        for rank in range(config.world_size)
    ]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank."""

    weights: int
    main_weights: int = 0  # the fp32 copy beside bf16 weights
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.main_weights + self.gradients + self.optimizer


def memory(config: PPOConfig, shape: ModelShape, stage: int, role: str) -> Memory:
    """Of "actor", "critic" or "reference" on a rank of pipeline stage `stage`, without activations. Gradients
    are summed in fp32; the distributed optimizer shards its state over DP x CP."""
    m = config.model
    count = _parameters_on(config, shape, stage, role)
    weights = count * (2 if m.bf16 else 4)
    if role == "reference":
        return Memory(weights)
    shards = config.data_parallel_size * m.context_parallel_size if m.use_distributed_optimizer else 1
    share = math.ceil(count / shards)
    state = 8 if config.optimizer.optimizer == "adam" else 4
    return Memory(weights, share * 4 if m.bf16 else 0, count * 4, share * state)


def _parameters_on(config: PPOConfig, shape: ModelShape, stage: int, role: str) -> int:
    m = config.model
    sizes = (
        m.tensor_model_parallel_size,
        m.pipeline_model_parallel_size,
        m.virtual_pipeline_model_parallel_size or 1,
    )
    return shape.parameters_on(stage, *sizes, value_head=role == "critic", chunk=_chunk(config))


def _chunk(config: PPOConfig) -> int:
    return recomputed_together(config.model.recompute_method, config.model.recompute_num_layers)


def roles(config: PPOConfig) -> list[str]:
    return ["actor", *(["critic"] if config.ppo else []), *(["reference"] if config.kl else [])]


def _print(config: PPOConfig, shape: ModelShape, notes: list[str]) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    title = f"{shape.model_type}, {shape.layers} layers, hidden {shape.hidden}, vocabulary {shape.vocab}"
    console.print(f"[bold]Plan[/] of {config.recipe or 'this configuration'}: {title}")
    console.print(_layout_table(config, shape))
    console.print(_batch_table(config))
    console.print(_parameter_table(config, shape))
    console.print(_memory_table(config, shape))
    for line in _engine_lines(config, shape):
        console.print(line)
    for note in notes:
        console.print(f"[yellow]not there yet:[/] {note}", soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=80)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _layout_table(config: PPOConfig, shape: ModelShape) -> Table:
    m = config.model
    tp, pp, cp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
    title = f"World: {config.world_size} ranks = TP {tp} x PP {pp} x CP {cp} x DP {config.data_parallel_size}"
    table = _table(title, "rank", "node", "tp", "pp", "cp", "dp", "layers", "and")
    everyone = places(config)
    for place in everyone[:MOST_RANKS_SHOWN]:
        first, last = place.pp == 0, place.pp == m.pipeline_model_parallel_size - 1
        ends = ", ".join([*(["embedding"] if first else []), *(["heads"] if last else [])])
        coordinates = (place.rank, place.node, place.tp, place.pp, place.cp, place.dp)
        table.add_row(*(str(v) for v in coordinates), _layers_of(config, shape, place.pp), ends)
    if len(everyone) > MOST_RANKS_SHOWN:
        table.add_row(f"... {len(everyone)}")
    return table


def _layers_of(config: PPOConfig, shape: ModelShape, stage: int) -> str:
    """'0-13', or several ranges where stages are interleaved; the critic's beside it where they differ."""
    pp = config.model.pipeline_model_parallel_size
    chunks = config.model.virtual_pipeline_model_parallel_size or 1
    if chunks > 1:
        size = shape.layers // (pp * chunks)
        return ", ".join(_range((chunk * pp + stage) * size, size) for chunk in range(chunks))
    texts = {}
    for role in roles(config):
        layers = shape.stage_layers(pp, value_head=role == "critic", chunk=_chunk(config))
        texts[role] = _range(sum(layers[:stage]), layers[stage])
    own = texts["actor"]
    return own if texts.get("critic", own) == own else f"{own}, critic {texts['critic']}"


def _range(start: int, size: int) -> str:
    return f"{start}-{start + size - 1}" if size > 1 else str(start)


def _batch_table(config: PPOConfig) -> Table:
    table = _table("Batches", "", "")
    table.show_header = False
    for name, value in batch_arithmetic(config):
        table.add_row(name, value)
    return table


def batch_arithmetic(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """What a rollout and an optimizer step are made of, as (name, value) lines."""
    r, p, dp = config.rollout, config.performance, config.data_parallel_size
    if r.rollout_batch_size is None:
        return
    samples = r.rollout_batch_size * r.n_samples_per_prompt
    epochs = config.algorithm.ppo_epochs
    steps = r.num_steps_per_rollout * epochs
    yield "samples a rollout", f"{r.rollout_batch_size} prompts x {r.n_samples_per_prompt} = {samples}"
    once = f"{r.num_steps_per_rollout}" + (f" x {epochs} epochs = {steps}" if epochs > 1 else "")
    yield "optimizer steps a rollout", f"{once}, of {r.global_batch_size} samples"
    share = math.ceil(r.global_batch_size / dp)
    yield "samples a step and data rank", f"{'at most ' if r.global_batch_size % dp else ''}{share}"
    if p.use_dynamic_batch_size:
        budget = (p.max_tokens_per_gpu or 0) * config.model.context_parallel_size
        yield "micro-batches", f"as many as {budget} tokens each need"
    else:
        yield (
            "micro-batches a step",
            f"{math.ceil(share / p.micro_batch_size)} of {p.micro_batch_size} samples",
        )
    prompt = config.data.rollout_max_prompt_len
    if r.rollout_max_response_len is not None:
        longest = f"{r.rollout_max_response_len} response tokens"
        yield "longest sequence", f"{prompt} prompt + {longest}" if prompt else f"prompt + {longest}"
        yield "response tokens a rollout", f"at most {samples * r.rollout_max_response_len:,}"
    if r.num_rollout is not None:
        total = f"{r.num_rollout} rollouts, {r.num_rollout * samples:,} samples"
        held = min(config.critic.num_critic_only_steps, r.num_rollout) if config.ppo else 0
        yield "the run", f"{total}, {(r.num_rollout - held) * steps:,} actor steps"
        if config.ppo:
            yield "critic steps", f"{r.num_rollout * steps:,} (the first {held} rollouts train it alone)"
    else:
        yield "the run", f"{r.num_epoch} passes over the prompts"


def _parameter_table(config: PPOConfig, shape: ModelShape) -> Table:
    table = _table("Parameters", "model", "whole", *(f"on stage {s}" for s in _stages(config)))
    for role in roles(config):
        parts = [_parameters_on(config, shape, s, role) for s in _stages(config)]
        whole = shape.parameters(value_head=role == "critic")
        table.add_row(role, *(f"{count:,}" for count in (whole, *parts)))
    return table


def _stages(config: PPOConfig) -> list[int]:
    """The stages that differ: the first, one between, the last."""
    pp = config.model.pipeline_model_parallel_size
    return sorted({0, min(1, pp - 1), pp - 1})


def _memory_table(config: PPOConfig, shape: ModelShape) -> Table:
    stages = _stages(config)
    how = "sharded over DP x CP" if config.model.use_distributed_optimizer else "whole on every data rank"
    title = f"Memory a rank, without activations; optimizer state {how}"
    table = _table(title, "", *(f"stage {s}" for s in stages))
    totals = {s: [memory(config, shape, s, role).total for role in roles(config)] for s in stages}
    for role in roles(config):
        held = [memory(config, shape, s, role) for s in stages]
        parts = ("weights", "main_weights", "gradients", "optimizer")
        for part in parts:
            sizes = [getattr(h, part) for h in held]
            if any(sizes):
                name = part.replace("main_weights", "fp32 main weights").replace(
                    "optimizer", "optimizer state"
                )
                table.add_row(f"{role} {name}", *(_bytes(size) for size in sizes))
    table.add_row("all resident", *(_bytes(sum(totals[s])) for s in stages))
    if config.cluster.offload_train:
        table.add_row("with offload, the largest", *(_bytes(max(totals[s])) for s in stages))
    return table


def _bytes(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.2f} MiB"


def _engine_lines(config: PPOConfig, shape: ModelShape) -> Iterator[str]:
    c, r = config.cluster, config.rollout
    size = shape.parameters() * (2 if config.model.bf16 else 4)
    if r.rollout_engine == "hf":
        yield (
            f"Engine: transformers in each of the {config.world_size} ranks, {_bytes(size)} of weights each"
        )
        return
    per = c.rollout_num_gpus_per_engine
    where = "on the training GPUs" if c.colocate else "on GPUs of their own"
    if r.rollout_external_urls:
        where = "already running at " + ", ".join(r.rollout_external_urls)
    count = c.rollout_num_gpus // per
    yield (
        f"Engines: {count} SGLang of {per} GPU{'s' if per > 1 else ''} {where}, {_bytes(size // per)} of"
        " weights a GPU"
    )
