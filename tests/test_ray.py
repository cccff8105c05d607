"""Ranks placed by Ray: a real cluster of two nodes on this machine, and a script run as users run theirs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ppo_lightning.config import PPOConfig
from ppo_lightning.derive import derived
from ppo_lightning.launchers.ray import Rank, RayLauncher, Service, Spot, arrange
from ppo_lightning.launchers.script import RayLaunchError, Script

SCRIPT = Path(__file__).with_name("ray_script.py")


def run(launcher: str, out: Path, fault: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    out.mkdir()
    return subprocess.run(
        [sys.executable, SCRIPT, launcher, str(out), *([fault] if fault else [])],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=out,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def pids(out: Path) -> list[int]:
    return [int(path.read_text()) for path in out.glob("[01].pid")]


def wait_until_gone(numbers: list[int]) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end and any(map(psutil.pid_exists, numbers)):
        time.sleep(0.2)
    return not any(map(psutil.pid_exists, numbers))


@pytest.mark.slow
def test_two_nodes_train_as_one_machine_does(cluster: Any, tmp_path: Path) -> None:
    done = run("ray", tmp_path / "ray", RAY_ADDRESS=cluster.address)
    assert done.returncode == 0, done.stderr
    first, second = results(tmp_path / "ray")
    assert first["node"] != second["node"]
    assert [(r["LOCAL_RANK"], r["LOCAL_WORLD_SIZE"]) for r in (first, second)] == [("0", "1")] * 2
    assert {first["GROUP_RANK"], second["GROUP_RANK"]} == {"0", "1"}
    assert first["arguments"] == ["ray", str(tmp_path / "ray")]
    assert first["steps"] == 4
    local = run("local", tmp_path / "local")
    assert local.returncode == 0, local.stderr
    assert [r["weight"] for r in results(tmp_path / "local")] == [first["weight"]] * 2
    assert second["weight"] == first["weight"]
    assert wait_until_gone(pids(tmp_path / "ray"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", "ZeroDivisionError: a fault on purpose"),
        ("kill", "rank 1 on"),
        ("exit", "status 3"),
        ("late", "ZeroDivisionError: the cause"),  # known after its peer has lost the connection
        ("swallow", "the command line saw ZeroDivisionError('a fault on purpose')"),
    ],
)
def test_the_first_failure_ends_the_job(cluster: Any, tmp_path: Path, fault: str, told: str) -> None:
    out = tmp_path / fault
    done = run("ray", out, fault, RAY_ADDRESS=cluster.address)
    assert done.returncode == 1
    last = done.stderr[-2000:]
    assert told in last
    assert "rank 1 on" in last  # said by the driver
    assert not results(out)
    assert len(pids(out)) == 2
    assert wait_until_gone(pids(out))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "told"),
    [("1, 3", "the job needs 3 CPUs"), ("2, 1", "the largest node of the Ray cluster has 1 CPU")],
)
def test_a_job_too_large_for_the_cluster_is_refused(cluster: Any, size: str, told: str) -> None:
    code = f"from ppo_lightning.launchers.ray import RayLauncher; RayLauncher({size}).launch(print)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        timeout=900,
    )
    assert done.returncode == 1
    assert told in done.stderr


REWARD = """
def score(sample):
    tokens = sample.tokens[-sample.response_length :]
    return sum(token % 3 == 0 for token in tokens) / len(tokens)
