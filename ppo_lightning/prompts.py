"""Prompt files: their rows, checked, as `Prompt`s. Every fault is reported by file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_lightning.config import ConfigError
from ppo_lightning.samples import Prompt

SHOWN = 10  # bad rows named one by one
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")


class DataError(ConfigError):
    """The prompt data cannot be used. `problems` holds one message each."""

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        shown = [f"  {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            shown.append(f"  and {len(self.problems) - SHOWN} more")
        return "\n".join([f"{len(self.problems)} problems in the prompt data:", *shown])


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold what. `label_for` names the reward that cannot do without a label, if any."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = None
    chat: bool = False  # the prompt becomes a conversation
    label_for: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """Key in the file, by the flag that names it."""
        flags = {
            "--input-key": self.input_key,
            "--label-key": self.label_key,
            "--metadata-key": self.metadata_key,
        }
        return {flag: key for flag, key in flags.items() if key is not None}


class BadRow(ValueError):
    """What is wrong with one row."""


def read_prompts(paths: str | Path | Sequence[str | Path], columns: Columns) -> list[Prompt]:
    """The rows of all files, in order, `index` counted through. A path is a .jsonl, .json, .parquet or .csv
    file, a Hugging Face dataset directory (`save_to_disk`), or a directory of such files. Raises DataError
    that lists every bad row and every file that is empty, unreadable or without a named key."""
    prompts: list[Prompt] = []
    problems: list[str] = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        for file in _files(Path(path)):
            _read_file(file, columns, prompts, problems)
    if problems:
        raise DataError(problems)
    return prompts


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist; name a file or directory of prompts")
    if not path.is_dir() or _is_dataset(path):
        return [path]
    found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES)
    if not found:
        raise DataError(
            f"{path} is neither a Hugging Face dataset directory nor has it a file of {', '.join(SUFFIXES)}"
        )
    return found


def _read_file(path: Path, columns: Columns, prompts: list[Prompt], problems: list[str]) -> None:
    """Append the file's prompts and problems."""
    bad: list[str] = []
    keys: dict[str, None] = {}
    count = 0
    try:
        for where, row in _rows(path):
            count += 1
            if isinstance(row, dict):
                keys.update(dict.fromkeys(row))
            try:
                prompts.append(_prompt(row, columns, len(prompts)))
            except BadRow as fault:
                bad.append(f"{path}{where}: {fault}")
    except (OSError, ValueError) as error:  # pyarrow's and csv's errors are among them
        problems.append(f"{path} cannot be read: {error}")
        return
    if count == 0:
        problems.append(f"{path} is empty: it has no prompts")
        return
    absent = {flag: key for flag, key in columns.named.items() if keys and key not in keys}
    for flag, key in absent.items():
        problems.append(
            f"{path} has no key {key!r}; it has {', '.join(keys)}: name the right one with {flag}"
        )
    if not absent:  # else every row would be reported for the same reason
        problems.extend(bad)


def _prompt(row: Any, columns: Columns, index: int) -> Prompt:
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        raise BadRow(f"is a {type(row).__name__}, not an object with keys")
    for key in columns.named.values():
        if key not in row:
            raise BadRow(f"has no key {key!r}; it has {', '.join(map(str, row)) or 'none'}")
    label = row[columns.label_key] if columns.label_key else None
    if columns.label_for and label in (None, ""):
        raise BadRow(f"has no label, and --rm-type {columns.label_for} compares with one")
    return Prompt(index, _conversation(row[columns.input_key], columns), label, _metadata(row, columns))


def _conversation(value: Any, columns: Columns) -> str | list[dict[str, Any]]:
    """The prompt as text, or as chat messages when a chat template is to be applied."""
    if isinstance(value, str):
        if not value.strip():
            raise BadRow("has an empty prompt")
        return [{"role": "user", "content": value}] if columns.chat else value
    if not isinstance(value, list):
        raise BadRow(f"has a prompt that is a {type(value).__name__}; it must be text or a list of messages")
    if not columns.chat:
        raise BadRow("holds chat messages, which need --apply-chat-template")
    if not value:
        raise BadRow("has an empty list of messages")
    for message in value:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            raise BadRow(f"has a message without role and content: {str(message)[:80]}")
    # a table fills absent fields of a message with None, which a chat template would take as given
    return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in value]


def _metadata(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    value = row[columns.metadata_key] if columns.metadata_key else None
    if isinstance(value, str):  # tables often keep a mapping as JSON text
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise BadRow(f"has metadata that is text but not JSON ({error})") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow(f"has metadata that is a {type(value).__name__}, not a mapping")
    return value


# ---- formats: (where in the file, row); a row that cannot be parsed is a BadRow ------------------------


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        return _numbered(_dataset(path))
    if path.suffix == ".parquet":
        return _numbered(_parquet(path))
    if path.suffix == ".csv":
        return _csv(path)
    if path.suffix in (".jsonl", ".ndjson"):
        return _json_lines(path)
    if path.suffix == ".json":
        return _json(path)
    raise ValueError(f"its name must end in one of {', '.join(SUFFIXES)}")


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f", row {number}", row) for number, row in enumerate(rows, 1))


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                row = BadRow(f"is not UTF-8 ({error.reason} at byte {error.start})")
            except json.JSONDecodeError as error:
                row = BadRow(f"is not JSON ({error.msg} at character {error.pos})")
            yield f":{number}", row


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of rows; or, under a name that is common for them, JSON lines."""
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _json_lines(path)
        return
    yield from _numbered(json.loads(text))


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                whole = None not in row and None not in row.values()
                fault = BadRow("has more or fewer fields than the header")
                yield f":{reader.line_num}", row if whole else fault
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}") from error


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _is_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json"))


def _dataset(path: Path) -> Iterable[Any]:
    from datasets import DatasetDict, load_from_disk

    data = load_from_disk(str(path))
    if not isinstance(data, DatasetDict):
        return data
    if "train" not in data and len(data) != 1:
        raise ValueError(f"it has the splits {', '.join(data)}; name the directory of one of them")
    return data["train"] if "train" in data else next(iter(data.values()))
