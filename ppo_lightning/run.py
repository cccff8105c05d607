"""From a configuration to a run. `build` is the only place that knows every part."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from ppo_lightning.callbacks import (
    CriticWarmupCallback,
    EvalCallback,
    LoadRollouts,
    MegatronCheckpoint,
    OffloadCallback,
    OverlongCallback,
    ProgressCallback,
    RewardCallback,
    RolloutCallback,
    SamplesCallback,
    SaveRollouts,
    WeightSyncCallback,
)
from ppo_lightning.checks import check_files
from ppo_lightning.config import ConfigError, PPOConfig
from ppo_lightning.data import PromptDataModule
from ppo_lightning.loggers import MetricsCSV, log_to_file, quiet
from ppo_lightning.loop import engine_has_policy
from ppo_lightning.megatron.checkpoint_files import iteration_of
from ppo_lightning.megatron.checkpoint_sources import resume_path, run_checkpoint
from ppo_lightning.megatron.strategy import MegatronStrategy
from ppo_lightning.module import PPOModule

log = logging.getLogger(__name__)


def build(
    config: PPOConfig, callbacks: Sequence[pl.Callback] = ()
) -> tuple[pl.Trainer, PPOModule, PromptDataModule]:
    """A plain Lightning Trainer, the module and the data of `config`. `callbacks` join the default ones; one
    of the same kind as a default (another rollout callback, say) takes its place, rewards add up. Raises
    ConfigError."""
    config = prepared(config)
    data = PromptDataModule(config)
    if config.rollout.num_rollout is None:
        config = config.replace(num_rollout=data.num_rollout_from_epochs(config.rollout.num_epoch))
        if problems := spoilt(config):
            raise ConfigError(problems)
    trainer = pl.Trainer(
        **trainer_options(config),
        max_epochs=-1,
        max_steps=config.rollout.num_rollout,
        callbacks=merge_callbacks(default_callbacks(config), at_work(callbacks, config)),
        logger=loggers(config),
        log_every_n_steps=1,
        enable_checkpointing=not config.debug.debug_rollout_only,
    )
    return trainer, PPOModule(config), data


def fit(config: PPOConfig, callbacks: Sequence[pl.Callback] = ()) -> pl.Trainer:
    """Train, going on from the last checkpoint of `--load` if there is one. Ends with the paths of what was
    made."""
    trainer, module, data = build(config, callbacks)
    config = module.config
    # rollouts alone begin with a checkpoint's weights, and are all done
    checkpoint = None if config.debug.debug_rollout_only else run_checkpoint(config)
    trainer.fit(module, data, ckpt_path=str(checkpoint) if checkpoint else None)
    if trainer.is_global_zero:
        if checkpoint and step_of(checkpoint) >= trainer.max_steps:
            print(f"--num-rollout {trainer.max_steps} was reached already; raise it to train on")
        announce(config, trainer)
    return trainer


def spoilt(config: PPOConfig) -> list[str]:
    """Why a run taken apart would do nothing, or write over another's metrics. Reads names only."""
    debug, directory, total = config.debug, config.logging.output_dir, config.rollout.num_rollout
    if debug.debug_rollout_only and (Path(directory) / "metrics.csv").exists():
        if resume_path(config.model.save) is not None:
            return [
                f"--debug-rollout-only: {directory} holds a training run, whose metrics and samples it would"
                f" overwrite; give another --output-dir, and --load {config.model.save} for its weights"
            ]
    elif debug.debug_train_only and total is not None:
        checkpoint = run_checkpoint(config)
        done = iteration_of(checkpoint) if checkpoint is not None else None
        if done is not None and done >= total:
            return [
                f"--debug-train-only: {checkpoint} has done all {total} rollouts, nothing is left to train;"
                " give another --output-dir, or a higher --num-rollout"
            ]
    return []


