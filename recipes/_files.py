"""What `prepare` writes is there whole or not at all, and is not written twice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo_lightning.checks import holds_weights


def say(text: str) -> None:
    print(text, flush=True)


def is_model(directory: Path) -> bool:
    """Whether a Hugging Face directory has its configuration, its tokenizer and all its weights."""
    needed = ("config.json", "tokenizer.json", "tokenizer_config.json")
    if not all((directory / name).is_file() for name in needed) or not holds_weights(directory):
        return False
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return True
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((directory / shard).is_file() for shard in shards)


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A new directory to fill. It takes `target`'s place when the block ends well, and else is removed; into
    a `target` that exists, its files move one by one and leave others there alone."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.is_dir():
            for path in sorted(partial.iterdir()):
                os.replace(path, target / path.name)
        else:
            os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> bool:
    """JSON lines; False, and nothing written, if the file is there already."""
    if path.is_file():
        say(f"{path}: there already")
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)
    say(f"{path}: {len(lines)} rows")
    return True