"""


def fit(
    launcher: str, directory: Path, options: dict[str, Any], **environment: str
) -> list[dict[str, float]]:
    """`ppo-lightning fit`; the rows of its metrics, without times."""
    directory.mkdir()
    (directory / "own_reward.py").write_text(REWARD)
    file = directory / "run.yaml"
    file.write_text(json.dumps(options | {"launcher": launcher, "output_dir": str(directory / "out")}))
    done = subprocess.run(
        [sys.executable, "-m", "ppo_lightning", "fit", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=3000,
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(directory)} | environment,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    with (directory / "out" / "metrics.csv").open() as table:
        rows = list(csv.DictReader(table))
    return [{k: float(v) for k, v in row.items() if v and not k.startswith("perf/")} for row in rows]


@pytest.mark.slow
def test_ppo_on_two_nodes_with_two_engines_equals_the_local_launcher(tmp_path: Path) -> None:
    """Greedy responses, because SGLang's draws cannot be repeated."""
    from ray.cluster_utils import Cluster

    from tests.fitting import prepare

    options = prepare(tmp_path) | {
        "num_rollout": 2,
        "rollout_top_k": 1,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "rollout_engine": "sglang",
        "rollout_num_gpus": 2,
        "sglang_max_total_tokens": 8192,
        "custom_rm_path": "own_reward:score",
    }
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        made.add_node(num_cpus=3)
        nodes = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 2}
        placed = fit("ray", tmp_path / "ray", options | nodes, RAY_ADDRESS=made.address)
    finally:
        made.shutdown()
    local = fit("local", tmp_path / "local", options | {"actor_num_gpus_per_node": 4})
    assert len(placed) == len(local) == 2
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [c for c in commands if str(tmp_path) in c]  # neither servers nor ranks stay
    for ours, theirs in zip(placed, local, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_services_find_what_the_script_finds(tmp_path: Path) -> None:
    """The user's directory (--hf-checkpoint may be relative) and variables, wherever Ray's daemon runs."""
    (tmp_path / "own_service.py").write_text(
        "import os, sys; print(os.getcwd(), os.environ['HF_HOME'], *sys.argv[1:]); sys.exit(3)"
    )
    script = Script(("my_script.py",), None, str(tmp_path), environment={"HF_HOME": "/models"})
    service = Service("engine 0", ("own_service", "{host}", "{port}"))
    with pytest.raises(RayLaunchError) as caught:
        Rank().serve(service, "10.0.0.2", 7, script)
    assert str(caught.value) == f"engine 0 ended with status 3:\n{tmp_path} /models 10.0.0.2 7"


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"launcher": "ray"}, "distributed"),  # one training node: the engine may still stand on another
        ({"launcher": "ray", "colocate": True}, "tensor"),
        ({}, "tensor"),
    ],
)
def test_weights_take_a_way_that_leads_to_the_engine(changes: dict[str, Any], mode: str) -> None:
    config = PPOConfig.of(hf_checkpoint="x", rollout_engine="sglang", **changes)
    derived_config, _ = derived(config, False, 0)
    assert derived_config.rollout.update_weight_transfer_mode == mode


def test_ranks_of_a_node_stand_in_a_row() -> None:
    spots = [Spot("10.0.0.2", 7, (3,)), Spot("10.0.0.2", 9, (0,)), Spot("10.0.0.1", 8, (1,))]
    spots.append(Spot("10.0.0.1", 6, (2,)))
    order, environments = arrange(spots, per_node=2)
    assert order == [1, 0, 2, 3]  # by GPU within a node
    assert [e["RANK"] for e in environments] == ["0", "1", "2", "3"]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "0", "1"]
    assert [e["GROUP_RANK"] for e in environments] == ["0", "0", "1", "1"]
    assert {e["MASTER_ADDR"] + ":" + e["MASTER_PORT"] for e in environments} == {"10.0.0.2:9"}
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["0,3", "0,3", "1,2", "1,2"]


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"rollout_engine": "hf"}, []),
        ({"rollout_engine": "sglang"}, [1]),
        ({"rollout_engine": "sglang", "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}, [2, 2]),
        ({"rollout_engine": "sglang", "rollout_num_gpus": 4, "colocate": True}, []),
        ({"rollout_engine": "sglang", "rollout_external_urls": ("http://h:1",)}, []),
    ],
)
def test_engines_apart_from_training_get_bundles(changes: dict[str, Any], sizes: list[int]) -> None:
    config = PPOConfig.of(actor_num_gpus_per_node=2, actor_num_nodes=2, **changes)
    launcher = RayLauncher.from_config(config)
    assert (launcher.per_node, launcher.nodes) == (2, 2)
    assert [service.gpus for service in launcher.services] == sizes