def evaluate(config: PPOConfig, callbacks: Sequence[pl.Callback] = ()) -> dict[str, float]:
    """Score the model of `--load`, or of `--hf-checkpoint`, on `--eval-prompt-data`; print and return
    `eval/NAME/...`, and write them to `<output-dir>/evaluation.json`."""
    config = prepared(config, command="evaluate")
    evaluation = EvalCallback.from_config(config)
    own = [RolloutCallback(), *RewardCallback.from_config(config), WeightSyncCallback()]
    trainer = pl.Trainer(
        **trainer_options(config),
        callbacks=merge_callbacks([*own, evaluation], callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.validate(PPOModule(config), datamodule=PromptDataModule(config), verbose=False)
    results = evaluation.results
    if trainer.is_global_zero:
        path = Path(config.logging.output_dir) / "evaluation.json"
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print("\n".join([*(f"{name}  {value:.4f}" for name, value in results.items()), str(path)]))
    return results


def trainer_options(config: PPOConfig) -> dict[str, Any]:
    """What every Trainer of a configuration is told."""
    return {
        "accelerator": "cuda" if torch.cuda.is_available() else "cpu",
        "devices": config.cluster.actor_num_gpus_per_node,
        "num_nodes": config.cluster.actor_num_nodes,
        "strategy": MegatronStrategy.from_config(config),
        "default_root_dir": config.logging.output_dir,
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
    }


def prepared(config: PPOConfig, command: str = "fit") -> PPOConfig:
    """Resolve, check the files, make the output directory and save the configuration there (rank 0)."""
    quiet()
    cuda = torch.cuda.is_available()
    config, notes = config.resolve(
        cuda=cuda, device_count=torch.cuda.device_count() if cuda else 0, command=command
    )
    problems = check_files(config, command) + (spoilt(config) if command == "fit" else [])
    if problems:
        raise ConfigError(problems)
    directory = Path(config.logging.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    rank = current_rank()
    log_to_file(str(directory), rank)
    if rank == 0:
        for note in notes:
            log.warning(note)
        if command == "fit":
            (directory / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    return config


def default_callbacks(config: PPOConfig) -> list[pl.Callback]:
    """The behaviours of a run, in the order in which they act."""
    debug, reward = config.debug, config.reward
    if debug.load_debug_rollout_data:  # scored already, and no engine to wake, to feed or to ask
        callbacks: list[pl.Callback] = [LoadRollouts(debug.load_debug_rollout_data)]
    else:
        # rollouts alone: no model wants the room, and nobody would send the weights again
        sleeps = config.cluster.offload_rollout and not debug.debug_rollout_only
        callbacks = [RolloutCallback(), OffloadCallback(sleeps)]
        if reward.overlong_buffer_len:
            longest = config.rollout.rollout_max_response_len
            callbacks.append(
                OverlongCallback(longest, reward.overlong_buffer_len, reward.overlong_penalty_factor)
            )
        callbacks += RewardCallback.from_config(config)
    if config.ppo:  # without a critic the actor would wait for nothing
        callbacks.append(CriticWarmupCallback(config.critic.num_critic_only_steps))
    callbacks += [
        SamplesCallback(config.logging.output_dir),
        ProgressCallback(),
    ]  # a line, then its evaluation
    trains = not debug.debug_rollout_only
    if not debug.load_debug_rollout_data:
        if trains or not engine_has_policy(config):
            callbacks.append(WeightSyncCallback())
        if trains and config.evaluation.eval_prompt_data:
            callbacks.append(EvalCallback.from_config(config))
    if debug.save_debug_rollout_data:
        callbacks.append(SaveRollouts(debug.save_debug_rollout_data))
    if trains:
        callbacks.append(MegatronCheckpoint.from_config(config))
    return callbacks


def at_work(given: Sequence[pl.Callback], config: PPOConfig) -> list[pl.Callback]:
    """The given callbacks without those that have nothing to do: saved rollouts bring their rewards, and
    need no engine."""
    if config.debug.load_debug_rollout_data is None:
        return list(given)
    idle = (OffloadCallback, RolloutCallback, OverlongCallback, RewardCallback, WeightSyncCallback)
    return [c for c in given if not isinstance(c, (*idle, EvalCallback))]


def merge_callbacks(defaults: Sequence[pl.Callback], given: Sequence[pl.Callback]) -> list[pl.Callback]:
    """Defaults without those whose kind is given, then the given ones; rewards never replace each other."""
    replaced = [
        d
        for d in defaults
        if not isinstance(d, RewardCallback) and any(isinstance(g, type(d)) for g in given)
    ]
    kept = [d for d in defaults if d not in replaced]
    # a given rollout callback stands where the default stood: the engine must exist before others ask for it
    first = [
        callback
        for kind in (RolloutCallback, OffloadCallback)
        for callback in (*kept, *given)
        if isinstance(callback, kind)
    ]
    return [*first, *(c for c in (*given, *kept) if c not in first)]


def loggers(config: PPOConfig) -> list[Logger]:
    """CSV always; TensorBoard and Weights & Biases as asked for."""
    directory = config.logging.output_dir
    made: list[Logger] = [MetricsCSV(directory)]
    if config.logging.use_tensorboard:
        checkpoint = run_checkpoint(config)
        step = step_of(checkpoint) if checkpoint else None
        made.append(TensorBoardLogger(directory, name="tensorboard", version="", purge_step=step))
    if config.logging.use_wandb:
        from lightning.pytorch.loggers import WandbLogger

        made.append(WandbLogger(project=config.logging.wandb_project, save_dir=directory))
    return made


def step_of(checkpoint: Path) -> int:
    """Rollouts done when it was written."""
    return int(checkpoint.name.removeprefix("iter_"))


def current_rank() -> int:
    """This process's rank before any process group exists."""
    from lightning.fabric.utilities.rank_zero import _get_rank

    return _get_rank() or 0


def announce(config: PPOConfig, trainer: pl.Trainer) -> None:
    """Write the report and say where everything lies."""
    from ppo_lightning.report import write_report

    directory = Path(config.logging.output_dir)
    lines = [f"{trainer.global_step} of {trainer.max_steps} rollouts done"]
    if not config.debug.debug_rollout_only:
        lines.append(f"  checkpoint   {resume_path(config.model.save)}")
    lines.append(f"  metrics      {directory / 'metrics.csv'}")
    if config.logging.use_tensorboard:
        lines.append(f"  tensorboard  {directory / 'tensorboard'}")
    lines.append(f"  samples      {directory / 'samples.jsonl'}")
    if (directory / "metrics.csv").exists():
        lines.append(f"  report       {write_report(directory)}")
    print("\n".join(lines), flush=True)
