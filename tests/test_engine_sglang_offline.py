"""What the SGLang engine decides before it asks a server: plans, weight files, checksums."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_lightning.background import LoopThread
from ppo_lightning.config import ConfigError, PPOConfig
from ppo_lightning.engines import sglang_plan
from ppo_lightning.engines.sglang_checksums import Layout, expected
from ppo_lightning.engines.sglang_fleet import Fleet
from ppo_lightning.engines.sglang_plan import Place, Plan
from ppo_lightning.engines.sglang_server import ServerProcess
from ppo_lightning.engines.weight_store import WeightStore, buckets
from tests import sglang_fixtures as fixtures
from tests.sglang_fixtures import make_plan, model_with, weights

sglang_checkpoint = fixtures.sglang_checkpoint


@pytest.fixture
def checkpoint(sglang_checkpoint: Path) -> Path:
    return sglang_checkpoint


def test_buckets_are_as_large_as_allowed() -> None:
    tensors = [(str(i), torch.zeros(n)) for i, n in enumerate([4, 4, 2, 20, 1])]
    assert [[name for name, _ in b] for b in buckets(iter(tensors), 40)] == [["0", "1", "2"], ["3"], ["4"]]


def test_the_store_holds_whole_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    store = WeightStore(str(checkpoint), str(tmp_path))
    model = model_with(checkpoint, seed=1)
    list(store.record(5, buckets(weights(model), 30_000)))
    loaded = AutoModelForCausalLM.from_pretrained(store.path(5), dtype=torch.float32)
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert AutoTokenizer.from_pretrained(store.path(5)).eos_token_id == 258
    assert {n: t.shape for n, t in store.tensors(5)} == {n: t.shape for n, t in weights(model)}
    stream = store.record(6, buckets(weights(model), 30_000))
    next(stream)
    assert not store.path(6).exists()
    store.close()
    assert not any(tmp_path.iterdir())


def test_a_store_is_found_from_any_directory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = WeightStore(str(checkpoint), "run/weights")
    assert store.path(1).is_relative_to(tmp_path.resolve())
    store.close()


def test_a_store_left_by_a_killed_process_is_removed(checkpoint: Path, tmp_path: Path) -> None:
    store = WeightStore(str(checkpoint), str(tmp_path))
    machine = store.root.name.split("@")[1]
    dead = tmp_path / f"ppo-lightning-weights-999999999@{machine}@abc"
    elsewhere = tmp_path / f"ppo-lightning-weights-999999999@{machine}-2@abc"
    dead.mkdir()
    elsewhere.mkdir()
    other = WeightStore(str(checkpoint), str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([store.root, other.root, elsewhere])


@pytest.mark.parametrize(
    ("world", "cuda", "changes", "places"),
    [
        (4, False, {}, [(0, 0)]),
        (4, False, {"rollout_num_gpus": 2}, [(0, 0), (2, 0)]),
        (1, False, {"rollout_num_gpus": 2}, [(0, 0), (0, 0)]),
        (16, True, {"colocate": True, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 4},
         [(0, 0), (4, 4), (8, 0), (12, 4)]),
        (4, True, {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}, [(0, 4), (1, 6)]),
    ],
)  # fmt: skip
def test_where_engines_live(
    world: int, cuda: bool, changes: dict[str, Any], places: list[tuple[int, int]]
) -> None:
    nodes = max(1, world // 8)
    config = PPOConfig.of(
        hf_checkpoint="x", actor_num_nodes=nodes, actor_num_gpus_per_node=world // nodes, **changes
    )
    assert Plan.from_config(config, world, cuda=cuda).places == tuple(Place(*p) for p in places)


def test_given_servers_need_no_place_beside_the_ranks() -> None:
    """Several nodes with GPUs, where own servers that are not colocated would have none."""
    urls = ("host:30000", "http://other:30000/", "https://proxy/engine")
    config = PPOConfig.of(
        hf_checkpoint="x", actor_num_nodes=2, actor_num_gpus_per_node=8, rollout_external_urls=urls
    )
    plan = Plan.from_config(config, 16, cuda=True)
    assert plan.urls == ("http://host:30000", "http://other:30000", "https://proxy/engine")


@pytest.mark.parametrize("url", ["", "grpc://host:1", "host:port", "http://", "host 1"])
def test_addresses_of_no_server_are_refused(url: str) -> None:
    config = PPOConfig.of(hf_checkpoint="x", rollout_engine="sglang", rollout_external_urls=(url,))
    with pytest.raises(ConfigError, match="write it as http://HOST:PORT or HOST:PORT"):
        config.resolve(cuda=False, device_count=0)


def test_colocated_engines_stay_on_their_node() -> None:
    config = PPOConfig.of(
        hf_checkpoint="x",
        colocate=True,
        actor_num_nodes=2,
        actor_num_gpus_per_node=6,
        rollout_num_gpus=12,
        rollout_num_gpus_per_engine=4,
    )
    with pytest.raises(ValueError, match="engines of 4 GPUs do not fill nodes of 6"):
        Plan.from_config(config, 12, cuda=True)


def test_the_masters_node_has_an_address_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name is often a loopback address in its /etc/hosts."""
    routes = {"head": "127.0.1.1", "other": "10.0.0.7", "127.0.0.1": "127.0.0.1"}
    routes[sglang_plan.OUTSIDE] = "10.0.0.5"
    monkeypatch.setattr(sglang_plan, "address_towards", routes.__getitem__)
    for master, mine in (("head", "10.0.0.5"), ("other", "10.0.0.7"), ("127.0.0.1", "127.0.0.1")):
        monkeypatch.setenv("MASTER_ADDR", master)
        assert sglang_plan.own_address() == mine


