"""report.png, from metrics.csv files whole and broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_lightning.report import ReportError, read_curves, write_report

WHOLE = """step,eval/heldout/mean,rollout/reward,rollout/response_length,rollout/truncated,critic/value_loss,\
critic/explained_variance,train/ppo_kl,perf/rollout_time,perf/actor_time,perf/step_time
0,0.25,0.3,9.0,0.1,0.2,-5.0,,0.5,,0.6
1,,0.5,11.0,0.0,0.1,0.4,0.001,0.5,0.4,1.0
2,0.75,,,,,,,,,
"""


def write(directory: Path, text: str) -> Path:
    (directory / "metrics.csv").write_text(text, encoding="utf-8")
    return directory


def test_an_evaluation_stands_at_the_rollouts_done(tmp_path: Path) -> None:
    curves = read_curves(write(tmp_path, WHOLE) / "metrics.csv")
    assert curves["rollout/reward"] == ([1, 2], [0.3, 0.5])
    assert curves["eval/heldout/mean"] == ([0, 2], [0.25, 0.75])
    assert curves["train/ppo_kl"] == ([2], [0.001])


def test_a_picture_with_the_curves(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = write_report(write(tmp_path, "step,rollout/reward\n0,0.3\n1,0.5\n"))
    assert path == tmp_path / "report.png"
    picture = imread(path)
    assert min(picture.shape[:2]) > 500
    colours = (picture[..., :3].reshape(-1, 3) * 255).round().astype(int)
    assert ((colours == (31, 119, 180)).all(axis=1)).sum() > 500  # matplotlib's first colour
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "report.png"]


@pytest.mark.parametrize(
    "text",
    [
        "step,rollout/reward\n0,0.5\n",
        "step,eval/heldout/mean\n0,0.5\n",
        "step,perf/step_time,critic/explained_variance\n0,1.0,nan\n1,inf,-inf\n",
    ],
)
def test_a_partial_run_gives_what_it_can(tmp_path: Path, text: str) -> None:
    assert write_report(write(tmp_path, text)).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no metrics yet"),
        ("step,rollout/reward\n", "no metrics yet"),
        ("step,rollout/reward\n0,much\n", r"metrics\.csv:2 .*much"),
        ("rollout/reward\n1.0\n", r"metrics\.csv:2 .*step"),
    ],
)
def test_what_cannot_be_drawn_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        write_report(write(tmp_path, text))
    assert not (tmp_path / "report.png").exists()


def test_no_metrics_at_all(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"metrics\.csv does not exist"):
        write_report(tmp_path)
