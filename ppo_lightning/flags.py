"""Flags and YAML made from the fields of `PPOConfig`: one source for names, types, defaults, docs/flags.md.

Precedence: defaults < recipe < YAML files in turn < flags. No torch: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ppo_lightning.config import ConfigError, Option, PPOConfig, check_values, options
from ppo_lightning.option import unknown

SGLANG = "--sglang-"


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a command line asks for; `config` is not resolved yet."""

    config: PPOConfig
    recipe: PPOConfig  # what was there before YAML and flags
    print_config: bool = False
    dry_run: bool = False
    debug_traceback: bool = False


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of printing pages of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(
    argv: Sequence[str], *, prog: str, description: str, recipe: Callable[[str], PPOConfig]
) -> Arguments:
    """Read a command line. `recipe` gives the configuration of a recipe's name. Raises ConfigError that lists
    every unknown flag, unknown key and wrong value at once; `--help` prints and exits."""
    parser = build_parser(prog, description)
    ours, server, problems = split(argv)
    found, stray = parser.parse_known_args(ours)
    problems += [f"unexpected argument {token!r}" for token in stray]
    given = vars(found)
    extra = {name: given.pop(name) for name in ("print_config", "dry_run", "debug_traceback")}
    files = []
    for path in given.pop("config"):
        try:
            files.append(read_yaml(path))
        except ConfigError as error:
            problems += error.problems
    flags, _, wrong = check_values(given, names=_flag_of)
    if problems + wrong:
        raise ConfigError(problems + wrong)
    named = [values["recipe"] for values in (*files, flags) if values.get("recipe")]
    base = PPOConfig()
    if named:  # tiny-ppo is tiny_ppo: one run, one output directory
        name = named[-1] if named[-1].endswith(".py") else named[-1].replace("-", "_")
        base = recipe(name).replace(recipe=name)
    config = base
    for values in (*files, flags):
        config = config.replace(**values, **_replaced(values))
    config = config.replace(sglang_args=(*config.rollout.sglang_args, *server), recipe=base.recipe)
    return Arguments(config, base, **extra)


def _replaced(values: dict[str, Any]) -> dict[str, Any]:
    """A reward named by --rm-type takes the place of a function that the recipe or an earlier file names,
    and that would go before it."""
    rm_type = values.get("rm_type")
    alone = rm_type and "custom_rm_path" not in values and "custom" not in rm_type
    return {"custom_rm_path": None} if alone else {}


