"""Hugging Face directories <-> Megatron `torch_dist` checkpoints, on the CPU, in one process or many.

A `torch_dist` checkpoint holds whole tensors and loads under any layout. It is written as Megatron-LM writes
converted weights: `<target>/release/`, and a tracker that says "release". Everything is written beside its
place and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ppo_lightning.megatron import topology as groups
from ppo_lightning.megatron import torch_dist
from ppo_lightning.megatron.checkpoint_files import (
    TRACKER,
    CheckpointError,
    iterations,
    problems,
    staging_dir,
    write_durably,
    write_manifest,
)
from ppo_lightning.megatron.checkpoint_publish import publish
from ppo_lightning.megatron.checkpoint_sources import weights_in
from ppo_lightning.megatron.first_weights import load_weights
from ppo_lightning.megatron.hf_files import COMPANIONS, HFDirectory, save_hf
from ppo_lightning.megatron.model import ModelOptions, build_model
from ppo_lightning.megatron.names import architecture, require_supported
from ppo_lightning.megatron.roles import Role
from ppo_lightning.megatron.topology import Topology, check_division
from ppo_lightning.megatron.weights import stream

RECORD = "conversion.json"  # lies in what was converted, and says from what
_RELEASE = "release"
_HF_SUFFIXES = {".safetensors", *COMPANIONS}
_EMBEDDING = "embedding.word_embeddings.weight"


def convert(
    source: str | Path,
    target: str | Path,
    *,
    source_format: str,
    target_format: str,
    hf_checkpoint: str | Path | None = None,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
) -> bool:
    """Convert "hf" to "torch_dist" or back, bit for bit; False if `target` holds that conversion already.

    `hf_checkpoint` gives architecture and tokenizer where the source is torch_dist. In one process the two
    sizes are only checked against the model; where a process group exists, its ranks share the work.
    Raises CheckpointError, WeightError or UnsupportedArchitectureError, naming what is wrong.
    """
    reference = Path(source if source_format == "hf" else hf_checkpoint or source)
    hf_config = _read_config(reference)
    found = weights_in(source)
    if found is None:
        raise CheckpointError(f"{source} holds no weights in the format {source_format}")
    if (found / "config.json").is_file() != (source_format == "hf"):
        raise CheckpointError(f"{found} is no {source_format} directory; give --from the other format")
    root = Path(target).absolute()
    final = root / _RELEASE if target_format == "torch_dist" else root
    record = {"source": str(found.resolve()), "files": _fingerprint(found)}
    if _finished(final, record):
        print(f"{target}: converted already from {found}, nothing to do", flush=True)
        return False
    _check_free(root, final)
    tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
    check_division(architecture(hf_config), Topology(world=tp * pp, rank=0, tp=tp, pp=pp))
    with _ranks(tp, pp) as topology:
        staging = staging_dir(final)
        if topology.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        dist.barrier()
        if target_format == "torch_dist":
            _to_torch_dist(found, staging, hf_config, record, topology)
        else:
            _to_hf(found, staging, hf_config, reference, record, topology)
        if topology.rank == 0:
            publish([final])
            if target_format == "torch_dist":
                _write_tracker(root)
        dist.barrier()
    if topology.rank == 0:
        print(f"{target}: converted from {found}", flush=True)
    return True


def _to_torch_dist(
    source: Path, staging: Path, hf_config: Any, record: dict[str, Any], topology: Topology
) -> None:
    directory = HFDirectory(source)
    value_head = "score.bias" in directory
    role = _role(hf_config, topology, directory.dtype(), value_head)
    load_weights(role, source)
    state = role.sharded_state(optimizer=False) | {"iteration": 0, "checkpoint_version": 3.0}
    write = torch_dist.Write(state, staging)
    write.write()
    digests: list[Any] = [None] * topology.world
    dist.all_gather_object(digests, write.finish())
    if topology.rank == 0:
        _write_record(staging, record)
        write_manifest(
            staging,
            {name: digest for part in digests for name, digest in part.items()},
            iteration=0,
            save_id=uuid.uuid4().hex,
            role=role.name,
            optimizer=None,
            layout={"tp": topology.tp, "pp": topology.pp, "cp": 1, "dp": 1, "vpp": None},
        )


def _to_hf(
    source: Path,
    staging: Path,
    hf_config: Any,
    reference: Path,
    record: dict[str, Any],
    topology: Topology,
) -> None:
    present = torch_dist.tensors_in(source)
    if _EMBEDDING not in present:
        raise CheckpointError(f"{source} has no tensor {_EMBEDDING!r}: it is no GPT model")
    value_head = "output_layer.bias" in present
    role = _role(hf_config, topology, present[_EMBEDDING].dtype, value_head)
    load_weights(role, source)
    save_hf(
        stream(role.models, hf_config, topology),
        staging,
        reference,
        value_head=value_head,
        write=topology.rank == 0,
    )
    if topology.rank == 0:
        (staging / RECORD).unlink(missing_ok=True)  # of a reference that is a conversion itself
        sizes = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
        _write_record(staging, record | {"written": sizes})


def _role(hf_config: Any, topology: Topology, dtype: torch.dtype, value_head: bool) -> Role:
    """Models to carry weights: in the stored type, so that nothing is rounded."""
    models = build_model(hf_config, topology, ModelOptions(), value_head=value_head, params_dtype=dtype)
    for parameter in (p for model in models for p in model.parameters()):
        parameter.requires_grad_(False)
    return Role("critic" if value_head else "actor", hf_config, topology, models, models)


def _read_config(directory: Path) -> Any:
    from transformers import AutoConfig

    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing: the architecture is read from it; name it as hf_checkpoint"
        )
    require_supported(json.loads(file.read_text()).get("model_type"))
    return AutoConfig.from_pretrained(directory)


@contextmanager
def _ranks(tp: int, pp: int) -> Iterator[Topology]:
    """Megatron's groups over the process group there is, or over a group of this process alone."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tp = pp = 1
    try:
        yield groups.initialize(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    finally:
        groups.destroy()
        if alone:
            dist.destroy_process_group()


# what is there already --------------------------------------------------------------------------------


def _fingerprint(directory: Path) -> dict[str, list[int]]:
    return {
        file.name: [file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(directory.iterdir())
        if file.is_file()
    }


def _finished(final: Path, record: dict[str, Any]) -> bool:
    file = final / RECORD
    if not file.is_file():
        return False
    try:
        found = json.loads(file.read_text())
    except ValueError:
        return False
    written = found.pop("written", None)
    if found != record:
        return False
    if written is not None:
        return all(
            (final / n).is_file() and (final / n).stat().st_size == size for n, size in written.items()
        )
    tracker = final.parent / TRACKER
    return not problems(final) and tracker.is_file() and tracker.read_text().strip() == _RELEASE


def _check_free(root: Path, final: Path) -> None:
    """Only an earlier conversion, or what a broken one left, may be replaced."""
    if (final / RECORD).is_file() or not root.exists():
        return
    if root.is_file():
        raise CheckpointError(f"{root} is a file; name a directory to write to")
    if final != root:
        taken = bool(iterations(root)) or (final.exists() and not problems(final))
    else:
        names = [p.name for p in root.iterdir() if not p.name.startswith(".")]
        whole = "config.json" in names and any(n.endswith(".safetensors") for n in names)
        taken = whole or any(Path(n).suffix not in _HF_SUFFIXES for n in names)
    if taken:
        raise CheckpointError(
            f"{root} holds other files already, which convert did not write; name another directory"
        )


def _write_record(directory: Path, record: dict[str, Any]) -> None:
    write_durably(directory / RECORD, json.dumps(record, indent=1).encode())


def _write_tracker(root: Path) -> None:
    temporary = root / f".{TRACKER}"
    write_durably(temporary, _RELEASE.encode())
    os.replace(temporary, root / TRACKER)
