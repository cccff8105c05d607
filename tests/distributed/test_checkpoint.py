"""A run that is saved and resumed goes on as if it had never stopped; what is damaged or hostile is
refused."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_lightning.megatron import checkpoint_files as files
from ppo_lightning.megatron import checkpoint_publish as publishing
from ppo_lightning.megatron import torch_dist
from ppo_lightning.megatron.checkpoint import Retention, Shards, resume_path
from ppo_lightning.megatron.checkpoint_sources import critic_of
from ppo_lightning.megatron.heads import fresh_value_head
from ppo_lightning.megatron.optimizer import inner_optimizers
from ppo_lightning.megatron.strategy import MegatronStrategy
from tests.distributed.ranks import RankError, run_ranks
from tests.distributed.test_strategy import (
    OPTIONS,
    make_samples,
    make_strategy,
    microbatches,
    policy_loss,
    value_loss,
)
from tests.tinymodel import make_tiny_model

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory)
    return str(directory)


# one rank ---------------------------------------------------------------------------------------------


def build(world: int, model_dir: str, layout: dict[str, Any], roles: tuple[str, ...]) -> MegatronStrategy:
    strategy = make_strategy(world, **layout)
    for role in roles:
        strategy.setup_model(role, model_dir, optimizer=OPTIONS)
        strategy.load_weights(role, model_dir)
    return strategy


def train(strategy: MegatronStrategy, steps: int) -> list[tuple[float, ...]]:
    """Update every role `steps` times on samples that the global random state picks."""
    t, seen = strategy.topology, []
    for _ in range(steps):
        order = torch.randperm(8).tolist()
        dist_order = strategy.broadcast(order)
        samples = make_samples()
        mine = microbatches([samples[i] for i in dist_order[t.dp_rank :: t.dp]])
        for role in strategy.roles:
            loss = value_loss if role == "critic" else policy_loss
            sums = strategy.forward_backward(role, mine, loss, entropy=role != "critic")
            report = strategy.step(role)
            seen.append((sums["loss"], report.grad_norm, report.lr, random.random(), np.random.rand()))
    return seen


def tensors(strategy: MegatronStrategy) -> dict[str, bytes]:
    """Every weight and every tensor of the optimizers that this rank holds, bit by bit."""
    found = {}
    for name, role in strategy.roles.items():
        for i, model in enumerate(role.models):
            found |= {f"{name}.{i}.{k}": bits(p) for k, p in model.named_parameters()}
        for inner in inner_optimizers(role.optimizer):
            state = inner.state_dict()["state"]
            found |= {f"{name}.{k}.{n}": bits(v) for k, s in state.items() for n, v in s.items()}
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def save(strategy: MegatronStrategy, path: str, step: int, **more: Any) -> None:
    strategy.save_checkpoint({"global_step": step, "optimizer_states": [{}], **more}, path)


def run_and_save(rank: int, world: int, model_dir: str, layout: dict[str, Any], root: str, more: int) -> Any:
    strategy = build(world, model_dir, layout, ("actor", "critic"))
    train(strategy, 2)
    save(strategy, f"{root}/iter_0000002", 2, note="kept")
    return train(strategy, more), tensors(strategy)


def resume(rank: int, world: int, model_dir: str, layout: dict[str, Any], root: str, more: int) -> Any:
    strategy = build(world, model_dir, layout, ("actor", "critic"))
    train(strategy, 1)  # to be undone by loading
    loaded = strategy.load_checkpoint(f"{root}/iter_0000002")
    strategy.on_train_start()
    assert loaded["note"] == "kept"
    return train(strategy, more), tensors(strategy)


# what comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {}, id="dp2", marks=pytest.mark.slow),
        pytest.param(2, TP2, id="tp2"),
        pytest.param(2, PP2, id="pp2", marks=pytest.mark.slow),
        pytest.param(2, SHARDED, id="dp2, sharded optimizer"),
        pytest.param(2, {"context_parallel_size": 2}, id="cp2", marks=pytest.mark.slow),
    ],
)
def test_resume_is_bitwise(model_dir: str, tmp_path: Path, world: int, layout: dict[str, Any]) -> None:
    root = str(tmp_path / "save")
    straight = run_ranks(run_and_save, world, model_dir, layout, root, 2)
    again = run_ranks(resume, world, model_dir, layout, root, 2)
    for rank in range(world):
        assert again[rank] == straight[rank], f"rank {rank}"
    assert files.latest_iteration(root) == files.latest_iteration(root + "_critic") == 2


def save_behind(rank: int, world: int, model_dir: str, layout: dict[str, Any], root: str) -> Any:
    """Train on while the writer, held back, has written nothing yet."""
    strategy = build(world, model_dir, layout, ("actor", "critic"))
    strategy.checkpoint_io.async_save = True
    write, gate = torch_dist.Write.write, threading.Event()

    def held(self: torch_dist.Write) -> None:
        gate.wait()
        write(self)

    torch_dist.Write.write = held  # type: ignore[method-assign]
    straight: list[Any] = []
    for step in (1, 2):
        train(strategy, 1)
        gate.clear()
        save(strategy, f"{root}/iter_{step:07d}", step, note="kept")
        strategy.finish_saves(wait=False)
        assert files.latest_iteration(root) == (None if step == 1 else 1)
        straight = train(strategy, 2) if step == 2 else []
        gate.set()
        strategy.finish_saves(wait=True)
        assert files.latest_iteration(root) == step
    return straight, tensors(strategy)


def test_an_asynchronous_save_holds_the_moment_it_was_asked_for(model_dir: str, tmp_path: Path) -> None:
    root = str(tmp_path / "save")
    straight = run_ranks(save_behind, 2, model_dir, SHARDED, root)
    assert run_ranks(resume, 2, model_dir, SHARDED, root, 2) == straight


# what is refused --------------------------------------------------------------------------------------


def load_only(rank: int, world: int, model_dir: str, root: str, options: dict[str, Any]) -> Any:
    strategy = build(world, model_dir, {}, ("actor", "critic"))
    strategy.checkpoint_io.auto_fallback = options.pop("auto_fallback", False)
    return strategy.load_checkpoint(options.pop("path", f"{root}/iter_0000002"))


@pytest.fixture(scope="module")
def two_saves(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 1 and 2 of an actor and a critic."""
    root = tmp_path_factory.mktemp("saves") / "save"
    run_ranks(save_twice, 1, model_dir, str(root))
    return root


