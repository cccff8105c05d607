"""report.png: a run's curves on one page, drawn from its metrics.csv."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# metric -> (rollouts done, values), where the metric was logged
Curves = dict[str, tuple[list[int], list[float]]]

WHOLE_STEP = "perf/step_time"  # the sum of the others, and what they leave out


class ReportError(RuntimeError):
    """There is nothing to draw."""


def write_report(output_dir: str | Path) -> Path:
    """Draw `<output_dir>/metrics.csv` into `<output_dir>/report.png`; the path of the picture. A run that is
    not over, or logged only some of the metrics, gives the panels it can. Raises ReportError that names what
    is missing."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    directory = Path(output_dir)
    curves = read_curves(directory / "metrics.csv")
    figure = Figure(figsize=(13, 11), layout="constrained")
    rollouts = max(done for steps, _ in curves.values() for done in steps)
    figure.suptitle(f"{directory.resolve().name}: {rollouts} rollouts{_headline(curves)}", fontsize=13)
    for axes, draw in zip(figure.subplots(3, 2).flat, PANELS):
        draw(axes, curves)
        if not axes.has_data():
            axes.text(0.5, 0.5, "nothing logged yet", ha="center", va="center", transform=axes.transAxes)
        axes.set_xlabel("rollouts done")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    target = directory / "report.png"
    partial = directory / "report.png.partial"
    figure.savefig(partial, format="png", dpi=110)
    os.replace(partial, target)
    return target


def read_curves(path: Path) -> Curves:
    """The columns of a metrics.csv that hold numbers, without their gaps. A rollout's row bears the number of
    those before it, an evaluation's the number of those done. Raises ReportError."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError as error:
        raise ReportError(
            f"{path} does not exist: the run has logged nothing yet, or another directory is meant"
        ) from error
    curves: Curves = {}
    for number, row in enumerate(rows, 2):
        try:
            step = int(row["step"])
            values = {name: float(text) for name, text in row.items() if text and name != "step"}
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(f"{path}:{number} is no row of metrics: {error}") from error
        for name, value in values.items():
            steps, column = curves.setdefault(name, ([], []))
            steps.append(step if name.startswith("eval/") else step + 1)
            column.append(value)
    if not curves:
        raise ReportError(f"{path} holds no metrics yet: the run ended before its first rollout did")
    return curves


def _reward(axes: Axes, curves: Curves) -> None:
    axes.set_title("reward of the rollout")
    _line(axes, curves, "rollout/reward", "mean")
    _legend(axes)


def _held_out(axes: Axes, curves: Curves) -> None:
    axes.set_title("held-out prompts, mean reward")
    for name in evaluations(curves):
        _line(axes, curves, name, name.removeprefix("eval/").removesuffix("/mean"), marker="o")
    _legend(axes)


def _critic(axes: Axes, curves: Curves) -> None:
    axes.set_title("critic")
    _line(axes, curves, "critic/value_loss", "value loss")
    if "critic/explained_variance" in curves:
        second = axes.twinx()
        _line(second, curves, "critic/explained_variance", "explained variance (right)", color="tab:green")
        lowest = min(-0.05, *curves["critic/explained_variance"][1])
        second.set_ylim(max(-1.0, lowest), 1.05)  # a fresh critic can be far below zero
        second.legend(loc="lower right", fontsize=8)
    _legend(axes)


def _policy(axes: Axes, curves: Curves) -> None:
    axes.set_title("policy: KL and clipping")
    _line(axes, curves, "train/ppo_kl", "KL to the policy of the rollout")
    _line(axes, curves, "train/kl_loss", "KL to the reference")
    _line(axes, curves, "train/pg_clipfrac", "share of clipped tokens")
    _legend(axes)


def _lengths(axes: Axes, curves: Curves) -> None:
    axes.set_title("response length in tokens")
    _line(axes, curves, "rollout/response_length", "mean")
    _line(axes, curves, "rollout/response_length_max", "longest")
    if "rollout/truncated" in curves:
        second = axes.twinx()
        _line(second, curves, "rollout/truncated", "share truncated (right)", color="tab:red")
        second.set_ylim(-0.03, 1.03)
        second.legend(loc="lower right", fontsize=8)
    _legend(axes)


def _time(axes: Axes, curves: Curves) -> None:
    axes.set_title("seconds a rollout")
    stages = [n for n in curves if n.startswith("perf/") and n.endswith("_time") and n != WHOLE_STEP]
    steps = sorted({step for name in stages for step in curves[name][0]})
    below = [0.0] * len(steps)
    for name in stages:
        seconds = dict(zip(*curves[name]))
        heights = [seconds.get(step, 0.0) for step in steps]
        label = name.removeprefix("perf/").removesuffix("_time").replace("_", " ")
        axes.bar(steps, heights, width=1.0, bottom=below, label=label)
        below = [b + h for b, h in zip(below, heights)]
    _line(axes, curves, WHOLE_STEP, "whole step", color="black")
    _legend(axes)


PANELS: tuple[Callable[[Axes, Curves], None], ...] = (_reward, _held_out, _critic, _policy, _lengths, _time)


def evaluations(curves: Curves) -> list[str]:
    """The metrics that are a mean reward on held-out prompts."""
    return [name for name in curves if name.startswith("eval/") and name.endswith("/mean")]


def _headline(curves: Curves) -> str:
    """Held-out reward, first and last."""
    parts = []
    for name in evaluations(curves):
        values = curves[name][1]
        parts.append(f"{name.removeprefix('eval/').removesuffix('/mean')} {values[0]:.3f} → {values[-1]:.3f}")
    return "".join(f", {part}" for part in parts)


def _line(
    axes: Axes, curves: Curves, name: str, label: str, color: str | None = None, marker: str = ""
) -> None:
    if name in curves:
        steps, values = curves[name]
        axes.plot(steps, values, label=label, color=color, marker=marker or ("." if len(steps) == 1 else ""))


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize=8)
