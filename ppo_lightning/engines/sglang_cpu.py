"""Entry script of the servers that the SGLang engine starts, on machines with and without a GPU.

    python -m ppo_lightning.engines.sglang_cpu server --model-path DIR --port N [flags of
    sglang.launch_server] python -m ppo_lightning.engines.sglang_cpu router --worker-urls URL URL [flags of
    sglang_router]

Without a GPU, SGLang runs its own pure-torch code (SGLANG_USE_CPU_ENGINE=1), but imports three packages at
load time that have no build for such a machine and that this path never calls. Where one of them is
missing, a stand-in satisfies the import and raises if anything calls it:
    triton       GPU kernel definitions (SGLang ships such a stand-in itself, for Apple silicon)
    torchvision  preprocessing of images
    sgl_kernel   compiled kernels
This must be the main module: SGLang starts its workers with "spawn", which runs the main module's top level
again (not its `__main__` block), so that they get the stand-ins too.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import types
from typing import Any

STOOD_IN = ("triton", "torchvision", "sgl_kernel")
PARENT = "PPO_LIGHTNING_SERVER_PARENT"  # pid of the process whose end must end the server
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Base:
    """What a capitalised name of a stand-in is: good as a base class or an annotation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class _Meta(type):
    def __getattr__(cls, name: str) -> str:  # members of enumerations: InterpolationMode.BICUBIC
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Function:
    """A function of a stand-in: a decorator that changes nothing, or an error when it is really called."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:  # @triton.jit
            return args[0]
        on_tensors = any(hasattr(a, "device") for a in args)
        if (args or kwargs) and not on_tensors:  # @triton.jit(...), @triton.autotune(...)
            return _Function(self.__name__)
        raise RuntimeError(f"{self.__name__} was called, but its package is not installed on this machine")

    def __getattr__(self, name: str) -> _Function:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Function(f"{self.__name__}.{name}")


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        value: Any = _Function(full)
        if name[:1].isupper():
            value = _Meta(name, (_Base,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: tuple[str, ...]) -> None:
        self.roots = roots

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True, origin=__file__)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__file__ = __file__
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        contents: dict[str, Any] = {}
        if module.__name__ == "triton":
            contents = {
                "__version__": "3.0.0",
                "cdiv": lambda a, b: -(a // -b),
                "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
            }
        elif "." not in module.__name__:
            contents = {"__version__": "0.0.0"}
        vars(module).update(contents)


def install() -> tuple[str, ...]:
    """Stand in for those of `STOOD_IN` that are not installed; returns their names."""
    missing = tuple(name for name in STOOD_IN if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Finder(missing))
    return missing


def die_with(parent: int) -> None:
    """Be killed when `parent` ends, however it ends. SGLang's workers bind themselves to this process alike.
    The signal also comes when the *thread* that started this process ends: start it from a lasting one."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(1)


def serve(arguments: list[str]) -> None:
    """SGLang's own server, until it is ended."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def route(arguments: list[str]) -> None:
    """SGLang's own router, until it is ended."""
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(arguments))


if __name__ in ("__main__", "__mp_main__"):
    install()

if __name__ == "__main__":
    if PARENT in os.environ:
        die_with(int(os.environ[PARENT]))
    {"server": serve, "router": route}[sys.argv[1]](sys.argv[2:])
