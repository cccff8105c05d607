"""Hugging Face model directories: tensors read one by one, tensors and their companions written."""

from __future__ import annotations

import functools
import json
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ppo_lightning.megatron.names import WeightError

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
COMPANIONS = {".json", ".jinja", ".model", ".tiktoken", ".txt"}


class HFDirectory:
    """The tensors of a Hugging Face directory (safetensors, else pytorch_model.bin), read when asked for.

    Raises WeightError where there are none, or where a file cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        if not self.path.is_dir():
            raise WeightError(f"{directory} is no directory: download the checkpoint and give its folder")
        self._files: dict[Path, Any] = {}
        self._homes = self._find()

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, which the configuration says has `shape`."""
        if name not in self._homes:
            raise WeightError(f"the tensor {name!r} is missing in {self.path}")
        tensor = self._tensor(name)
        if tuple(tensor.shape) != shape:
            raise WeightError(
                f"the tensor {name!r} in {self.path} has shape {tuple(tensor.shape)},"
                f" but config.json makes it {shape}: weights and configuration are not of the same model"
            )
        return tensor

    def dtype(self) -> torch.dtype:
        """The type that holds every tensor exactly: that of all of them, if it is one."""
        return functools.reduce(torch.promote_types, {self._tensor(name).dtype for name in self._homes})

    def _tensor(self, name: str) -> Tensor:
        handle = self._open(self._homes[name])
        try:
            return handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        except (KeyError, SafetensorError) as error:
            raise WeightError(f"the tensor {name!r} is not in {self._homes[name]}: {error}") from error

    def _find(self) -> dict[str, Path]:
        for weights in _WEIGHTS:
            index, single = self.path / f"{weights}.index.json", self.path / weights
            if index.is_file():
                homes = json.loads(index.read_text())["weight_map"]
                return {name: self.path / file for name, file in homes.items()}
            if single.is_file():
                return dict.fromkeys(self._open(single).keys(), single)
        raise WeightError(f"no weights in {self.path}: expected {' or '.join(_WEIGHTS)}, or an index of them")

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            if not file.is_file():
                raise WeightError(f"{file} is named in the index of {self.path} but is not there")
            try:
                if file.suffix == ".safetensors":
                    self._files[file] = safe_open(file, framework="pt", device="cpu")
                else:
                    self._files[file] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except (SafetensorError, RuntimeError, EOFError) as error:
                raise WeightError(f"{file} is damaged: {error}; fetch it again") from error
        return self._files[file]


def save_hf(
    tensors: Iterable[tuple[str, Tensor]],
    target: Path,
    hf_checkpoint: str | Path,
    *,
    value_head: bool = False,
    write: bool = True,
    shard_bytes: int = 4 * 2**30,
) -> None:
    """Write a stream of Hugging Face tensors into the existing directory `target`, as safetensors of up to
    `shard_bytes`, with the configuration, generation configuration and tokenizer of `hf_checkpoint`.

    Of several ranks one writes and the others, with `write=False`, only take part in the stream. A value head
    makes it a token classification model with one label. Raises OSError for what cannot be written, after the
    whole stream: the other ranks wait in it.
    """
    stream = iter(tensors)
    try:
        if write:
            parts, dtype = _write_parts(stream, target, shard_bytes)
            _name_parts(parts, target)
            _write_companions(target, Path(hf_checkpoint), dtype, value_head)
    finally:
        deque(stream, maxlen=0)


def _write_parts(
    tensors: Iterable[tuple[str, Tensor]], target: Path, shard_bytes: int
) -> tuple[list[tuple[Path, list[str]]], torch.dtype]:
    """The files with the names of their tensors, and the type of the embedding."""
    part: dict[str, Tensor] = {}
    parts: list[tuple[Path, list[str]]] = []
    size, dtype = 0, torch.float32
    for name, tensor in tensors:
        if part and size + tensor.nbytes > shard_bytes:
            parts.append(_write_part(part, target, len(parts)))
            part, size = {}, 0
        part[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)  # halves share memory
        size += tensor.nbytes
        dtype = tensor.dtype if name == "model.embed_tokens.weight" else dtype
    parts.append(_write_part(part, target, len(parts)))
    return parts, dtype


def _write_part(part: dict[str, Tensor], target: Path, number: int) -> tuple[Path, list[str]]:
    file = target / f"part-{number}.safetensors"
    try:
        save_file(part, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    return file, list(part)


def _name_parts(parts: Sequence[tuple[Path, list[str]]], target: Path) -> None:
    if len(parts) == 1:
        parts[0][0].rename(target / "model.safetensors")
        return
    homes: dict[str, str] = {}
    for number, (file, members) in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        homes |= dict.fromkeys(members, name)
        file.rename(target / name)
    total = sum((target / name).stat().st_size for name in set(homes.values()))
    index = {"metadata": {"total_size": total}, "weight_map": homes}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_companions(target: Path, source: Path, dtype: torch.dtype, value_head: bool) -> None:
    """Everything that is no weight, with the configuration telling the truth about the weights."""
    from transformers import AutoConfig, GenerationConfig

    for file in source.iterdir():
        if file.is_file() and file.suffix in COMPANIONS and not file.name.endswith(".index.json"):
            shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    if value_head:
        kinds = [x.replace("ForCausalLM", "ForTokenClassification") for x in config["architectures"]]
        config |= {"architectures": kinds, "id2label": {"0": "value"}, "label2id": {"value": 0}}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if not (target / "generation_config.json").exists():
        GenerationConfig.from_model_config(AutoConfig.from_pretrained(source)).save_pretrained(target)
