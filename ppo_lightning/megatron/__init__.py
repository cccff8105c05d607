"""Megatron-Core under Lightning: the only home of `import megatron`."""

import os
import warnings

import torch

# said at import of megatron.core by every process; the fallbacks are what this package is built and tested on
warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine).*not installed.*")
warnings.filterwarnings("ignore", message=r".*scope is deprecated.*cuda_graph_scope.*")

_NO_COMPILER = "TORCHDYNAMO_DISABLE"  # read whenever torch.compile is called


def _import_uncompiled() -> None:
    """Import Megatron-Core without torch.compile, whose mere use as a decorator loads Inductor, a fifth of
    the imports of a run. Without CUDA no compiled function is called: `model.transformer_config` asks for no
    fusion. What others compile is compiled."""
    os.environ[_NO_COMPILER] = "1"
    try:
        from megatron.core.jit import disable_jit_fuser
    finally:
        del os.environ[_NO_COMPILER]
    disable_jit_fuser()  # in the modules that are imported later


if not torch.backends.cuda.is_built() and _NO_COMPILER not in os.environ:
    _import_uncompiled()