def test_a_server_is_given_as_long_for_a_health_check_as_we_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "SGLANG_HEALTH_CHECK_TIMEOUT"
    monkeypatch.delenv(name, raising=False)
    server = ServerProcess("server", "127.0.0.1", (), tmp_path / "log", True, health_timeout=44.5)
    assert server._environment()[name] == "45"
    monkeypatch.setenv(name, "7")
    assert server._environment()[name] == "7"


def test_a_watch_that_fails_ends_the_run(checkpoint: Path, tmp_path: Path) -> None:
    plan, loop = make_plan(checkpoint, tmp_path), LoopThread()
    fleet = Fleet(plan, 0, loop, Layout(1, 2, torch.float32, cuda=False))

    async def look(probe: bool) -> None:
        raise OSError("no more processes")

    fleet._look = look  # type: ignore[method-assign]
    try:
        loop.run(asyncio.wait_for(fleet._watch(), 10))
        assert "nobody watches the SGLang servers any more: OSError('no more" in str(fleet.broken)
    finally:
        loop.stop()
        fleet.close()


def test_flags_of_the_user_come_last_and_as_written() -> None:
    config = PPOConfig.of(
        hf_checkpoint="x",
        sglang_mem_fraction_static=0.4,
        sglang_disable_radix_cache=True,
        sglang_dtype="bfloat16",
    )
    arguments = Plan.from_config(config, 1, cuda=False).arguments
    joined = config.replace(sglang_args=("--sglang-dtype=bfloat16", "--sglang-json={'a=b': 1}"))
    arguments_joined = Plan.from_config(joined, 1, cuda=False).arguments
    assert arguments_joined[-4:] == ("--dtype", "bfloat16", "--json", "{'a=b': 1}")
    assert arguments[-5:] == ("--mem-fraction-static", "0.4", "--disable-radix-cache", "--dtype", "bfloat16")


def test_a_server_behind_many_ranks_gets_its_share_of_requests() -> None:
    config = PPOConfig.of(hf_checkpoint="x", sglang_server_concurrency=64, actor_num_gpus_per_node=8)
    assert Plan.from_config(config, 8, cuda=False).concurrency == 8


def test_heads_that_stand_on_several_ranks() -> None:
    rows = torch.arange(8.0)[:, None].expand(8, 3).contiguous()
    tensors = {f"m.{n}_proj.weight": rows for n in "qkv"} | {"m.o_proj.weight": torch.arange(12.0).view(3, 4)}
    layout = Layout(ranks=4, kv_heads=2, dtype=torch.float32, cuda=False)
    fused = expected("m.qkv_proj.weight", 3, tensors.__getitem__, layout)
    assert fused[:, 0].tolist() == [
        6,
        7,
        4,
        5,
        6,
        7,
        4,
        5,
        6,
        7,
    ]  # two rows of q, the second head of k and of v
    assert expected("m.o_proj.weight", 1, tensors.__getitem__, layout)[:, 0].tolist() == [1, 5, 9]
