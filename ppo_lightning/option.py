"""How an option is declared, and how a value from Python, YAML or a flag's text becomes its declared type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

T = TypeVar("T")
# An option that may be left out and has a value once the configuration is resolved: T to whoever reads it.
Filled = Annotated[T, "None until resolved"]


def option(
    default: Any,
    help: str,
    *,
    derived: str = "",
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    aliases: tuple[str, ...] = (),
    metavar: str = "",
) -> Any:
    """A dataclass field. `derived` says what an absent value becomes; `resolve` checks the bounds."""
    bounds = {"above": above, "at_least": at_least, "at_most": at_most}
    metadata = {"help": help, "derived": derived, "aliases": aliases, "metavar": metavar}
    return field(default=default, metadata=metadata | {k: v for k, v in bounds.items() if v is not None})


def switch(help: str, default: bool = False) -> Any:
    return option(default, help)


class Option(NamedTuple):
    """One declared option, with its type taken apart."""

    name: str
    group: str  # "" for `recipe`
    base: Any  # bool, int, float, str, or tuple of choices for a Literal
    optional: bool
    many: bool  # a tuple of `base`
    default: Any
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def unknown(name: str, known: Iterable[str], what: str = "option") -> str:
    """'unknown option x; did you mean y?'"""
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    return f"unknown {what} {name}" + (f"; did you mean {near[0]}?" if near else "")


def convert(value: Any, to: Option) -> Any:
    """`value` as the declared type, from Python, YAML or a flag's text. ValueError says what is wanted."""
    if to.many:
        items = [value] if isinstance(value, str | int | float) else value
        if not isinstance(items, list | tuple):
            raise ValueError(f"a list is wanted, not {value!r}")
        return tuple(_scalar(item, to.base) for item in items)
    if value is None or (to.optional and isinstance(value, str) and value.lower() in ("none", "null")):
        if to.optional:
            return None
        raise ValueError(f"{_wanted(to.base)} is wanted, not an empty value")
    return _scalar(value, to.base)


def _scalar(value: Any, base: Any) -> Any:
    if isinstance(base, tuple):
        if value in base and isinstance(value, str):
            return value
        near = difflib.get_close_matches(str(value), base, 1)
        raise ValueError(
            f"one of {', '.join(base)} is wanted, not {value!r}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    text = isinstance(value, str)
    if base is str and (text or isinstance(value, Path)):
        return str(value)
    if base is bool and isinstance(value, bool):
        return value
    if base in (int, float) and not isinstance(value, bool) and (text or isinstance(value, int | float)):
        number = _number(value)
        if number is not None and (base is float or number == int(number)):
            return float(number) if base is float else int(number)
    raise ValueError(f"{_wanted(base)} is wanted, not {value!r}")


def _number(value: str | int | float) -> int | float | None:
    """YAML 1.1 reads 1e-5 as text, so text is read as Python would; inf and nan are no option's value."""
    try:
        number = float(value)
        exact = int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdigit() else value
    except (ValueError, OverflowError):
        return None
    if number != number or number in (float("inf"), float("-inf")):
        return None
    return exact if isinstance(exact, int) else number


def _wanted(base: Any) -> str:
    if isinstance(base, tuple):
        return f"one of {', '.join(base)}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[base]


def take_apart(hint: Any) -> tuple[Any, bool, bool]:
    """A field's annotation as (base, optional, many)."""
    optional = many = False
    if get_origin(hint) is Annotated:
        hint, optional = get_args(hint)[0], True
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (a for a in get_args(hint) if a is not type(None))
        optional = True
    if get_origin(hint) is tuple:
        hint, many = get_args(hint)[0], True
    base = get_args(hint) if get_origin(hint) is Literal else hint
    return base, optional, many
