"""A `trainer.fit` that is killed twice, and resumed twice, equals bit for bit one that is left alone."""

from __future__ import annotations

import csv
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from ppo_lightning.megatron.optimizer import inner_optimizers
from tests.distributed.ranks import RankError, run_ranks
from tests.fitting import fit_rank, prepare

DEATHS = (1, 3)  # rollouts done: within the steps of the critic alone, and after them
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2 sharded": (2, {"use_distributed_optimizer": True}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}
RUN = {
    "num_rollout": 5,
    "save_interval": 1,
    "num_critic_only_steps": 2,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "critic_lr_warmup_iters": 3,
    "eval_interval": 2,
}


class Die(pl.Callback):
    """kill -9 of every rank when `rollout` is done, saved and logged."""

    def __init__(self, rollout: int) -> None:
        self.rollout = rollout

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.rollout:
            os.kill(os.getpid(), signal.SIGKILL)


class Moments(pl.Callback):
    """Digests of every tensor of the optimizers, at the end."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, role in trainer.strategy.roles.items():
            for part, inner in enumerate(inner_optimizers(role.optimizer) if role.optimizer else []):
                for number, state in enumerate(inner.state.values()):
                    for key, tensor in state.items():
                        data = tensor.detach().contiguous().numpy().tobytes()
                        self.digests[f"{name}/{part}/{number}/{key}"] = hashlib.sha256(data).hexdigest()


def fit(rank: int, world: int, options: dict[str, Any], death: int | None, resume: bool) -> dict[str, Any]:
    moments = Moments()
    callbacks = [moments, *([] if death is None else [Die(death)])]
    seen = fit_rank(rank, world, options, callbacks, resume)
    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in seen.pop("rows")]
    return seen | {"rows": rows, "moments": moments.digests}


def run(world: int, options: dict[str, Any], death: int | None = None, resume: bool = False) -> list[Any]:
    return run_ranks(fit, world, options, death, resume, group=False, timeout=300)


def killed(world: int, options: dict[str, Any], death: int, resume: bool) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        run(world, options, death, resume)


def logged(directory: str) -> list[dict[str, str]]:
    """metrics.csv, evaluations included, without times."""
    with Path(directory, "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("layout", "batch", "prompts"),
    [
        pytest.param(
            layout, batch, prompts, id=f"{layout}, {8 // batch} steps",
            marks=[] if (layout, batch) in (("one", 4), ("pp2", 8)) else pytest.mark.slow,
        )
        for layout in LAYOUTS
        for batch, prompts in ((8, 10), (4, 12))  # an epoch that ends within rollout 3, and just with it
    ],
)  # fmt: skip
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, layout: str, batch: int, prompts: int) -> None:
    world, sizes = LAYOUTS[layout]
    options = prepare(tmp_path, prompts=prompts) | RUN | sizes | {"global_batch_size": batch}
    options["eval_prompt_data"] = ("heldout", options["prompt_data"])
    straight = run(world, options | {"output_dir": str(tmp_path / "straight")})
    parts = options | {"output_dir": str(tmp_path / "parts")}
    killed(world, parts, DEATHS[0], False)
    killed(world, parts, DEATHS[1], True)
    resumed = run(world, parts, None, True)
    for before, after in zip(straight, resumed):
        assert after["rollouts"] == before["rollouts"][DEATHS[1] :]  # tokens and rewards
        assert after["rows"] == before["rows"][DEATHS[1] :]
        assert after["weights"] == before["weights"]
        assert after["moments"] == before["moments"] != {}
    assert logged(parts["output_dir"]) == logged(str(tmp_path / "straight"))
