"""`PPOConfig`: a tree of frozen dataclasses, one per group of options; flat names outside, groups inside.

No torch here: a configuration is parsed, checked and printed before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from ppo_lightning.option import Option, convert, option, take_apart, unknown
from ppo_lightning.options import (
    AlgorithmOptions,
    ClusterOptions,
    CriticOptions,
    ModelOptions,
    OptimizerOptions,
)
from ppo_lightning.options_rollout import (
    DataOptions,
    DebugOptions,
    EvaluationOptions,
    LoggingOptions,
    PerformanceOptions,
    RewardOptions,
    RolloutOptions,
)


class ConfigError(ValueError):
    """The configuration cannot run as it stands. `problems` holds one message each, with its remedy."""

    def __init__(self, problems: Iterable[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = [f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1)]
        return "\n".join([f"{len(self.problems)} problems in the configuration:", *lines])


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """Everything a run is told. Immutable: `replace` and `resolve` return new ones."""

    recipe: str | None = option(None, "recipe it began with")
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    critic: CriticOptions = field(default_factory=CriticOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    data: DataOptions = field(default_factory=DataOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    performance: PerformanceOptions = field(default_factory=PerformanceOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)
    debug: DebugOptions = field(default_factory=DebugOptions)

    @classmethod
    def of(cls, **flat: Any) -> PPOConfig:
        """From flat names: `PPOConfig.of(lr=1e-5, advantage_estimator="ppo")`. Raises ConfigError for an
        unknown name (naming the nearest) or a value of another type than declared."""
        return cls().replace(**flat)

    def replace(self, **flat: Any) -> PPOConfig:
        """A copy with these options changed; same errors as `of`. A name `sglang_x` that is no option here is
        appended to `rollout.sglang_args`."""
        values, passed, problems = check_values(flat)
        if problems:
            raise ConfigError(problems)
        if passed:
            values["sglang_args"] = (*values.get("sglang_args", self.rollout.sglang_args), *passed)
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            groups.setdefault(options()[name].group, {})[name] = value
        changed = {g: dataclasses.replace(getattr(self, g), **v) for g, v in groups.items() if g}
        return dataclasses.replace(self, **groups.get("", {}), **changed)

    def flat(self) -> dict[str, Any]:
        """Every option by its flat name, in the order of declaration."""
        return {
            name: getattr(getattr(self, o.group) if o.group else self, name) for name, o in options().items()
        }

    def to_yaml(self) -> str:
        """Nested YAML of every option; `from_yaml` gives the same configuration back."""
        import yaml

        return yaml.safe_dump(
            _plain(dataclasses.asdict(self)), sort_keys=False, allow_unicode=True, width=100
        )

    @classmethod
    def from_yaml(cls, *paths: str | Path, base: PPOConfig | None = None) -> PPOConfig:
        """`base` (or the defaults) overlaid with each file in turn, nested or flat. Raises ConfigError that
        names the file and the key."""
        from ppo_lightning.flags import read_yaml

        config = cls() if base is None else base
        for path in paths:
            config = config.replace(**read_yaml(path))
        return config

    def resolve(
        self, cuda: bool = False, device_count: int = 0, *, command: str = "fit", files: bool = True
    ) -> tuple[PPOConfig, list[str]]:
        """The configuration with every derived value filled in, and warnings. Raises ConfigError listing all
        problems. Resolving twice changes nothing. `command` "evaluate" asks for nothing that only training
        needs; `files` False leaves checkpoint directories unread."""
        from ppo_lightning.validation import resolve

        return resolve(self, cuda, device_count, command=command, files=files)

    @property
    def ppo(self) -> bool:
        """Whether a critic is built: for `ppo`, and for an estimator of your own that was registered with
        `needs_critic=True` before."""
        name = self.algorithm.advantage_estimator
        loaded = sys.modules.get("ppo_lightning.advantages")  # torch stays out where it is not in yet
        own = loaded.REGISTRY.get(name) if loaded else None
        return name == "ppo" or (own is not None and own.needs_critic)

    @property
    def kl(self) -> bool:
        """Whether a reference model is needed."""
        return self.algorithm.use_kl_loss or self.algorithm.kl_coef != 0

    @property
    def world_size(self) -> int:
        """Training ranks. Of a resolved configuration."""
        return self.cluster.actor_num_nodes * (self.cluster.actor_num_gpus_per_node or 1)

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica: TP x PP x CP."""
        m = self.model
        return m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size


@cache
def options() -> dict[str, Option]:
    """All options by flat name."""
    found: dict[str, Option] = {}
    for name, group, hint, f in _fields(PPOConfig, ""):
        if name in found:
            raise TypeError(f"option {name} is declared twice")
        found[name] = Option(name, group, *take_apart(hint), default=f.default, metadata=f.metadata)
    return found


def check_values(
    flat: Mapping[str, Any], where: str = "", names: Callable[[str], str] = str
) -> tuple[dict[str, Any], tuple[str, ...], list[str]]:
    """Values converted to their declared types, server flags made of the entries sglang_x that are no option
    here, and a message for each entry that is unknown or of the wrong type. A message begins with `where`
    ("run.yaml: ") and calls the option what `names` makes of it."""
    values: dict[str, Any] = {}
    passed: list[str] = []
    problems: list[str] = []
    for raw, value in flat.items():
        name = raw.replace("-", "_")
        if name not in options() and name.startswith("sglang_"):
            passed += _server_flag(name, value)
        elif name not in options():
            problems.append(where + unknown(name, options()))
        else:
            try:
                values[name] = convert(value, options()[name])
            except ValueError as error:
                problems.append(f"{where}{names(name)}: {error}")
    return values, tuple(passed), problems


def _server_flag(name: str, value: Any) -> list[str]:
    """An entry sglang_x as the flag it stands for: true is the bare flag, false and null leave it out."""
    if value is None or value is False:
        return []
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    return [flag, *(str(v) for v in (value if isinstance(value, list | tuple) else [value]))]


def _fields(cls: Any, group: str) -> Iterator[tuple[str, str, Any, dataclasses.Field[Any]]]:
    hints = get_type_hints(cls, include_extras=True)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _fields(hints[f.name], f.name)
        else:
            yield f.name, group, hints[f.name], f


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
