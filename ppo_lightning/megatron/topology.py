"""The process groups of Megatron-Core, and this rank's place in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import distributed_c10d

from ppo_lightning.architecture import ModelShape
from ppo_lightning.megatron import cpu


@dataclass(frozen=True)
class Topology:
    """Sizes and this rank's coordinates; world = tp * cp * dp * pp, tensor ranks being next to each other.

    The groups are those of the process; ask for them only between `initialize` and `destroy`.
    """

    world: int
    rank: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int | None = None  # virtual stages per pipeline rank; None: no interleaving
    sequence_parallel: bool = False
    tp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0
    dp_rank: int = 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes outputs and losses (in its last virtual stage)."""
        return self.pp_rank == self.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_process_group_ranks(self.pp_group)[-1]

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this many tokens: two zigzag pieces per context
        rank, each of which sequence parallelism cuts over the tensor ranks."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_context_parallel_group()

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same shard of the model and see other samples."""
        return parallel_state.get_data_parallel_group()

    @property
    def dp_cp_group(self) -> dist.ProcessGroup:
        """Ranks over which gradients are summed."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)


def initialize(
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    sequence_parallel: bool = False,
    seed: int = 1234,
    timeout_minutes: int = 30,
) -> Topology:
    """Form Megatron's groups over the default process group, which must exist, and seed its random states.

    Sequence parallelism without tensor parallelism, and virtual stages of one, mean nothing and are dropped.
    Raises ValueError where the sizes do not fit the world.
    """
    tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
    vpp = virtual_pipeline_model_parallel_size
    world = dist.get_world_size()
    if world % (tp * pp * cp):
        raise ValueError(
            f"TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp} does not divide the {world} ranks of this run;"
            " change one of the sizes or the number of ranks"
        )
    if vpp is not None and vpp > 1 and pp == 1:
        raise ValueError(f"{vpp} virtual stages need a pipeline: set pipeline_model_parallel_size >= 2")
    vpp = vpp if vpp is not None and vpp > 1 else None
    cpu.install()
    with _one_gloo_device():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            context_parallel_size=cp,
            distributed_timeout_minutes=timeout_minutes,
        )
    model_parallel_cuda_manual_seed(seed)
    return Topology(
        world=world,
        rank=dist.get_rank(),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=world // (tp * pp * cp),
        vpp=vpp,
        sequence_parallel=sequence_parallel and tp > 1,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )


def check_division(arch: ModelShape, topology: Topology, chunk: int = 1) -> None:
    """Raises ValueError naming every size of the layout that does not divide the model."""
    tp = topology.tp
    problems = [
        f"TP {tp} does not divide its {count} {what}"
        for what, count in (("attention heads", arch.heads), ("key/value heads", arch.kv_heads))
        if count % tp
    ]
    if arch.ffn % tp:
        problems.append(f"TP {tp} does not divide its MLP width {arch.ffn}")
    if arch.layers % chunk:
        problems.append(f"{chunk} layers recomputed together do not divide its {arch.layers} layers")
    elif arch.layers < topology.pp * chunk:
        problems.append(f"PP {topology.pp} leaves stages without one of its {arch.layers // chunk} layers")
    elif topology.vpp and arch.layers % (topology.pp * topology.vpp * chunk):
        stages = f"PP {topology.pp} x {topology.vpp} virtual stages"
        problems.append(f"{stages} do not divide its {arch.layers} layers")
    if problems:
        raise ValueError(f"the {arch.model_type} model does not fit the layout: " + "; ".join(problems))


@contextmanager
def _one_gloo_device() -> Iterator[None]:
    """Groups made inside share the default group's gloo device, if it has one. Each would have its own, whose
    thread wakes up a hundred times a second: those of Megatron's groups take 3 % of a core in every rank."""
    if dist.get_backend() != "gloo":
        yield
        return
    alone: Any = distributed_c10d.ProcessGroupGloo
    world: Any = distributed_c10d._get_default_group()
    devices = world._get_backend(torch.device("cpu")).options._devices

    class Sharing(alone):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = alone._Options()
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = alone


def destroy() -> None:
    """Forget Megatron's groups; the default process group stays."""
    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).copy().items():
        if isinstance(value, dist.ProcessGroup):  # some are left behind, with their threads
            setattr(parallel_state, name, None)
