"""A user's script for tests of launchers: a plain Lightning run of two ranks (launcher, directory, fault)."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from ppo_lightning.launchers.ray import RayLauncher


class Strategy(DDPStrategy):
    def __init__(self, launcher: Any) -> None:
        super().__init__()
        self.given = launcher

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = self.given or self._launcher


class Line(pl.LightningModule):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            if self.fault in ("raise", "swallow"):
                raise ZeroDivisionError("a fault on purpose")
            if self.fault == "late":
                time.sleep(3)
                raise ZeroDivisionError("the cause")
            if self.fault == "kill":
                os.kill(os.getpid(), 9)
            if self.fault == "exit":
                sys.exit(3)
        if batch_idx == 1 and self.global_rank == 0 and self.fault == "late":
            raise RuntimeError("gloo: Connection closed by peer")  # as when the other one has died
        (x,) = batch
        return (self.layer(x) - x.sum(-1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(launcher: str, directory: str, fault: str = "") -> None:
    out = Path(directory)
    rank = os.environ.get("RANK", "driver" if launcher == "ray" else os.environ.get("LOCAL_RANK", "0"))
    (out / f"{rank}.pid").write_text(str(os.getpid()))
    pl.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(32, 3))
    module = Line(fault)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if launcher == "ray" else 2,
        num_nodes=2 if launcher == "ray" else 1,
        strategy=Strategy(RayLauncher(per_node=1, nodes=2) if launcher == "ray" else None),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, DataLoader(data, batch_size=4))
    except ZeroDivisionError as error:
        if fault != "swallow":
            raise
        print(f"the command line saw {error!r} {getattr(error, '__notes__', [])}", file=sys.stderr)
        sys.exit(1)
    seen = {
        "weight": module.layer.weight.tolist(),
        "steps": trainer.global_step,
        "node": None,
        **{k: os.environ.get(k) for k in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")},
        "arguments": sys.argv[1:],
    }
    if launcher == "ray":
        import ray

        seen["node"] = ray.get_runtime_context().get_node_id()
    (out / f"{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