def save_twice(rank: int, world: int, model_dir: str, root: str) -> None:
    strategy = build(world, model_dir, {}, ("actor", "critic"))
    for step in (1, 2):
        train(strategy, 1)
        save(strategy, f"{root}/iter_{step:07d}", step, note=f"step {step}")


@pytest.fixture
def saves(two_saves: Path, tmp_path: Path) -> Path:
    """A copy of them to spoil."""
    for name in ("save", "save_critic"):
        shutil.copytree(two_saves.with_name(name), tmp_path / name)
    return tmp_path / "save"


def refused(model_dir: str, root: Path, **options: Any) -> str:
    with pytest.raises(RankError) as caught:
        run_ranks(load_only, 1, model_dir, str(root), options)
    assert "CheckpointError" in str(caught.value)
    return str(caught.value)


class Hostile:
    """A pickle that leaves a trace when it is run."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def poison_trainer(directory: Path, hostile: Hostile) -> Path:
    torch.save({"global_step": 2, "callbacks": hostile}, directory / "trainer.pt")
    return directory / "trainer.pt"


def poison_common(directory: Path, hostile: Hostile) -> Path:
    torch.save({"optimizer": hostile}, directory / "common.pt")
    return directory / "common.pt"


def poison_metadata(directory: Path, hostile: Hostile) -> Path:
    (directory / ".metadata").write_bytes(pickle.dumps(hostile))
    return directory / ".metadata"


def poison_object(directory: Path, hostile: Hostile) -> Path:
    """An object between the tensors: the file keeps its length and its place in the index."""
    file = next(directory.glob("*.distcp"))
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    name, where = next((k.fqn, v) for k, v in metadata.storage_data.items() if "_extra_state" in k.fqn)
    buffer = BytesIO()
    torch.save([hostile], buffer)
    with file.open("r+b") as stream:
        stream.seek(0, os.SEEK_END)
        where.offset, where.length = stream.tell(), buffer.getbuffer().nbytes
        stream.write(buffer.getbuffer())
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return Path(name)


@pytest.mark.parametrize("poison", [poison_trainer, poison_common, poison_metadata, poison_object])
def test_hostile_pickles_are_refused_and_not_run(
    model_dir: str, saves: Path, tmp_path: Path, poison: Callable[[Path, Hostile], Path]
) -> None:
    """Even where the attacker has mended the checksums."""
    trace = tmp_path / "trace"
    directory = saves / "iter_0000002"
    file = poison(directory, Hostile(trace))
    manifest = files.read_manifest(directory)
    (directory / "manifest.json").unlink()
    facts = ("iteration", "save_id", "role", "optimizer", "layout")
    files.write_manifest(directory, {}, **{name: getattr(manifest, name) for name in facts})
    message = refused(model_dir, saves)
    assert f"{file} was refused, and nothing in it was run" in message
    assert "system" in message
    assert not trace.exists()


def truncate(file: Path) -> str:
    os.truncate(file, file.stat().st_size - 1)
    return "bytes"


def flip(file: Path) -> str:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return "is damaged"


def delete(file: Path) -> str:
    file.unlink()
    return "is missing"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("__0_0.distcp", flip),
        ("trainer.pt", truncate),
        ("critic: .metadata", delete),
        ("critic: common.pt", flip),
    ],
)
def test_damage_is_refused_by_name_and_the_one_before_offered(
    model_dir: str, saves: Path, name: str, damage: Callable[[Path], str]
) -> None:
    root = saves.with_name("save_critic") if name.startswith("critic") else saves
    file = root / "iter_0000002" / name.removeprefix("critic: ")
    what = damage(file)
    message = refused(model_dir, saves)
    assert f"{file} " in message
    assert what in message
    assert "--ckpt-step 1 (or --auto-fallback)" in message


def test_fallback_takes_the_one_before(model_dir: str, saves: Path) -> None:
    flip(saves / "iter_0000002" / "__0_0.distcp")
    (loaded,) = run_ranks(load_only, 1, model_dir, str(saves), {"auto_fallback": True})
    assert loaded["note"] == "step 1"


def test_a_critic_of_another_moment_is_refused(model_dir: str, saves: Path) -> None:
    critic = saves.with_name("save_critic")
    shutil.rmtree(critic / "iter_0000002")
    message = refused(model_dir, saves)
    assert f"{critic / 'iter_0000002'} is missing" in message
    (critic / "iter_0000001").rename(critic / "iter_0000002")
    assert "was not saved together with" in refused(model_dir, saves)


def test_the_other_optimizers_checkpoint_is_refused(model_dir: str, saves: Path) -> None:
    with pytest.raises(RankError, match=r"FP32Optimizer.*DistributedOptimizer.*--use-distributed-optimizer"):
        run_ranks(resume, 1, model_dir, SHARDED, str(saves), 0)


def save_weights_only(rank: int, world: int, model_dir: str, root: str) -> None:
    strategy = build(world, model_dir, {}, ("actor", "critic"))
    strategy.save_checkpoint({"global_step": 2}, f"{root}/iter_0000002")


def test_a_checkpoint_without_optimizer_is_refused(model_dir: str, tmp_path: Path) -> None:
    run_ranks(save_weights_only, 1, model_dir, str(tmp_path / "save"))
    message = refused(model_dir, tmp_path / "save")
    assert re.search(r"iter_0000002 lacks the optimizer state; .* --finetune", message)


def reserved(rank: int, world: int, model_dir: str, root: str) -> list[set[int]]:
    """Where an asynchronous save has its copies: as reserved, and after each of two saves."""
    strategy = build(world, model_dir, SHARDED, ("actor", "critic"))
    io, places = strategy.checkpoint_io, []
    io.async_save = True
    io.reserve(Shards(strategy.roles, True, {}, strategy.resident))
    io.wait_for_memory()
    for step in range(3):
        if step:
            save(strategy, f"{root}/iter_{step:07d}", step)
            strategy.finish_saves()
        places.append({t.data_ptr() for copies in io._copies.values() for t in copies.values()})
    return places


def test_asynchronous_saves_copy_into_memory_that_is_there(model_dir: str, tmp_path: Path) -> None:
    writer, *_ = run_ranks(reserved, 2, model_dir, str(tmp_path / "save"))
    assert len(writer[0]) > 20
    assert writer[0] == writer[1] == writer[2]


def save_to_a_full_disk(rank: int, world: int, model_dir: str, root: str) -> None:
    strategy = build(world, model_dir, {}, ("actor", "critic"))
    torch_dist.open = lambda path, mode: open("/dev/full", mode)  # type: ignore[attr-defined] # noqa: SIM115
    save(strategy, f"{root}/iter_0000001", 1)


def test_a_full_disk_is_called_one(model_dir: str, tmp_path: Path) -> None:
    """torch's own message would be "enforce fail ... unexpected pos"."""
    want = r"iter_0000001 failed on rank 0: \[Errno 28\] No space left .*the checkpoint before it is whole"
    with pytest.raises(RankError, match=want):
        run_ranks(save_to_a_full_disk, 1, model_dir, str(tmp_path / "save"))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_state_that_could_not_be_loaded_again_is_not_saved(model_dir: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"trainer\.pt would hold torch\S*Linear and could not be"):
        run_ranks(save_object, 1, model_dir, str(tmp_path))
    assert not list(tmp_path.glob("**/*.pt"))


