"""Models that make room for each other: memory leaves the process, results stay as they are bit for bit."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from ppo_lightning.megatron import checkpoint_files as files
from ppo_lightning.megatron.offload import PARTS, FileRoom, Offload, OffloadError
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import SHARDED, TP2, build, save, tensors, train
from tests.distributed.test_strategy import OPTIONS, make_strategy
from tests.fitting import fit_rank, prepare
from tests.tinymodel import make_tiny_model

MB = 1e6


def train_offloaded(
    rank: int, world: int, model_dir: str, layout: dict[str, Any], directory: str | None, root: str
) -> Any:
    """Two steps with a save between them, which is then resumed for another step."""
    offload = Offload() if directory is None else Offload("disk", Path(directory))
    strategy = build(world, model_dir, layout | {"offload": offload}, ("actor", "critic"))
    seen = []
    for step in (1, 2):
        seen += [row[:3] for row in train(strategy, 1)]
        for role in strategy.roles:
            strategy.deactivate(role)
        if step == 1:
            save(strategy, f"{root}/iter_0000001", 1)
    strategy.load_checkpoint(f"{root}/iter_0000001")
    strategy.on_train_start()
    seen += [row[:3] for row in train(strategy, 1)]
    assert directory is None or list(Path(directory).iterdir()) == []
    return seen, tensors(strategy)


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, SHARDED | {"bf16": True}), (2, TP2)],
    ids=["one rank", "sharded bf16", "tensor parallel"],
)
def test_offload_to_disk_changes_no_bit(world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    model = str(tmp_path / "model")
    stayed = run_ranks(train_offloaded, world, model, layout, None, str(tmp_path / "a"))
    moved = run_ranks(train_offloaded, world, model, layout, str(tmp_path / "room"), str(tmp_path / "b"))
    assert moved == stayed
    for root in ("{}", "{}_critic"):
        a, b = (files.read_manifest(tmp_path / root.format(x) / "iter_0000001") for x in "ab")
        assert a is not None
        assert b is not None
        assert a.files["__0_0.distcp"] == b.files["__0_0.distcp"]


def test_a_run_with_a_reference_is_the_same_with_its_models_on_disk(tmp_path: Path) -> None:
    """The reference is read when it is first used, and must have its weights when it is used again."""
    options = prepare(tmp_path) | {"num_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1}
    runs = []
    for name, more in (("stay", {"offload_train": False}), ("disk", {"offload_train_target": "disk"})):
        changed = options | more | {"output_dir": str(tmp_path / name)}
        runs += run_ranks(fit_rank, 1, changed, group=False, timeout=240)
    stayed, moved = runs
    assert moved["rows"] == stayed["rows"]
    assert moved["weights"] == stayed["weights"]


# memory -----------------------------------------------------------------------------------------------


def resident() -> float:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def sizes_of_a_role(rank: int, world: int, model: str, directory: str) -> dict[str, float]:
    """Bytes in memory before, with and after a model of 10 million parameters or its weights alone."""
    strategy = make_strategy(world, offload=Offload("disk", Path(directory)))
    sizes = {"before": resident()}
    strategy.setup_model("critic", model, optimizer=OPTIONS)
    for tensor in (p for m in strategy.roles["critic"].models for p in m.parameters()):
        tensor.data.normal_()
    strategy.deactivate("critic")
    sizes["built"] = resident()
    for name, parts in (("weights", PARTS[:1]), ("training", PARTS)):
        strategy.activate("critic", parts)
        sizes[name] = resident()
        strategy.deactivate("critic")
        sizes[f"after {name}"] = resident()
    strategy.activate("critic", PARTS)
    next(strategy.roles["critic"].models[0].parameters()).detach().numpy()
    strategy.deactivate("critic")  # which torch refuses for a storage that numpy has seen
    sizes["parameters"] = sum(p.numel() for m in strategy.roles["critic"].models for p in m.parameters())
    return sizes


def test_what_leaves_is_gone_from_the_process(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    args = (str(tmp_path / "model"), str(tmp_path / "room"))
    (sizes,) = run_ranks(sizes_of_a_role, 1, *args)
    count = sizes.pop("parameters")
    more = {name: size - sizes["built"] for name, size in sizes.items()}
    assert count > 9e6
    assert more["training"] == pytest.approx(16 * count, abs=8 * MB)
    assert more["weights"] == pytest.approx(4 * count, abs=8 * MB)
    assert max(more["after weights"], more["after training"]) < 8 * MB
    assert sizes["built"] - sizes["before"] < 32 * MB  # what building imports


def overfull(rank: int, world: int, directory: str) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # a disk of 1 MiB
    try:
        FileRoom(Path(directory), 2 << 20, "the actor's state")
    except OffloadError as error:
        return str(error)
    return "no error"


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    (said,) = run_ranks(overfull, 1, str(tmp_path / "room"), group=False)
    assert re.search(r"room: no room for the 0\.00 GB of the actor's state \(.* GB free\); make room", said)
    assert list((tmp_path / "room").iterdir()) == []
