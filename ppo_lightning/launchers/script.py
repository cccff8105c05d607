"""The user's own script, to be run again as it was started."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

FORWARDED: tuple[str, ...] = (
    "OMP_",
    "MKL_",
    "NCCL_",
    "GLOO_",
    "TORCH",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "WANDB_",
)
FORWARDED += ("PYTHON", "PL_", "PPO_LIGHTNING_", "SGLANG_")


failures: list[Exception] = []  # of `fit` in this process: a command line turns them into an exit status


class RayLaunchError(RuntimeError):
    """The cluster cannot hold the job, or a part of it ended without an error of its own."""


# what a rank says when another one is gone (gloo, NCCL, the store)
LOST_PEER = ("Connection closed", "Connection reset", "Broken pipe", "gloo", "NCCL", "Socket", "TCPStore")


def lost_peer(error: BaseException) -> bool:
    """Whether a rank failed only because another one did."""
    ours = isinstance(error, RuntimeError) and not isinstance(error, RayLaunchError)
    return ours and any(word in str(error) for word in LOST_PEER)


@dataclass(frozen=True, slots=True)
class Script:
    """How this process was started, to start it again: a file or a module, its arguments and surroundings."""

    argv: tuple[str, ...]
    module: str | None
    cwd: str
    path: tuple[str, ...] = ()  # where it finds modules
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def current(cls) -> Script:
        """Raises RayLaunchError where there is none: in an interactive session, or under `python -c`."""
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = None if spec is None else spec.name.removesuffix(".__main__")
        argv = (os.path.abspath(sys.argv[0]), *sys.argv[1:])
        if module is None and not os.path.isfile(argv[0]):
            raise RayLaunchError("each rank runs your script again: put it into a file and run that")
        passed = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}
        return cls(argv, module, os.getcwd(), tuple(filter(None, sys.path)), passed)

    def run(self, environment: Mapping[str, str]) -> None:
        """Run it in this process, as its main program. Raises what it raises; an exit with a status other
        than 0 becomes the error that led to it."""
        os.environ.update(self.environment | dict(environment))
        if os.path.isdir(self.cwd):
            os.chdir(self.cwd)
        sys.argv[:] = self.argv
        sys.path[:0] = [place for place in self.path if place not in sys.path]
        sys.path.insert(0, self.cwd if self.module else os.path.dirname(self.argv[0]))
        try:
            if self.module:
                runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.argv[0], run_name="__main__")
        except SystemExit as end:  # Ray would take it for the wish of an actor to leave
            if end.code not in (None, 0):
                unknown = RayLaunchError(f"the script ended with status {end.code}")
                raise (failures[-1] if failures else unknown) from None
