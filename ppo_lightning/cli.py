"""`ppo-lightning fit|prepare|convert|evaluate|report`: parse, check, then import what is heavy and run it.

Exit codes: 0 done, 2 usage or configuration, 1 failure while running, 130 interrupted, 143 terminated. A
failure is one line; its traceback goes to <output-dir>/log.txt, or to the screen with --debug-traceback or
PPO_LIGHTNING_TRACEBACK=1.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ppo_lightning import __version__
from ppo_lightning.checks import check_files, load_functions, visible_gpus
from ppo_lightning.config import ConfigError, PPOConfig
from ppo_lightning.conversion import conversion_problems, parse_conversion
from ppo_lightning.derive import output_dir
from ppo_lightning.failures import Guard, describe, line_in
from ppo_lightning.flags import Arguments, parse
from ppo_lightning.launchers.rank_errors import shown_by_first_rank
from ppo_lightning.option import unknown

if TYPE_CHECKING:
    from lightning.pytorch import Callback

RECIPES = "ppo_lightning.recipes"
USAGE = """usage: ppo-lightning COMMAND [flags]

  fit        train, going on from the last checkpoint
  prepare    download, build and convert what a recipe needs
  convert    Hugging Face directory <-> torch_dist checkpoint
  evaluate   score a model on evaluation sets
  report     draw <output-dir>/report.png again

`ppo-lightning COMMAND --help` lists its flags; recipes: {recipes}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(recipes=", ".join(recipe_names())), end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"ppo-lightning {__version__}")
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        print(f"error: {unknown(argv[0], COMMANDS, 'command')}", file=sys.stderr)
        return 2
    _importable(os.getcwd())
    guard = Guard(argv[0])

    def run() -> None:
        with shown_by_first_rank():
            command(argv[1:], guard)

    return guard.run(run)


def run_recipe(recipe: ModuleType | str, argv: Sequence[str] | None = None) -> int:
    """What a recipe file's `main` does: `fit` with that recipe and the command line's flags. `recipe` is the
    module, its name, or its `__file__`."""
    place = recipe if isinstance(recipe, str) else str(recipe.__file__)
    name = Path(place).stem if Path(place).stem in recipe_names() else place
    return main(["fit", "--recipe", name, *(sys.argv[1:] if argv is None else argv)])


def recipe_names() -> list[str]:
    """Recipes of this package, found without importing them."""
    package = importlib.import_module(RECIPES)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load_recipe(name: str) -> ModuleType:
    """A recipe's module, by its name or its file. Raises ConfigError that lists the recipes there are."""
    if name.endswith(".py"):
        module = _load_file(Path(name))
    else:
        there = recipe_names()
        if name.replace("-", "_") not in there:
            raise ConfigError(f"--recipe: {unknown(name, there, 'recipe')}; there are {', '.join(there)}")
        module = importlib.import_module(f"{RECIPES}.{name.replace('-', '_')}")
    if not hasattr(module, "config"):
        raise ConfigError(f"--recipe {name}: it defines no config() that returns a PPOConfig")
    return module


def _load_file(path: Path) -> ModuleType:
    """The module in a file, run once (what it registers counts once); modules beside it can be imported."""
    name, place = path.stem, path.absolute()
    for known in map(sys.modules.get, ("__main__", name, str(place))):
        if known is not None and Path(getattr(known, "__file__", None) or "").absolute() == place:
            sys.modules.setdefault(name, known)
            return known
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--recipe {path}: there is no such file")
    _importable(str(place.parent))
    module = importlib.util.module_from_spec(spec)
    key = str(place) if name in sys.modules else name
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        problem = f"--recipe {path} does not run: {describe(error)}{line_in(error, place)}"
        raise ConfigError(problem) from error
    return module


def _importable(folder: str) -> None:
    """Let the user's modules in `folder` be imported; the last place, so that they shadow nothing."""
    if folder not in sys.path:
        sys.path.append(folder)


def _parse(command: str, argv: Sequence[str], guard: Guard, description: str) -> Arguments:
    arguments = parse(
        argv,
        prog=f"ppo-lightning {command}",
        description=description,
        recipe=lambda name: load_recipe(name).config(),
    )
    guard.output_dir = output_dir(arguments.config)
    guard.debug_traceback |= arguments.debug_traceback
    return arguments


def _resolved(config: PPOConfig, command: str = "fit", files: bool = True) -> tuple[PPOConfig, list[str]]:
    problems = load_functions(config)  # first: they may register estimators and rewards
    gpus = visible_gpus()
    try:
        resolved = config.resolve(cuda=gpus > 0, device_count=gpus, command=command, files=files)
    except ConfigError as error:
        problems += error.problems
        if config.recipe is None and config.model.hf_checkpoint is None and recipe_names():
            problems.append(f"or start from a recipe: --recipe {'|'.join(recipe_names())}")
    if problems:
        raise ConfigError(problems)
    return resolved


