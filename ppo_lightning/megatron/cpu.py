"""Megatron-Core without CUDA: the one place that knows how.

Four things stand between Megatron-Core and a CPU: queries such as `torch.cuda.current_device()`, literals
such as `device="cuda"`, type names such as `"torch.cuda.FloatTensor"`, and a random state that lives on a
GPU. The queries get stand-ins (on a CPU they would raise), the literals are replaced in Megatron's own
code objects, and the random state tracker keeps CPU generators. Nothing of Megatron's logic is touched,
and nothing happens where CUDA is there.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_PREFIX = "megatron.core"
_LITERALS = {"cuda": "cpu"} | {
    f"torch.cuda.{t}Tensor": f"torch.{t}Tensor" for t in ("Float", "Half", "BFloat16")
}
_installed = False
_treated: set[str] = set()  # modules whose literals are replaced


def install() -> bool:
    """Make Megatron-Core run on this machine; to be called before anything of it runs.

    Importing Megatron earlier is fine. Idempotent. Returns whether there was anything to do.
    """
    global _installed
    _mend_distributed_optimizer()
    if torch.cuda.is_available():
        return False
    if not _installed:
        # dynamo's rule table keys on the ids of torch.cuda's functions: build it before they are replaced
        importlib.import_module("torch._dynamo")
        random = importlib.import_module("megatron.core.tensor_parallel.random")
        _replace_cuda_queries()
        _replace_rng_tracker(random)
        _installed = True
    prepared()
    return True


def prepared() -> None:
    """Treat the Megatron modules that were imported since `install`; a no-op where CUDA is there."""
    if not _installed:
        return
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIX) and name not in _treated and module is not None:
            _treated.add(name)
            for value in list(vars(module).values()):
                _rewrite(value, seen)


# literals -----------------------------------------------------------------------------------------


def _literal(value: Any) -> Any:
    if isinstance(value, str):
        return _LITERALS.get(value, value)
    if isinstance(value, tuple):
        return tuple(map(_literal, value))
    if isinstance(value, frozenset):
        return frozenset(map(_literal, value))
    return _code(value) if isinstance(value, types.CodeType) else value


def _code(code: types.CodeType) -> types.CodeType:
    constants = tuple(map(_literal, code.co_consts))
    return code if constants == code.co_consts else code.replace(co_consts=constants)


def _rewrite(obj: Any, seen: set[int]) -> None:
    """Replace the literals in a function, or in all functions of a class, of Megatron's own."""
    if isinstance(obj, staticmethod | classmethod):
        obj = obj.__func__
    if isinstance(obj, property):
        for accessor in (obj.fget, obj.fset):
            _rewrite(accessor, seen)
        return
    if hasattr(obj, "__wrapped__"):
        _rewrite(obj.__wrapped__, seen)
    if id(obj) in seen or not str(getattr(obj, "__module__", "")).startswith(_PREFIX):
        return
    seen.add(id(obj))
    if isinstance(obj, types.FunctionType):
        obj.__code__ = _code(obj.__code__)
        if obj.__defaults__:
            obj.__defaults__ = tuple(map(_literal, obj.__defaults__))
        if obj.__kwdefaults__:
            obj.__kwdefaults__ = {k: _literal(v) for k, v in obj.__kwdefaults__.items()}
    elif isinstance(obj, type):
        for value in list(vars(obj).values()):
            _rewrite(value, seen)


# queries ------------------------------------------------------------------------------------------


class _NullStream:
    """A stream or event on a device where everything is in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *args: object) -> None:
        pass


def _replace_cuda_queries() -> None:
    cuda, cpu = torch.cuda, torch.device("cpu")

    def put(name: str, function: Any, *modules: types.ModuleType) -> None:
        # a function object of its own for every name: dynamo refuses one that stands under two
        for module in modules or (cuda,):
            copy = types.FunctionType(
                function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
            )
            setattr(module, name, copy)

    put("current_device", lambda: cpu)
    for name in ("synchronize", "empty_cache", "set_device"):
        put(name, lambda *args, **kwargs: None)
    for name in ("current_stream", "default_stream"):
        put(name, lambda *args, **kwargs: _NullStream())
    put("stream", lambda stream=None: contextlib.nullcontext())
    put("get_rng_state", lambda device=None: torch.get_rng_state(), cuda, cuda.random)
    put("set_rng_state", lambda state, device=None: torch.set_rng_state(state), cuda, cuda.random)
    put("manual_seed", lambda seed: torch.random.default_generator.manual_seed(seed))
    cuda.Stream = cuda.Event = _NullStream  # type: ignore[misc,assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _replace_rng_tracker(random: Any) -> None:
    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """Megatron's tracker, with named states of the CPU generator."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"the random state {name!r} (seed {seed}) exists already")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    random.CudaRNGStatesTracker = CpuRNGStatesTracker
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


# the distributed optimizer on torch's Adam --------------------------------------------------------


def _mend_distributed_optimizer() -> None:
    """Three faults of megatron-core 0.16.1 where neither Transformer Engine nor Apex brings its own Adam."""
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    cls = module.DistributedOptimizer
    if module.HAVE_APEX_OR_TE or getattr(cls, "_mended", False):
        return
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict

    def mended_state_dict(self: Any) -> Any:
        # it asserts one `step`, and an Adam that has not stepped yet has none
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                state = self.optimizer.state[p]
                if not state and isinstance(self.optimizer, torch.optim.Adam):
                    state |= {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
        return state_dict(self)

    def mended_load_state_dict(self: Any, state: Any) -> None:
        # it hands every parameter the same `step` tensor, which Adam would then advance once per parameter
        load_state_dict(self, state)
        for parameter_state in self.optimizer.state.values():
            if "step" in parameter_state:
                parameter_state["step"] = parameter_state["step"].clone()

    @torch.no_grad()
    def mended_set_states(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        # it looks for a `step` tensor (that travels in param_groups) and writes in place to a leaf
        group, index = self.model_param_group_index_map[model_param]
        p = self.optimizer.param_groups[group]["params"][index]
        for name, target in {"param": p, **self.optimizer.state[p]}.items():
            if name != "step":
                target.copy_(tensors[name])

    cls.state_dict, cls.load_state_dict = mended_state_dict, mended_load_state_dict
    cls._set_main_param_and_optimizer_states = mended_set_states
    cls._mended = True
