"""How weights reach an SGLang server: three ways behind one interface, `open`, `send` a bucket, `close`.

`tensor`       same machine. With CUDA the server maps the trainer's memory (CUDA IPC); on the CPU the
               tensors travel in the request, pickled.
`distributed`  another machine. This process and the server's ranks form a group of their own and broadcast
               over NCCL, or over gloo on the CPU.
`disk`         the server loads a directory that both see.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlparse

import torch

from ppo_lightning.engines.sglang_control import Control, TransferError
from ppo_lightning.engines.sglang_server import address_towards, free_port

if TYPE_CHECKING:
    from pathlib import Path

    from ppo_lightning.engines.weight_store import Bucket

GROUP_TIMEOUT = timedelta(minutes=2)  # of one broadcast of one bucket


class Transfer(Protocol):
    def open(self) -> None: ...

    def send(self, bucket: Bucket) -> None: ...

    def close(self, directory: Path) -> None:
        """All buckets are sent, and lie in `directory` too."""

    def reset(self) -> None:
        """The server was started anew, or a transfer failed: what it knew of this one is of no use."""

    def end(self) -> None:
        """Leave nothing behind in a server that lives on."""


class TensorTransfer:
    def __init__(self, control: Control) -> None:
        self._control = control

    def open(self) -> None:
        self._control.post("/begin_weight_update", selector="all")

    def send(self, bucket: Bucket) -> None:
        encode = _cuda_handles if bucket[0][1].is_cuda else _pickled
        payload, load_format = encode(bucket)
        self._control.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[payload] * self._control.ranks,
            load_format=load_format,
            flush_cache=False,
        )

    def close(self, directory: Path) -> None:
        self._control.post("/end_weight_update")

    def reset(self) -> None:
        end_session(self._control)

    def end(self) -> None: ...


def _pickled(bucket: Bucket) -> tuple[str, None]:
    # plain pickle copies the storage, which torch's own reductions would share by file descriptor; a clone,
    # because of a view it would copy the whole storage
    tensors = [
        (name, tensor.detach().clone(memory_format=torch.contiguous_format)) for name, tensor in bucket
    ]
    return base64.b64encode(pickle.dumps(tensors)).decode(), None


def _cuda_handles(bucket: Bucket) -> tuple[str, str]:
    """A handle on one flat tensor: its memory must stay until the server has answered, which `send`
    awaits."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()  # names devices by UUID: the server may number them otherwise
    flat = FlattenedTensorBucket(named_tensors=bucket)
    content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return MultiprocessingSerializer.serialize(content, output_str=True), "flattened_bucket"


class DistributedTransfer:
    """Rank 0 of a group with the server's ranks, made at the first update and again after a failure."""

    def __init__(self, control: Control, backend: str) -> None:
        self._control, self._backend = control, backend
        self._group: Any = None
        self._name = ""
        self._made = 0

    def open(self) -> None:
        if self._group is None:
            self._join()
        self._control.post("/begin_weight_update", selector="all")

    def send(self, bucket: Bucket) -> None:
        for part in _by_dtype(bucket):  # a flat buffer of several types would not be aligned
            flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in part])
            flat = flat.cuda() if self._backend == "nccl" else flat.cpu()  # a stored copy lies on the host
            ask = _Call(
                self._control,
                "/update_weights_from_distributed",
                names=[name for name, _ in part],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                shapes=[list(tensor.shape) for _, tensor in part],
                group_name=self._name,
                load_format="flattened_bucket",
                flush_cache=False,
            )
            try:
                self._broadcast(flat, ask)
            except TransferError:
                self.reset()
                raise

    def _broadcast(self, flat: torch.Tensor, ask: _Call) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([flat], options)
        try:
            while not work.is_completed() and not ask.failed(wait=0.01):
                pass
            if work.is_completed():
                work.wait()
        except RuntimeError as error:  # gloo's and NCCL's only kind
            raise TransferError(f"broadcast to {self._control.url}: {error}") from error
        ask.result()

    def close(self, directory: Path) -> None:
        self._control.post("/end_weight_update")

    def reset(self) -> None:
        self._group = None
        end_session(self._control)

    def end(self) -> None:
        if self._group is None:
            return
        with contextlib.suppress(TransferError):  # it may be gone already
            self._control.post("/destroy_weights_update_group", group_name=self._name)
        self._group = None

    def _join(self) -> None:
        host = urlparse(self._control.url).hostname or "127.0.0.1"
        address = address_towards(host)
        port = free_port(address)
        self._made += 1
        self._name = f"ppo-lightning-{port}-{self._made}"
        world = 1 + self._control.ranks
        ask = _Call(
            self._control,
            "/init_weights_update_group",
            master_address=address,
            master_port=port,
            rank_offset=1,
            world_size=world,
            group_name=self._name,
            backend=self._backend,
        )
        try:
            group = join_group(f"tcp://{address}:{port}", world, self._name, self._backend)
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"no group with {self._control.url}: {error}") from error
        ask.result()
        self._group = group


def join_group(address: str, world: int, name: str, backend: str) -> Any:
    """Rank 0 of a process group beside the default one. torch has no public way: `new_group` knows only
    ranks of the
    default group, to which a server does not belong. SGLang joins by the same function."""
    from torch.distributed.distributed_c10d import (
        Backend,
        GroupName,
        PrefixStore,
        _new_process_group_helper,
        rendezvous,
    )

    store, rank, world = next(rendezvous(address, 0, world, timeout=GROUP_TIMEOUT))
    store.set_timeout(GROUP_TIMEOUT)
    made, _ = _new_process_group_helper(
        world,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=GROUP_TIMEOUT,
    )
    return made


def end_session(control: Control) -> None:
    """End the session that a failed transfer left open; without one SGLang refuses, and that is well."""
    with contextlib.suppress(TransferError):
        control.post("/end_weight_update")


class DiskTransfer:
    def __init__(self, control: Control) -> None:
        self._control = control

    def open(self) -> None: ...

    def send(self, bucket: Bucket) -> None: ...

    def close(self, directory: Path) -> None:
        self._control.post("/update_weights_from_disk", model_path=str(directory), flush_cache=False)

    def reset(self) -> None: ...

    def end(self) -> None: ...


class _Call(threading.Thread):
    """A control call that runs while this process does its side of the same collective."""

    def __init__(self, control: Control, path: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self._control, self._path, self._body = control, path, body
        self._error: TransferError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._control.post(self._path, **self._body)
        except TransferError as error:
            self._error = error

    def failed(self, wait: float) -> bool:
        self.join(wait)
        return self._error is not None

    def result(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


def _by_dtype(bucket: Bucket) -> Iterable[Bucket]:
    parts: dict[torch.dtype, Bucket] = {}
    for name, tensor in bucket:
        parts.setdefault(tensor.dtype, []).append((name, tensor))
    return parts.values()


def make_transfer(mode: str, control: Control, cuda: bool) -> Transfer:
    if mode == "distributed":
        return DistributedTransfer(control, "nccl" if cuda else "gloo")
    return TensorTransfer(control) if mode == "tensor" else DiskTransfer(control)
