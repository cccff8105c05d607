"""How Megatron-Core is imported."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import ppo_lightning.megatron.model  # noqa: F401


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="with CUDA its fusions are compiled")
def test_without_cuda_megatron_is_not_compiled_and_others_are() -> None:
    from megatron.core.fusions.fused_bias_geglu import geglu  # imported by megatron.core itself
    from megatron.core.transformer.torch_norm import L2Norm  # imported later

    for function in (geglu, L2Norm._norm):
        assert not hasattr(function, "_torchdynamo_orig_callable")
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert len(compiled) == 1
