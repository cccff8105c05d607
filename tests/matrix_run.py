"""Runs of the matrix: variants under a layout, through the product's own Trainer and module, compared with
tests/reference.py."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from ppo_lightning.callbacks import PPOCallback
from ppo_lightning.callbacks.debug_rollout import LoadRollouts
from ppo_lightning.config import PPOConfig
from ppo_lightning.data import PromptDataModule
from ppo_lightning.megatron.topology import Topology
from ppo_lightning.megatron.weights import global_parameters
from ppo_lightning.module import PPOModule
from ppo_lightning.run import prepared, trainer_options
from tests import reference
from tests.distributed.ranks import run_ranks
from tests.matrix import (
    LAYOUTS,
    OTHERS,
    VARIANTS,
    Layout,
    Variant,
    make_models,
    make_rollouts,
    model_paths,
    plain,
)

# bounds --------------------------------------------------------------------------------------------------

METRIC = 1e-5  # of a metric's own size, or of its terms where they cancel
GRAD_NORM = 1e-5  # relative
PARAMETER = 2e-6  # absolute, after the last optimizer step
MARGIN = 1e-4  # how far every token must be from a clip boundary, where the loss has a kink
TOKEN = 1e-5  # absolute: values, log-probs, advantages and returns of single tokens, of size 1 to 10


# one rank ------------------------------------------------------------------------------------------------


class Watch(PPOCallback):
    """The logged metrics of every rollout."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.tokens: list[dict[int, dict[str, Tensor]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rows.append({k: v.item() for k, v in trainer.callback_metrics.items() if "perf/" not in k})


class WatchTokens(Watch):
    """And what is known of each token when the updates begin."""

    def on_advantages_end(self, trainer: pl.Trainer, module: Any, share: Any) -> None:
        slots = {
            "values": share.old_values,
            "ref": share.ref_logprobs,
            "old": share.old_logprobs,
            "advantages": share.advantages,
            "returns": share.returns,
        }
        self.tokens.append(
            {
                s.index: {n: x[row, : s.response_length].clone() for n, x in slots.items() if x is not None}
                for row, s in enumerate(share.samples)
            }
        )


@dataclass
class Seen:
    """What one rank of one run saw."""

    rows: list[dict[str, float]]
    tokens: list[dict[int, dict[str, Tensor]]]  # empty where nobody watched
    weights: dict[str, dict[str, Tensor]]  # role -> Hugging Face name -> parameter; rank 0 only
    held: dict[str, str]  # what this rank holds -> digest: the same key means the same numbers


def fit_variants(rank: int, world: int, directory: str, layout: Layout, names: Sequence[str]) -> list[Seen]:
    """Runs of several variants in one process, whose groups are formed once."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    topology: Topology | None = None
    seen = []
    for name in names:
        variant = (VARIANTS | OTHERS)[name]
        trainer, watch = fit_variant(Path(directory), world, layout, variant, topology)
        strategy: Any = trainer.strategy
        topology = strategy.topology
        trained = [role for role in ("actor", "critic") if role in strategy.roles]
        weights = {role: {n: t.clone() for n, t in strategy.weights(role) if rank == 0} for role in trained}
        seen.append(Seen(watch.rows, watch.tokens, weights, held(strategy)))
    return seen


def fit_variant(
    directory: Path,
    world: int,
    layout: Layout,
    variant: Variant,
    topology: Topology | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> tuple[pl.Trainer, Watch]:
    """A whole `trainer.fit` from the stored rollouts, with the groups of `topology` where they exist."""
    places = {role: str(p) for role, p in model_paths(directory, variant.model).items()}
    config = prepared(
        PPOConfig.of(
            **variant.options,
            **layout.sizes,
            actor_num_gpus_per_node=world,
            hf_checkpoint=places["actor"],
            load=places["actor"],
            ref_load=places["reference"],
            prompt_data=str(directory / "prompts.jsonl"),
            load_debug_rollout_data=str(directory / "rollout_{rollout_id}.pt"),
            output_dir=str(directory / "out"),
        )
    )
    config = config.replace(critic_load=places["critic"])  # the flag itself wants a Megatron checkpoint
    watch = WatchTokens() if variant.watched else Watch()
    options = trainer_options(config)
    options["strategy"]._topology = topology
    trainer = pl.Trainer(
        **options,
        max_epochs=-1,
        max_steps=variant.options["num_rollout"],
        callbacks=[LoadRollouts(str(directory / "rollout_{rollout_id}.pt")), watch, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(PPOModule(config), PromptDataModule(config))
    return trainer, watch


def held(strategy: Any) -> dict[str, str]:
    """Digests of this rank's parameters under names that are equal where the parameters must be."""
    found = {}
    for role, model in strategy.roles.items():
        tied = model.hf_config.tie_word_embeddings and role != "critic"
        for name, parameter in global_parameters(model.models).items():
            # a tied last stage has a copy of the first one's embedding
            name = "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name
            cut = parameter.dim() > 1 and not (role == "critic" and name.startswith("output_layer"))
            part = strategy.topology.tp_rank if cut else "whole"
            digest = hashlib.sha256(parameter.detach().float().numpy().tobytes()).hexdigest()
            if found.setdefault(f"{role}/{name}/{part}", digest) != digest:
                raise AssertionError(f"{role}: {name} differs from its copy on the same rank")
    return found


