"""metrics.csv that survives a resume, and log.txt."""

from __future__ import annotations

import csv
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

NOISE = (
    r".*Total length of `list` across ranks is zero.*",
    r".*treespec.*is deprecated.*",
    r".*does not have many workers.*",
    r"Using `DistributedSampler` with the dataloaders.*",  # ours has one empty batch
    r"`load_state_dict` is deprecated.*",  # within megatron.core.dist_checkpointing
    r"Please use DTensor instead.*",
    r'.*ckpt_path="last"\)` is set, but there is no last checkpoint.*',  # a first start: there cannot be one
)
ANNOUNCEMENTS = (
    "GPU available",
    "TPU available",
    "\N{ELECTRIC LIGHT BULB} Tip",
    "Initializing distributed",
    "-----",
    "distributed_backend",
)


class MetricsCSV(Logger):
    """One row per rollout in `<output_dir>/metrics.csv`, columns as they come. Lightning's CSVLogger deletes
    the file of the run it resumes; this one keeps it and drops only the rows that are written again."""

    def __init__(self, output_dir: str) -> None:
        super().__init__()
        self.path = Path(output_dir) / "metrics.csv"
        self.rows: dict[int, dict[str, str]] | None = None

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The configuration is saved as config.yaml, not here."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Merge `metrics` into the row of `step` and replace the file at once."""
        step = 0 if step is None else step
        if self.rows is None:
            self.rows = self._kept(step)
        self.rows.setdefault(step, {}).update({k: repr(float(v)) for k, v in metrics.items() if k != "epoch"})
        self._write(self.rows)

    @rank_zero_only
    def go_on(self, step: int, metrics: dict[str, float]) -> None:
        """A run goes on after `step` rollouts. `metrics` are those of the last one: a kill between its
        checkpoint and its row may have kept them from the file."""
        rows = self._kept(step)
        rows.setdefault(step - 1, {}).update({k: repr(float(v)) for k, v in metrics.items()})
        self.rows = {k: row for k, row in rows.items() if row}
        self._write(self.rows)

    def _kept(self, step: int) -> dict[int, dict[str, str]]:
        """What a run that logs `step` first does not do again: the rows before it, and the evaluation that
        stood at the checkpoint. A run from the beginning keeps nothing."""
        if step == 0:
            return {}
        rows = {k: row for k, row in self._read().items() if k <= step}
        rows[step] = {k: v for k, v in rows.get(step, {}).items() if k.startswith("eval/")}
        return rows

    def _read(self) -> dict[int, dict[str, str]]:
        if not self.path.exists():
            return {}
        with self.path.open(newline="", encoding="utf-8") as file:
            return {
                int(row["step"]): {k: v for k, v in row.items() if k != "step" and v}
                for row in csv.DictReader(file)
            }

    def _write(self, rows: dict[int, dict[str, str]]) -> None:
        columns = ["step", *dict.fromkeys(name for row in rows.values() for name in row)]
        temporary = self.path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows({"step": step, **row} for step, row in sorted(rows.items()))
        os.replace(temporary, self.path)


def log_to_file(output_dir: str, rank: int) -> None:
    """Everything the loggers of this package and of Lightning say also goes to `<output_dir>/log.txt` (rank
    0)."""
    for name in ("ppo_lightning", "lightning.pytorch"):
        logger = logging.getLogger(name)
        if rank != 0:
            logger.setLevel(logging.WARNING)
            continue
        if name == "ppo_lightning":
            logger.setLevel(logging.INFO)
            if not logger.handlers:
                logger.addHandler(logging.StreamHandler())
        target = str(Path(output_dir).resolve() / "log.txt")
        if not any(getattr(h, "baseFilename", None) == target for h in logger.handlers):
            handler = logging.FileHandler(target, encoding="utf-8")
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
            logger.addHandler(handler)


def quiet() -> None:
    """Silence what Lightning says at every start and no user can act on."""
    for pattern in NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.distributed"):
        logger = logging.getLogger(name)
        if _is_news not in logger.filters:
            logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(ANNOUNCEMENTS)
