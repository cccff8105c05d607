"""Users' own reward functions: finding them by name, calling them, reading what they return."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from ppo_lightning.rewards import RewardError

HEAD_CHARS = 120  # of a response, in an error


def load(path: str, flag: str = "--custom-rm-path") -> Callable[..., Any]:
    """The function that `flag package.module:function` names; ValueError says what is missing."""
    module_name, colon, name = path.partition(":")
    if not colon:
        module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise ValueError(f"{flag} {path!r} is no function: write package.module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{flag} {path!r}: {error}; the module must be installed, or stand on"
            " PYTHONPATH or in the directory in which the command is given"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{flag} {path!r}: {module_name} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{flag} {path!r} is a {type(found).__name__}, no function")
    return found


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, from synchronous code in any thread, also beneath a running loop (a
    notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return _run_beside(coroutine)


def _run_beside(coroutine: Coroutine[Any, Any, Any]) -> Any:
    result: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            result.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=target, name="reward-loop")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


def call_all(
    function: Callable[..., Any], arguments: list[Any], describe: Callable[[Any], str], limit: int = 64
) -> list[Any]:
    """`function` of each argument, in order; what is awaitable is awaited, coroutine functions at most
    `limit` at a time. The first error ends all; it bears a note with `describe(argument)`."""

    async def one(argument: Any, slots: asyncio.Semaphore) -> Any:
        async with slots:
            with _noting(describe, argument):
                result = function(argument)
                return await result if inspect.isawaitable(result) else result

    async def all_at_once() -> list[Any]:
        slots = asyncio.Semaphore(limit)
        # asyncio.run cancels what is still under way when the first error leaves.
        return await asyncio.gather(*[one(argument, slots) for argument in arguments])

    if _is_async(function):
        return run(all_at_once())
    results = []
    for argument in arguments:
        with _noting(describe, argument):
            result = function(argument)
            results.append(run(_settled(result)) if inspect.isawaitable(result) else result)
    return results


@contextlib.contextmanager
def _noting(describe: Callable[[Any], str], argument: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {describe(argument)}")
        raise


async def _settled(result: Awaitable[Any]) -> Any:
    return await result


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object whose call is a coroutine function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def as_float(value: Any, where: str, reward_key: str | None = None) -> float:
    """The finite number in what a reward returned: itself, or its `reward_key`. `where` names function and
    sample.

    TypeError for no number, RewardError for a missing key, ValueError for NaN or infinity."""
    if isinstance(value, dict):
        if reward_key is None:
            raise RewardError(
                f"{where} returned a dict with keys {sorted(map(str, value))}; name one with --reward-key"
            )
        if reward_key not in value:
            raise RewardError(
                f"{where} returned no {reward_key!r}, only {sorted(map(str, value))}; see --reward-key"
            )
        value = value[reward_key]
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError(f"{where} returned {value!r}; a reward is a number")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} returned a {type(value).__name__}; a reward is a number") from error
    if not math.isfinite(number):
        raise ValueError(f"{where} returned {number}; a reward must be finite")
    return number
