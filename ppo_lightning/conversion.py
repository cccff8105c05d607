"""The flags of `ppo-lightning convert`. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_lightning.config import ConfigError
from ppo_lightning.flags import Parser
from ppo_lightning.option import unknown


def parse_conversion(argv: Sequence[str]) -> dict[str, Any]:
    """The arguments of `convert`, and `debug_traceback`. Raises ConfigError for flags there are not."""
    parser = Parser(
        prog="ppo-lightning convert",
        description="Convert a model's weights; works on CPU.",
        allow_abbrev=False,
    )
    formats = ("hf", "torch_dist")
    parser.add_argument("--from", dest="source_format", choices=formats, required=True)
    parser.add_argument("--to", dest="target_format", choices=formats, required=True)
    parser.add_argument("--source", required=True, metavar="DIR", help="what is read")
    parser.add_argument("--target", required=True, metavar="DIR", help="what is written")
    parser.add_argument(
        "--hf-checkpoint", metavar="DIR", help="architecture and tokenizer, for --from torch_dist"
    )
    for name in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        parser.add_argument(name, type=int, default=1, metavar="N", help="layout of the checkpoint")
    parser.add_argument("--debug-traceback", action="store_true", help="print the traceback of a failure")
    known = [flag for action in parser._actions for flag in action.option_strings]
    strange = [
        flag for token in argv if (flag := token.partition("=")[0]).startswith("--") and flag not in known
    ]
    if strange:
        raise ConfigError([unknown(flag, known, "flag") for flag in strange])
    return vars(parser.parse_args(argv))


def conversion_problems(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values."""
    source = Path(given["source"])
    problems = []
    if not source.is_dir():
        problems.append(f"--source {source} is no directory")
    if given["source_format"] == given["target_format"]:
        problems.append(f"--from and --to are both {given['target_format']}; give one hf and one torch_dist")
    if given["source_format"] == "torch_dist" and not (
        given["hf_checkpoint"] or (source / "config.json").is_file()
    ):
        problems.append(
            "--from torch_dist needs --hf-checkpoint: a directory with config.json and the tokenizer"
        )
    problems += [
        f"{flag} {given[name]}: must be at least 1"
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        if given[name] < 1 and (flag := "--" + name.replace("_", "-"))
    ]
    return problems