def save_object(rank: int, world: int, model_dir: str, root: str) -> None:
    strategy = build(world, model_dir, {}, ("actor",))
    save(strategy, f"{root}/iter_0000001", 1, callbacks={"mine": torch.nn.Linear(1, 1)})


# a save that is cut off -------------------------------------------------------------------------------


def killed_save(
    rank: int, world: int, model_dir: str, root: str, nth: int, asynchronous: bool, again: bool
) -> None:
    """Iteration 2, killed just before the n-th call that makes something last."""
    strategy = build(world, model_dir, {}, ("actor", "critic"))
    io = strategy.checkpoint_io
    io.async_save, io.retention = asynchronous, Retention(keep=1)
    if again:
        save(strategy, f"{root}/iter_0000002", 2)
        strategy.finish_saves()
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    os.fsync, os.rename, os.replace = counted(os.fsync), counted(os.rename), counted(os.replace)
    publishing._exchange = counted(publishing._exchange)
    shutil.rmtree = counted(shutil.rmtree)
    save(strategy, f"{root}/iter_0000002", 2, note="step 2")
    strategy.finish_saves()


def was_killed(*args: Any) -> bool:
    try:
        run_ranks(killed_save, 1, *map(str, args[:2]), *args[2:])
    except RankError as error:
        if "exit code -9" not in str(error):
            raise
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("asynchronous", "again"), [(False, False), (True, False), (False, True)])
def test_a_killed_save_leaves_the_former_checkpoint_whole(
    model_dir: str, two_saves: Path, tmp_path: Path, asynchronous: bool, again: bool
) -> None:
    """Killed at every single step: something is resumed, whole, and nothing is left over after the next
    start."""
    killed, found = 0, set()
    for nth in range(1, 80):
        root = tmp_path / str(nth) / "save"
        for name in ("save", "save_critic"):
            (root.parent / name).mkdir(parents=True)
            shutil.copytree(two_saves.with_name(name) / "iter_0000001", root.parent / name / "iter_0000001")
            (root.parent / name / files.TRACKER).write_text("1")
        if not was_killed(model_dir, root, nth, asynchronous, again):
            assert files.latest_iteration(root) == 2
            break
        killed += 1
        for place in (root, root.with_name("save_critic")):
            publishing.clean(place)
            assert not [p for p in place.iterdir() if p.name.startswith(".")]
        actor = resume_path(root)
        assert actor is not None
        critic = critic_of(actor, [root.with_name("save_critic")])
        assert not files.problems(actor, contents=True) + files.problems(critic, contents=True)
        found.add(files.iteration_of(actor))
    assert killed > 10
    assert found == ({2} if again else {1, 2})


