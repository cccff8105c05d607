"""What must lie on disk before a run starts. Reads directories and config.json only."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_lightning.architecture import ModelShape, layout_problems
from ppo_lightning.config import options

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig

TRACKER = "latest_checkpointed_iteration.txt"


def holds_checkpoint(directory: str | Path) -> bool:
    """Whether a `torch_dist` checkpoint root is there: a tracker file, an iteration, or a conversion."""
    path = Path(directory)
    return (path / TRACKER).is_file() or any(p.is_dir() for p in (path / "release", *path.glob("iter_*")))


def holds_weights(directory: str | Path) -> bool:
    """Whether a Hugging Face directory has weights."""
    path = Path(directory)
    return any(next(path.glob(pattern), None) for pattern in ("*.safetensors", "pytorch_model*.bin"))


def check_files(config: PPOConfig, command: str = "fit") -> list[str]:
    """Every problem with the files of a resolved configuration, each with its remedy."""
    return [message for _, message in file_problems(config, command)]


def file_problems(config: PPOConfig, command: str = "fit") -> Iterator[tuple[str, str]]:
    """(option, message) for each."""
    yield from _model(config)
    yield from _load(config)
    d = config.debug
    if command == "fit" and config.data.prompt_data and not d.debug_train_only:
        yield from _data("prompt_data", "--prompt-data", config.data.prompt_data)
    for path in config.evaluation.eval_prompt_data[1::2]:
        yield from _data("eval_prompt_data", "--eval-prompt-data", path)
    if (
        config.reward.reward_model_path
        and not (Path(config.reward.reward_model_path) / "config.json").is_file()
    ):
        yield "reward_model_path", f"--reward-model-path {config.reward.reward_model_path} has no config.json"
    places: dict[str, str | None] = {"output_dir": config.logging.output_dir}
    if command == "fit":
        places |= {"save": config.model.save, "critic_save": config.critic.critic_save}
    for name, place in places.items():
        problem = _unwritable(Path(place)) if place else ""
        if problem:
            yield (
                name,
                f"--{name.replace('_', '-')} {place} cannot be written: {problem}; choose another place",
            )


def load_functions(config: PPOConfig) -> list[str]:
    """Import the functions that options name as PKG.MODULE:FUNCTION; a message for each that is not there. An
    error that its module raises passes through."""
    problems = []
    for name, value in config.flat().items():
        of_function = options()[name].metadata.get("metavar") == "PKG.MODULE:FUNCTION"
        if of_function and value is not None and re.fullmatch(r"[\w.]+[:.]\w+", value):
            from ppo_lightning.rewards import custom

            try:
                custom.load(value, options()[name].flag)
            except ValueError as error:
                problems.append(str(error))
    return problems


def checkpoint_problems(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """(option, message) where a checkpoint to start from is not there."""
    load, save = config.critic.critic_load, config.critic.critic_save
    if config.ppo and load is not None and not holds_checkpoint(load) and not _same(load, save):
        yield (
            "critic_load",
            f"--critic-load {load} holds no checkpoint (no latest_checkpointed_iteration.txt, no iter_*"
            " directory); name a directory that does, or drop the flag to start the critic from the"
            " policy's weights",
        )
    ref = config.model.ref_load
    if config.kl and ref is not None and not holds_checkpoint(ref) and not holds_weights(ref):
        own = config.recipe and f"`ppo-lightning prepare --recipe {config.recipe}` makes the recipe's; else "
        yield (
            "ref_load",
            f"--ref-load {ref} holds no checkpoint (torch_dist or Hugging Face); {own or ''}name a directory"
            " that does, or drop the flag to take --hf-checkpoint as the reference",
        )


def _same(one: str, other: str | None) -> bool:
    return other is not None and Path(one).resolve() == Path(other).resolve()


def _model(config: PPOConfig) -> Iterator[tuple[str, str]]:
    m = config.model
    if m.hf_checkpoint is None:
        return
    prepare = f"; `ppo-lightning prepare --recipe {config.recipe}` makes it" if config.recipe else ""
    if not (Path(m.hf_checkpoint) / "config.json").is_file():
        what = "has no config.json" if Path(m.hf_checkpoint).is_dir() else "is no directory"
        yield (
            "hf_checkpoint",
            f"--hf-checkpoint {m.hf_checkpoint} {what}; name a Hugging Face model directory{prepare}",
        )
        return
    elsewhere = any(path and (holds_checkpoint(path) or holds_weights(path)) for path in (m.load, m.ref_load))
    if not holds_weights(m.hf_checkpoint) and not elsewhere:
        yield (
            "hf_checkpoint",
            f"--hf-checkpoint {m.hf_checkpoint} has no weights (*.safetensors); complete it, or name a"
            f" checkpoint with --load or --ref-load{prepare}",
        )
    try:
        shape = ModelShape.read(m.hf_checkpoint)
    except (OSError, ValueError) as error:
        yield "hf_checkpoint", f"--hf-checkpoint {m.hf_checkpoint}: {error}"
    else:
        yield from layout_problems(shape, config)


def _load(config: PPOConfig) -> Iterator[tuple[str, str]]:
    m = config.model
    if m.load is None:
        return
    own = m.save is not None and Path(m.load).resolve() == Path(m.save).resolve()
    if not own and not holds_checkpoint(m.load) and not holds_weights(m.load):
        yield (
            "load",
            f"--load {m.load} holds no checkpoint; name a directory that does, or drop the flag to start"
            " anew",
        )
    elif m.ckpt_step is not None and not (Path(m.load) / f"iter_{m.ckpt_step:07d}").is_dir():
        there = sorted(int(p.name[5:]) for p in Path(m.load).glob("iter_*") if p.name[5:].isdigit())
        have = f"there are {', '.join(map(str, there))}" if there else "there is none yet"
        yield "ckpt_step", f"--ckpt-step {m.ckpt_step}: {m.load} has no such iteration; {have}"


def _data(option: str, flag: str, path: str) -> Iterator[tuple[str, str]]:
    place = Path(path)
    if not place.exists():
        yield option, f"{flag} {path} does not exist; name a .jsonl or .parquet file or a dataset directory"
    elif not os.access(place, os.R_OK):
        yield option, f"{flag} {path} cannot be read; change its permissions"
    elif place.is_file() and place.stat().st_size == 0:
        yield option, f"{flag} {path} is empty; it needs at least one prompt"
    elif place.is_dir() and not any(place.iterdir()):
        yield option, f"{flag} {path} is an empty directory; it needs at least one prompt"


def _unwritable(place: Path) -> str:
    """Why a file could not be made at `place`, found by making one in its nearest existing parent."""
    try:
        parent = next(p for p in (place, *place.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=parent):
            return ""
    except NotADirectoryError:
        return f"{parent} is a file"
    except OSError as error:
        return f"{parent}: {error.strerror}"


def visible_gpus() -> int:
    """CUDA devices this process will see, without importing torch: 0 where torch is built without CUDA."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    version = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    if version is None or not version.is_file() or "cuda: Optional[str] = None" in version.read_text():
        return 0
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    return min(there, len([c for c in chosen.split(",") if c.strip() not in ("", "-1")]))