def build_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """All flags, in the groups of `PPOConfig`. Values stay text here; `check_values` converts them."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} [--recipe NAME] [--config FILE.yaml] [flags]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--recipe", metavar="NAME", help="start from a recipe: its name, or a .py file's path"
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="YAML, nested or flat; repeatable"
    )
    for flag, text in (
        ("--print-config", "print the resolved YAML, which runs again to the same, and exit"),
        ("--dry-run", "check the options, print the plan (layout, batches, memory) and exit; reads no data"),
        ("--debug-traceback", "print the traceback of a failure, not only its message"),
    ):
        parser.add_argument(flag, action="store_true", default=False, help=text)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options().values():
        if option.group:
            group = groups.setdefault(option.group, parser.add_argument_group(option.group))
            _add(group, option)
    parser.add_argument_group("sglang").add_argument(
        "--sglang-NAME", metavar="VALUE", help="any flag of the SGLang server, passed on as it stands"
    )
    return parser


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    names = [option.flag, *option.metadata["aliases"]]
    text = f"{option.metadata['help']} ({default_text(option)})".replace("%", "%%")
    if option.base is bool:
        group.add_argument(*names, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = value_text(option).split() if option.name == "eval_prompt_data" else value_text(option)
    shown = tuple(metavar) if isinstance(metavar, list) else metavar
    nargs = "*" if option.many else None
    group.add_argument(*names, dest=option.name, nargs=nargs, metavar=shown, help=text)


def split(argv: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """(our tokens, the SGLang server's, messages about unknown flags). A flag's values go with it."""
    known = {"--help", "--recipe", "--config", "--print-config", "--dry-run", "--debug-traceback"}
    for option in options().values():
        known |= {option.flag, *option.metadata["aliases"]}
        if option.base is bool:
            known.add(f"--no-{option.flag[2:]}")
    ours: list[str] = []
    server: list[str] = []
    problems: list[str] = []
    target: list[str] | None = ours
    for token in argv:
        name = token.partition("=")[0]
        if token.startswith("--"):
            target = ours if name in known else server if name.startswith(SGLANG) else None
            if target is None:
                problems.append(unknown(name, known, "flag"))
        if target is not None:
            target.append(token)
    return ours, server, problems


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file as flat options, checked. Raises ConfigError whose messages name the file and the key."""
    where = f"{path}: "
    loaded, problems = _load(path)
    flat: dict[str, Any] = {}
    for key, group, value in _entries(loaded, problems):
        home = options()[key].group if key in options() else ""
        if key in flat:
            problems.append(f"{key} is given twice; keep one")
        elif group and home and home != group:
            problems.append(f"{key} belongs to {home}, not to {group}; move it")
        else:
            is_json = key == "apply_chat_template_kwargs" and isinstance(value, dict)
            flat[key] = json.dumps(value) if is_json else value
    _, _, wrong = check_values(flat, where)
    problems = [where + problem for problem in problems] + wrong
    if problems:
        raise ConfigError(problems)
    return flat


def _entries(mapping: dict[Any, Any], problems: list[str]) -> Iterator[tuple[str, str, Any]]:
    """(key, group it stands in, value), group sections opened."""
    groups = {option.group for option in options().values()} - {""}
    for raw, value in mapping.items():
        key = str(raw).replace("-", "_")
        if key in groups and isinstance(value, dict):
            yield from ((str(k).replace("-", "_"), key, v) for k, v in value.items())
        elif key in options() or (key not in groups and not isinstance(value, dict)):
            yield key, "", value
        elif key not in groups:
            problems.append(unknown(key, groups, "group"))
        elif value is not None:
            problems.append(f"{key} is a group: options are wanted under it, not {value!r}")


def _load(path: str | Path) -> tuple[dict[Any, Any], list[str]]:
    """The file's mapping, and a message for each key that YAML would silently let overwrite another."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        node, loaded = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}, []
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: options are wanted as KEY: VALUE, not {type(loaded).__name__}")
    sections = [node, *(value for _, value in node.value if isinstance(value, yaml.MappingNode))]
    keys = [[key.value for key, _ in section.value] for section in sections]
    return loaded, [f"{key} is given twice; keep one" for names in keys for key in _repeated(names)]


def _repeated(names: list[Any]) -> list[Any]:
    return [name for i, name in enumerate(names) if name in names[:i]]


def _flag_of(name: str) -> str:
    return options()[name].flag


def value_text(option: Option) -> str:
    """What to write after the flag."""
    if isinstance(option.base, tuple):
        return "{" + ",".join(option.base) + "}"
    return option.metadata["metavar"] or {int: "N", float: "X", str: "TEXT", bool: ""}[option.base]


def default_text(option: Option) -> str:
    if option.metadata["derived"]:
        return f"default: {option.metadata['derived']}"
    if option.many or option.default is None:
        return "default: none"
    if isinstance(option.default, bool):
        return f"default: {'on' if option.default else 'off'}"
    return (
        f"default: {option.default:g}" if isinstance(option.default, float) else f"default: {option.default}"
    )


def reference() -> str:
    """docs/flags.md: every flag with its values, default and meaning."""
    lines = [
        "# Flags",
        "",
        "Made by `python -m ppo_lightning.flags > docs/flags.md` from the fields of `PPOConfig`; a test"
        " holds it",
        "up to date. A YAML key is a flag with underscores and no leading dashes (`rollout_batch_size:"
        " 8`), flat",
        "or under its group's name; a switch is `true` or `false` there, `--flag` or `--no-flag` here."
        " `none` takes",
        "a value back. Precedence: defaults < `--recipe NAME` < `--config FILE.yaml` (repeatable) < flags.",
        "`--sglang-NAME VALUE` goes to the SGLang server as it stands.",
    ]
    group = ""
    for option in options().values():
        if option.group != group:
            group = option.group
            lines += ["", f"## {group}", "", "| flag | default | meaning |", "|---|---|---|"]
        if group:
            value = value_text(option).replace("|", "\\|")
            flag = f"`{option.flag} {value}`" if value else f"`--[no-]{option.flag[2:]}`"
            default = default_text(option).removeprefix("default: ").replace("<", "\\<")
            lines.append(f"| {flag} | {default} | {option.metadata['help'].replace('<', chr(92) + '<')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