# other tools ------------------------------------------------------------------------------------------


def test_megatron_reads_it_without_our_code(model_dir: str, two_saves: Path) -> None:
    (shapes,) = run_ranks(read_with_megatron, 1, str(two_saves / "iter_0000002"))
    assert shapes["embedding.word_embeddings.weight"] == (320, 64)
    assert shapes["optimizer.state.exp_avg.embedding.word_embeddings.weight"] == (320, 64)
    assert shapes["iteration"] == 2


def read_with_megatron(rank: int, world: int, directory: str) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    plain = dist_checkpointing.load_plain_tensors(directory)
    common = dist_checkpointing.load_common_state_dict(directory)
    shapes = {k: tuple(v.shape) for k, v in plain.items() if torch.is_tensor(v)}
    return shapes | {"iteration": common["iteration"]}


# first weights ----------------------------------------------------------------------------------------


def save_weights(rank: int, world: int, model_dir: str, root: str, per_layer: bool) -> None:
    """As other tools leave them: weights alone, no manifest."""
    strategy = build(world, model_dir, PP2 if world == 2 else {}, ("actor",))
    strategy.activate("actor")
    final = Path(root) / "release"
    if rank == 0:
        final.mkdir(parents=True)
    strategy.barrier()
    state = strategy.roles["actor"].sharded_state(optimizer=False, per_layer_keys=per_layer)
    write = torch_dist.Write(state, final)
    write.write()
    write.finish()
    (Path(root) / files.TRACKER).write_text("release")