# comparison ----------------------------------------------------------------------------------------------


@dataclass
class Deviations:
    """The largest of a run, each with where it was found."""

    metric: tuple[float, str] = (0.0, "")
    grad_norm: tuple[float, str] = (0.0, "")
    token: tuple[float, str] = (0.0, "")
    parameter: tuple[float, str] = (0.0, "")

    def note(self, kind: str, value: float, where: str) -> None:
        value = float("inf") if value != value else value
        setattr(self, kind, max(getattr(self, kind), (value, where)))

    def check(self) -> None:
        """Raises AssertionError naming what is beyond its bound."""
        bounds = {"metric": METRIC, "grad_norm": GRAD_NORM, "token": TOKEN, "parameter": PARAMETER}
        beyond = [
            f"{kind} {getattr(self, kind)[1]} deviates by {getattr(self, kind)[0]:.2e} (bound {bound:.0e})"
            for kind, bound in bounds.items()
            if getattr(self, kind)[0] > bound
        ]
        assert not beyond, "; ".join(beyond)


def compare(ranks: Sequence[Seen], want: reference.Result) -> Deviations:
    """Raises AssertionError at once where ranks disagree among themselves or a metric is missing."""
    for seen in ranks[1:]:
        assert seen.rows == ranks[0].rows, "ranks log different numbers"
    same_copies(ranks)
    found = Deviations()
    assert len(ranks[0].rows) == len(want.rows)
    for row, wanted, sizes in zip(ranks[0].rows, want.rows, want.scales):
        groups = ("train/", "critic/")
        ours, theirs = ({k for k in x if k.startswith(groups)} for x in (row, wanted))
        assert ours == theirs, f"logged by one side only: {sorted(ours ^ theirs)}"
        for name, value in wanted.items():
            gap = abs(row[name] - value) / max(sizes[name], abs(value), 1e-12)
            found.note("grad_norm" if name.endswith("grad_norm") else "metric", gap, name)
    for number, wanted in enumerate(want.tokens if ranks[0].tokens else []):
        told = [seen.tokens[number] for seen in ranks]
        assert set().union(*told) == set(range(len(wanted["advantages"]))), "a sample was left out"
        for index, slots in (item for part in told for item in part.items()):
            for name, x in slots.items():
                gap = (x - wanted[name][index]).abs().max().item()
                found.note("token", gap, f"{name} of sample {index}")
    for role, weights in want.weights.items():
        assert weights.keys() == ranks[0].weights[role].keys()
        for name, tensor in weights.items():
            gap = (ranks[0].weights[role][name] - tensor).abs().max().item()
            found.note("parameter", gap, f"{role} {name}")
    return found


def as_reference(one: Seen) -> reference.Result:
    """What a single rank saw, for others to be compared with."""
    sizes = [{name: max(abs(x), reference.LOGPROB_DIFFERENCE) for name, x in row.items()} for row in one.rows]
    slots = [{n: [part[i][n] for i in sorted(part)] for n in part[0]} for part in one.tokens]
    return reference.Result(one.rows, sizes, slots, one.weights)


def same_copies(ranks: Sequence[Seen]) -> None:
    """Parameters that several ranks hold are bitwise equal."""
    first: dict[str, tuple[int, str]] = {}
    for rank, seen in enumerate(ranks):
        for key, digest in seen.held.items():
            other, theirs = first.setdefault(key, (rank, digest))
            assert theirs == digest, f"{key} differs between ranks {other} and {rank}"


class Workshop:
    """A directory with models and rollouts, and the reference of each variant, worked out once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.references: dict[str, reference.Result] = {}
        (directory / "prompts.jsonl").write_text('{"input": "a prompt"}\n' * 16)
        for number, samples in enumerate(make_rollouts()):
            torch.save(plain(samples), directory / f"rollout_{number}.pt")

    def models(self, name: str) -> dict[str, Path]:
        """The three models of a variant, made where they are not there yet."""
        model = (VARIANTS | OTHERS)[name].model
        paths = model_paths(self.directory, model)
        if not paths["critic"].exists():
            make_models(self.directory, model)
        return paths

    def reference(self, name: str) -> reference.Result:
        if name not in self.references:
            self.references[name] = (VARIANTS | OTHERS)[name].reference(self.models(name))
        return self.references[name]

    def run(self, layout: Layout, names: Sequence[str]) -> dict[str, list[Seen]]:
        """What every rank saw of each variant."""
        for name in names:
            self.models(name)
        ranks = run_ranks(
            fit_variants, layout.world, str(self.directory), layout, names, group=False, timeout=300
        )
        return {name: [rank[i] for rank in ranks] for i, name in enumerate(names)}

    def deviations(self, layout: str, names: Sequence[str] | None = None) -> dict[str, Deviations]:
        """By variant."""
        chosen = LAYOUTS[layout].variants if names is None else tuple(names)
        runs = self.run(LAYOUTS[layout], chosen)
        return {name: compare(ranks, self.reference(name)) for name, ranks in runs.items()}