def _shown(arguments: Arguments, command: str) -> bool:
    """Answer --print-config and --dry-run; whether one was asked for."""
    if arguments.print_config:
        config, warnings = _resolved(arguments.config, command, files=False)
        _warn(warnings)
        print(config.to_yaml(), end="")
    elif arguments.dry_run:
        from ppo_lightning.dryrun import dry_run

        config, warnings = _resolved(arguments.config, command, files=False)
        _warn(warnings)
        recipe = load_recipe(config.recipe) if config.recipe else None
        architecture = getattr(recipe, "model_config", None)
        dry_run(config, arguments.recipe, model_config=architecture, command=command)
    return arguments.print_config or arguments.dry_run


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _checked(arguments: Arguments, command: str) -> PPOConfig:
    """The resolved configuration. Raises ConfigError for all that can be seen before torch is imported. The
    run itself resolves again."""
    config, _ = _resolved(arguments.config, command)
    problems = check_files(config, command)
    if problems:
        raise ConfigError(problems)
    return config


def _recipe_callbacks(config: PPOConfig) -> list[Callback]:
    recipe = load_recipe(config.recipe) if config.recipe else None
    return recipe.callbacks() if recipe and hasattr(recipe, "callbacks") else []


@contextmanager
def _quick_imports() -> Iterator[None]:
    """Without the garbage collector, which takes a fifth of the time: it walks through the new objects, a
    million that all stay, again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
            gc.freeze()


def _fit(argv: Sequence[str], guard: Guard) -> None:
    arguments = _parse(
        "fit", argv, guard, "Train with PPO. The same command again goes on from the last checkpoint."
    )
    if _shown(arguments, "fit"):
        return
    resolved, config = _checked(arguments, "fit"), arguments.config
    scored = (
        config.reward.rm_type or config.reward.custom_rm_path or config.rollout.custom_generate_function_path
    )
    # a recipe's callbacks import torch, most of them: unless all hangs on them, the other ranks start first
    callbacks = None if scored or config.debug.load_debug_rollout_data else _recipe_callbacks(config)
    if callbacks is not None and not callbacks:
        raise ConfigError("nothing scores the responses: give --rm-type or --custom-rm-path")
    from ppo_lightning.launchers.ranks import started_early

    with started_early(resolved):
        with _quick_imports():
            callbacks = _recipe_callbacks(config) if callbacks is None else callbacks
            from ppo_lightning.run import fit

        fit(config, callbacks)


def _evaluate(argv: Sequence[str], guard: Guard) -> None:
    arguments = _parse(
        "evaluate", argv, guard, "Score the model of --load (or --hf-checkpoint) on --eval-prompt-data."
    )
    if _shown(arguments, "evaluate"):
        return
    resolved = _checked(arguments, "evaluate")
    from ppo_lightning.launchers.ranks import started_early

    with started_early(resolved):
        with _quick_imports():
            callbacks = _recipe_callbacks(arguments.config)
            from ppo_lightning.run import evaluate

        evaluate(arguments.config, callbacks)


def _prepare(argv: Sequence[str], guard: Guard) -> None:
    arguments = _parse(
        "prepare", argv, guard, "Download, build and convert what a recipe needs; skips what is there."
    )
    if _shown(arguments, "fit"):
        return
    if arguments.config.recipe is None:
        raise ConfigError(f"prepare needs a recipe: --recipe {'|'.join(recipe_names())}")
    config, warnings = _resolved(arguments.config, files=False)
    _warn(warnings)
    recipe = load_recipe(arguments.config.recipe)
    if not hasattr(recipe, "prepare"):
        print(f"recipe {config.recipe} needs no preparation")
        return
    recipe.prepare(config)


def _report(argv: Sequence[str], guard: Guard) -> None:
    if argv and not argv[0].startswith("-"):
        argv = ["--output-dir", *argv]
    arguments = _parse(
        "report", argv, guard, "Draw report.png of a run's directory: report DIR, or --output-dir DIR."
    )
    config = arguments.config
    if config.logging.output_dir is None and config.recipe is None:
        raise ConfigError("report needs a run's directory: ppo-lightning report DIR")
    directory = output_dir(config)
    if not (directory / "metrics.csv").is_file():
        raise ConfigError(f"{directory} holds no metrics.csv; name the output directory of a run")
    from ppo_lightning.report import write_report

    print(write_report(directory))


def _convert(argv: Sequence[str], guard: Guard) -> None:
    given = parse_conversion(argv)
    guard.debug_traceback |= given.pop("debug_traceback")
    if problems := conversion_problems(given):
        raise ConfigError(problems)
    from ppo_lightning.megatron.convert import convert

    convert(**given)


COMMANDS: dict[str, Callable[[Sequence[str], Guard], None]] = {
    "fit": _fit,
    "prepare": _prepare,
    "convert": _convert,
    "evaluate": _evaluate,
    "report": _report,
}