def read_weights(rank: int, world: int, model_dir: str, path: str) -> dict[str, dict[str, torch.Tensor]]:
    strategy = make_strategy(world, **(TP2 if world == 2 else {}))
    for role in ("actor", "critic"):
        strategy.setup_model(role, model_dir, optimizer=OPTIONS if role == "critic" else None)
        strategy.load_weights(role, path)
    return {r: {k: v.clone() for k, v in strategy.weights(r)} for r in strategy.roles}


@pytest.mark.parametrize("per_layer", [False, True], ids=["stacked layers", "single layers"])
def test_weights_of_other_tools_load_and_a_critic_keeps_its_fresh_head(
    model_dir: str, tmp_path: Path, per_layer: bool
) -> None:
    run_ranks(save_weights, 2, model_dir, str(tmp_path / "other"), per_layer)
    want = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
    for found in run_ranks(read_weights, 2, model_dir, str(tmp_path / "other")):
        assert found["actor"].keys() == want.keys() - {"lm_head.weight"}
        assert all(torch.equal(tensor, want[name]) for name, tensor in found["actor"].items())
        head = found["critic"].pop("score.weight")
        assert torch.equal(head, fresh_value_head(64, 1234))
        assert found["critic"].pop("score.bias") == 0
        assert all(torch.equal(tensor, want[name]) for name, tensor in found["critic"].items())


def test_a_trained_critic_brings_its_head(model_dir: str, two_saves: Path) -> None:
    critic = str(two_saves.with_name("save_critic"))
    (found,) = run_ranks(read_critic, 1, model_dir, critic)
    assert not torch.equal(found["score.weight"], fresh_value_head(64, 1234))


def read_critic(rank: int, world: int, model_dir: str, path: str) -> dict[str, torch.Tensor]:
    strategy = make_strategy(world)
    strategy.setup_model("critic", model_dir, optimizer=OPTIONS)
    strategy.load_weights("critic", path)
    return {k: v.clone() for k, v in strategy.weights("critic")}
