"""CONTRIBUTING.md works as it says: its code, in files of a user's own, through the command line."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.fitting import prepare

ROOT = Path(__file__).resolve().parent.parent
RECIPE = """
import my_package.estimator, my_package.rewards
from my_package.callback import LengthPenalty
from ppo_lightning.config import PPOConfig

def config():
    return PPOConfig.of(**OPTIONS)

def callbacks():
    return [LengthPenalty()]
"""


def code(topic: str) -> str:
    """The first block of Python under `## How to add TOPIC`."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"## How to add {topic}\n", 1)[1].split("\n## ", 1)[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None, f"no code under {topic!r}"
    return found[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a package of a user's own, outside the current directory."""
    folder = tmp_path / "project"
    package = folder / "my_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "rewards.py").write_text(code("a reward"))
    (package / "callback.py").write_text(code("a callback"))
    (package / "estimator.py").write_text(code("an advantage estimator"))
    return folder


def rows(output: Path) -> list[dict[str, str]]:
    with (output / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_recipe_brings_its_own_reward_estimator_and_callback(project: Path, tmp_path: Path) -> None:
    options = prepare(tmp_path)
    prompts = [{"input": f"Add {i}+{i}", "label": str(2 * i)} for i in range(8)]
    Path(options["prompt_data"]).write_text("".join(json.dumps(row) + "\n" for row in prompts))
    options |= {
        "advantage_estimator": "mean_baseline",
        "rm_type": "last_word",
        "label_key": "label",
        "num_rollout": 2,
        "actor_num_gpus_per_node": 1,
    }
    (project / "mine.py").write_text(RECIPE.replace("OPTIONS", repr(options)))
    said = tmp_path / "said"
    forked.warm()
    run = forked.command(["fit", "--recipe", str(project / "mine.py")], said, prepare=lambda rank: None)
    assert run.wait(120) == 0, said.read_text()
    seen = rows(tmp_path / "out")
    assert len(seen) == 2
    # a random model never ends with the label, so what is left is the callback's penalty
    for row in seen:
        assert float(row["rollout/reward"]) == pytest.approx(-0.001 * float(row["rollout/response_length"]))


def test_an_estimator_comes_with_the_module_of_a_named_function(project: Path) -> None:
    """And both are found from the console script, whose directory is not the user's."""
    (project / "mine.py").write_text(
        "import my_package.estimator\n\ndef reward(sample):\n    return 1.0\n", encoding="utf-8"
    )
    console = Path(sys.executable).with_name("ppo-lightning")
    flags = ["--hf-checkpoint", "m", "--prompt-data", "p", "--rollout-batch-size", "2", "--num-rollout", "1"]
    flags += ["--rollout-max-response-len", "4", "--advantage-estimator", "mean_baseline", "--print-config"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for function, code, message in (
        ("mine:reward", 0, ""),
        ("mine:rewards", 2, "mine has no 'rewards'"),
    ):
        done = subprocess.run(
            [console, "fit", *flags, "--custom-rm-path", function],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        assert message in done.stderr


def test_a_reward_in_the_folder_of_rewards_is_found(tmp_path: Path) -> None:
    """In a copy of the package, as a checkout with one more file."""
    package = tmp_path / "ppo_lightning"
    package.mkdir()
    for path in (ROOT / "ppo_lightning").iterdir():
        if path.name != "rewards":
            (package / path.name).symlink_to(path)
    shutil.copytree(ROOT / "ppo_lightning" / "rewards", package / "rewards")
    (package / "rewards" / "last_word.py").write_text(code("a reward"))
    script = (
        "import sys\n"
        "from ppo_lightning.rewards import parse_rm_type, score\n"
        "assert parse_rm_type('last_word,f1:2') == [('last_word', 1.0), ('f1', 2.0)]\n"
        "assert 'ppo_lightning.rewards.last_word' not in sys.modules\n"
        "print(score('last_word', 'it is 4', '4'), score('last_word', 'it is 5', '4'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "1.0 0.0\n", done.stderr


def test_the_places_to_add_a_model_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## How to add a model\n", 1)[1]
    names = re.findall(r"`(\w+)`", text.split("\n## ", 1)[0])
    homes = [Path(p).read_text() for p in map(str, (ROOT / "ppo_lightning").rglob("*.py"))]
    assert {"SUPPORTED", "_REQUIRED", "layer_matrices"} <= set(names)
    for name in names:
        assert any(re.search(rf"\b{name}\b", home) for home in homes), name
