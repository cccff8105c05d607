"""`MegatronCheckpoint` in a real Lightning fit: when it saves, what it keeps, what it finds again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.callbacks.checkpoint import MegatronCheckpoint
from ppo_lightning.hooks import emit
from ppo_lightning.megatron import checkpoint_files as files
from ppo_lightning.megatron.checkpoint import MegatronCheckpointIO
from ppo_lightning.megatron.strategy import MegatronStrategy
from tests.distributed.ranks import run_ranks
from tests.distributed.test_strategy import OPTIONS, make_samples, microbatches, value_loss
from tests.tinymodel import make_tiny_model

SCORES = {2: 0.1, 4: 0.9, 6: 0.3, 8: 0.5}  # of the evaluations, by rollout


class OneStep(torch.optim.Optimizer):
    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(()))], {})

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()


class Loop(pl.LightningModule):
    """One critic update a batch, with an evaluation every second."""

    def __init__(self, model_dir: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model_dir, self.norms = model_dir, []

    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        for role in ("actor", "critic"):
            strategy.setup_model(role, self.model_dir, optimizer=OPTIONS)
            strategy.load_weights(role, self.model_dir)

    def configure_optimizers(self) -> OneStep:
        return OneStep()

    def training_step(self, batch: Any, index: int) -> None:
        strategy = self.trainer.strategy
        strategy.forward_backward("critic", microbatches(make_samples()), value_loss)
        self.norms.append(strategy.step("critic").grad_norm)
        self.optimizers().step()
        self.log("noise", float(self.trainer.global_step % 3))


class Evaluation(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in SCORES:
            score = SCORES[trainer.global_step]
            trainer.lightning_module.log("eval/x/mean", score)
            emit(trainer, "on_eval_end", {"eval/x/mean": score})


def fit(
    rank: int, world: int, model_dir: str, root: str, steps: int, options: dict[str, Any], **run: Any
) -> dict[str, Any]:
    callback = MegatronCheckpoint(root, **options)
    io = MegatronCheckpointIO(async_save=run.pop("async_save", False))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, max_steps=steps, logger=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Evaluation(), callback],
        strategy=MegatronStrategy(checkpoint_io=io),
    )  # fmt: skip
    module = Loop(model_dir)
    trainer.fit(module, torch.utils.data.DataLoader(range(3)), **run)
    return {
        "norms": module.norms,
        "step": trainer.global_step,
        "best": Path(callback.best_model_path).name,
        "last": Path(callback.last_model_path).name,
    }


def fit_and_resume(rank: int, world: int, *args: Any) -> dict[str, Any]:
    return fit(rank, world, *args, ckpt_path="last")


def fit_async(rank: int, world: int, *args: Any) -> dict[str, Any]:
    return fit(rank, world, *args, async_save=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory)
    return str(directory)


def start(function: Any, *args: Any) -> dict[str, Any]:
    (result,) = run_ranks(function, 1, *args, group=False)
    return result


@pytest.mark.parametrize("function", [fit, fit_async])
def test_saves_every_n_and_at_the_end_and_keeps_the_newest(
    model_dir: str, tmp_path: Path, function: Any
) -> None:
    root = tmp_path / "save"
    done = start(function, model_dir, str(root), 5, {"every_n_train_steps": 2, "keep_checkpoints": 2})
    assert (done["step"], done["last"], done["best"]) == (5, "iter_0000005", "iter_0000005")
    for place in (root, tmp_path / "save_critic"):
        assert files.iterations(place) == [4, 5]
        assert files.latest_iteration(place) == 5


def test_the_best_stay_beside_the_last(model_dir: str, tmp_path: Path) -> None:
    """Only fresh evaluations count: the 0.9 that is still logged at rollouts 5 and 6 belongs to rollout 4."""
    options = {"monitor": "eval/x/mean", "save_top_k": 2, "every_n_train_steps": 1}
    done = start(fit, model_dir, str(tmp_path / "save"), 9, options)
    assert files.iterations(tmp_path / "save") == [4, 8, 9]
    assert (done["best"], done["last"]) == ("iter_0000004", "iter_0000009")


def test_without_the_last_only_the_best_are_saved(model_dir: str, tmp_path: Path) -> None:
    options = {"monitor": "eval/x/mean", "save_last": False, "every_n_train_steps": 1, "save_at_end": False}
    done = start(fit, model_dir, str(tmp_path / "save"), 9, options)
    assert files.iterations(tmp_path / "save") == [4]
    assert done["best"] == "iter_0000004"


def test_a_path_is_resumed_as_well_as_the_last(model_dir: str, tmp_path: Path) -> None:
    root, options = tmp_path / "save", {"every_n_train_steps": 1, "keep_checkpoints": -1}
    straight = start(fit, model_dir, str(root), 3, options)
    again = start(fit_from, model_dir, str(root), 3, options, str(root / "iter_0000001"))
    assert again["norms"] == straight["norms"][1:]


def fit_from(rank: int, world: int, *args: Any) -> dict[str, Any]:
    *args, path = args
    return fit(rank, world, *args, ckpt_path=path)


def test_last_is_found_again_and_goes_on_alike(model_dir: str, tmp_path: Path) -> None:
    options = {"every_n_train_steps": 2}
    straight = start(fit, model_dir, str(tmp_path / "a" / "save"), 6, options)
    root = str(tmp_path / "b" / "save")
    first = start(fit_and_resume, model_dir, root, 4, options)
    second = start(fit_and_resume, model_dir, root, 6, options)
    assert first["norms"] + second["norms"] == straight["norms"]
    assert second["step"] == 6
    again = start(fit_and_resume, model_dir, root, 6, options)
    assert again["norms"] == []
    assert files.iterations(root) == [6]


@pytest.mark.parametrize("trap", ["filename", "save_on_exception", "enable_version_counter"])
def test_what_would_not_work_is_refused(trap: str) -> None:
    with pytest.raises(ValueError, match=trap):
        MegatronCheckpoint("x", **{trap: "y"})
