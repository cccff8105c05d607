"""Rewards: a registry of named functions of (response, label), and how a name in `--rm-type` is read.

A response is untrusted text. The families that parse it are registered with `sandboxed=True` and run in
worker processes under a time and a memory limit (`ppo_lightning.rewards.sandbox`). Importing this package
imports no torch, no sympy and none of the families.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import fsum, isfinite, nan  # not `import math`: that name is the module of a reward here
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[[str, Any], float])

# Names of `--rm-type` that are no function of (response, label): they need a service, a model or a user's
# function.
EXTERNAL = ("remote_rm", "model", "custom")


class RewardError(RuntimeError):
    """A reward could not be computed; the message says which, why and what to change."""


class Outcome(NamedTuple):
    """The value of one response; `timed_out` when it met the time or the memory limit, and then the value
    is 0."""

    value: float
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Reward:
    """A registered reward. Calling it scores one response; `batch` scores many, in order."""

    name: str
    function: Callable[[str, Any], float]
    needs_label: bool
    sandboxed: bool
    seconds: float

    def __call__(self, response: str, label: Any = None) -> float:
        return self.batch([(response, label)])[0].value

    def batch(
        self, pairs: Sequence[tuple[str, Any]], cancelled: Callable[[], bool] = lambda: False
    ) -> list[Outcome]:
        """Score (response, label) pairs. A missing label where one is needed raises RewardError, and so do
        the worker processes soon after `cancelled` has turned true."""
        for row, (_, label) in enumerate(pairs):
            if self.needs_label and label is None:
                raise RewardError(f"reward {self.name!r} needs a label and pair {row} has none")
        if not self.sandboxed:
            return [Outcome(float(self.function(response, label))) for response, label in pairs]
        from ppo_lightning.rewards.sandbox import shared

        target = f"{self.function.__module__}:{self.function.__qualname__}"
        return shared().score(target, pairs, seconds=self.seconds, cancelled=cancelled)


_REGISTRY: dict[str, Reward] = {}


def register(
    name: str, *, needs_label: bool = True, sandboxed: bool = False, seconds: float = 0.5
) -> Callable[[F], F]:
    """Decorator: make `function(response: str, label) -> float` available as `--rm-type name`.

    `sandboxed` runs it in the worker processes, which import it by module and name: it must stand at the
    top of an importable module. `seconds` is the CPU time that one response may take there. A name already
    taken raises ValueError.
    """

    def add(function: F) -> F:
        known = _REGISTRY.get(name)
        place = (function.__module__, function.__qualname__)
        if name in EXTERNAL or (known and (known.function.__module__, known.function.__qualname__) != place):
            raise ValueError(f"a reward named {name!r} exists already; choose another name")
        if not name.isidentifier():
            raise ValueError(f"{name!r} cannot name a reward: use letters, digits and underscores")
        if sandboxed and (place[0] == "__main__" or "<locals>" in place[1]):
            raise ValueError(
                f"reward {name!r} is sandboxed, so its function must stand at the top of an importable"
                f" module; {place[0]}.{place[1]} does not"
            )
        _REGISTRY[name] = Reward(name, function, needs_label, sandboxed, seconds)
        return function

    return add


@cache
def _homes() -> dict[str, str]:
    """The module of this folder that registers each name: read from the files' text, so that none is
    imported before it is asked for."""
    return {
        name: f"{__name__}.{path.stem}"
        for path in sorted(Path(__file__).parent.glob("[!_]*.py"))
        for name in re.findall(r'^@register\(\s*["\'](\w+)', path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def names() -> list[str]:
    """All names that `get` knows, sorted."""
    return sorted({*_homes(), *_REGISTRY})


def get(name: str) -> Reward:
    """The reward of that name; ValueError names the nearest one when there is none."""
    if name not in _REGISTRY and name in _homes():
        importlib.import_module(_homes()[name])
    if name in _REGISTRY:
        return _REGISTRY[name]
    if name in EXTERNAL:
        raise ValueError(
            f"reward {name!r} scores samples, not text: use RewardCallback({name!r}, ...) or --rm-type"
        )
    raise ValueError(_unknown(name))


def score(name: str, response: str, label: Any = None) -> float:
    """The reward of one response, by name ("deepscaler") or by a weighted sum ("deepscaler,f1:0.5").

    A time-out or a memory kill gives 0. An unknown name raises ValueError, a missing label RewardError.
    """
    return fsum(weight * get(part)(response, label) for part, weight in parse_rm_type(name))


def parse_rm_type(text: str) -> list[tuple[str, float]]:
    """`"deepscaler"` -> [("deepscaler", 1.0)]; `"deepscaler,f1:0.5"` -> both, with their weights.

    Empty parts, unknown names, names given twice and weights that are no finite number raise ValueError.
    """
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, colon, weight = (piece.strip() for piece in part.partition(":"))
        if not name:
            raise ValueError(
                f"--rm-type {text!r} has an empty name; write e.g. deepscaler or deepscaler,f1:0.5"
            )
        if name not in names() and name not in EXTERNAL:
            raise ValueError(_unknown(name))
        if name in terms:
            raise ValueError(f"--rm-type {text!r} names {name!r} twice; give it one weight")
        terms[name] = _weight(text, name, weight) if colon else 1.0
    return list(terms.items())


def _weight(text: str, name: str, weight: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise ValueError(
            f"--rm-type {text!r}: the weight of {name!r} is {weight!r}, which is no finite number"
        )
    return value


def _unknown(name: str) -> str:
    known = sorted({*names(), *EXTERNAL})
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no reward is named {name!r}: {hint}there are {', '.join(known)};"
        " your own comes in with --custom-rm-path module:function"
    )
