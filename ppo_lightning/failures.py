"""How a command ends: exit codes, one line for a failure, its traceback in the run's log."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ppo_lightning.config import ConfigError

DONE, FAILED, USAGE = 0, 1, 2
_INTERRUPTED = {
    "fit": "the same command goes on from the last checkpoint, or begins anew where there is none",
    "prepare": "what is whole stays, and the same command makes what is missing",
    "convert": "nothing counts of what was written, and the same command begins anew",
    "evaluate": "no scores were written, and the same command begins anew",
    "report": "the same command draws it again",
}


class Guard:
    """Runs a command and gives its exit code. It owns what is known of the command while it runs: where its
    log is, and which signal ended it (Lightning turns Ctrl-C into a plain exit, so it is remembered)."""

    def __init__(self, command: str = "fit") -> None:
        self.command = command
        self.output_dir: Path | None = None
        self.debug_traceback = bool(os.environ.get("PPO_LIGHTNING_TRACEBACK"))
        self.code = DONE
        self._signal: int | None = None

    def run(self, command: Callable[[], None]) -> int:
        """0 done, 1 failed while running, 2 usage or configuration, 128 + signal when interrupted."""
        with self._signals(), self:
            command()
        return self.code

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """The last stop of every exception: it becomes a message and an exit code."""
        if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
            self._signal = signal.SIGTERM  # Lightning took the signal in our place
        if error is None:
            self.code = DONE
        elif isinstance(error, KeyboardInterrupt) or self._signal:
            self.code = self._interrupted()
        elif isinstance(error, SystemExit):
            self.code = self._left(error.code)
        elif isinstance(error, ConfigError):
            self.code = self._refused(error)
        else:
            self.code = self._failed(error)
        return True

    def _refused(self, error: ConfigError) -> int:
        if _rank() == 0:  # every rank sees the same configuration
            print(f"error: {error}", file=sys.stderr)
        return USAGE

    def _left(self, code: str | int | None) -> int:
        if isinstance(code, str):
            print(f"error: {code}", file=sys.stderr)
            return FAILED
        return code or DONE

    def _interrupted(self) -> int:
        number = self._signal or signal.SIGINT
        if _rank() == 0:
            what = "interrupted" if number == signal.SIGINT else "terminated"
            print(f"{what}; {_INTERRUPTED[self.command]}", file=sys.stderr)
        return 128 + number

    def _failed(self, error: BaseException) -> int:
        rank = f" [rank {_rank()}]" if _rank() else ""
        print(f"error{rank}: {describe(error)}", file=sys.stderr)
        text = "".join(traceback.format_exception(error))
        if self.debug_traceback:
            print(text, file=sys.stderr)
        elif (log := self._log(text)) is not None:
            print(f"traceback: {log}", file=sys.stderr)
        return FAILED

    def _log(self, text: str) -> Path | None:
        """Append to the run's log; None where there is none (yet), or it cannot be written."""
        if self.output_dir is None or not self.output_dir.is_dir():
            return None
        log = self.output_dir / "log.txt"
        try:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {_rank()} failed\n{text}\n")
        except OSError:
            return None
        return log

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM ends a command as Ctrl-C does; both are remembered."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number
        raise KeyboardInterrupt


def line_in(error: BaseException, file: Path) -> str:
    """Where in `file` the error arose, to stand behind its description; empty if elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == file]
    return f" (line {lines[-1]})" if lines else ""


def describe(error: BaseException) -> str:
    """One message for a user: own errors speak for themselves, others are named by their kind."""
    text = str(error).strip()
    if "EADDRINUSE" in text or (isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
        return (
            f"a port is in use ({text.splitlines()[0]}); end the other run, or set MASTER_PORT to a free port"
        )
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if type(error).__module__.startswith("ppo_lightning"):
        return text or type(error).__name__
    lines = [line for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _rank() -> int:
    """As far as the environment tells: torchrun, Lightning's launcher, SLURM."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0
