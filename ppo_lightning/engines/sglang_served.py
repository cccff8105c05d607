"""One server as its keeper sees it: its process, if it is an own one, and the way weights take to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppo_lightning.engines.sglang_checksums import Layout, differing
from ppo_lightning.engines.sglang_control import Control, TransferError
from ppo_lightning.engines.transfer import Transfer
from ppo_lightning.engines.weight_store import WeightStore, buckets

if TYPE_CHECKING:
    from ppo_lightning.engines.sglang_server import ServerProcess

INCOMPLETE = "-incomplete"  # ends the version of a server that has not yet got all weights


@dataclass(eq=False)
class Served:
    """An update is `begin`, `transfer.send` for each bucket, `finish`; all raise TransferError. `process`
    is None for a server that somebody else runs; `layout` None leaves out the comparison of checksums."""

    process: ServerProcess | None
    control: Control
    transfer: Transfer
    store: WeightStore
    layout: Layout | None

    @property
    def url(self) -> str:
        return self.control.url

    @property
    def dead(self) -> bool:
        return self.process is not None and not self.process.alive()

    def check_ranks(self) -> None:
        """The group through which a server takes weights is made for as many ranks as we count."""
        size = self.control.get("/server_info").get("tp_size")
        if size not in (None, self.control.ranks):
            raise TransferError(
                f"the server at {self.url} has {size} tensor parallel ranks, the configuration says"
                f" {self.control.ranks}: give --rollout-num-gpus-per-engine {size}"
            )

    def begin(self, version: int) -> None:
        """From here to the end of `finish` the server answers under a version that no trainer takes, and so
        it does after a failure."""
        self._label(f"{version}{INCOMPLETE}")
        self.transfer.open()

    def finish(self, version: int) -> None:
        """All buckets are sent and lie in the store: serve them, with an empty cache."""
        self.transfer.close(self.store.path(version))
        self.control.post("/flush_cache")
        if self.layout is not None:
            self._compare(version, self.layout)
        self._label(str(version))

    def replay(self, version: int, bucket_size: int) -> None:
        """Send a version of the store again, whatever an attempt before left behind. What the server is
        writing meanwhile is of no use, and would keep it from emptying its cache: it is ended, and further
        requests wait."""
        self.transfer.reset()
        self.control.post("/pause_generation", mode="abort")
        try:
            self.begin(version)
            for bucket in buckets(self.store.tensors(version), bucket_size):
                self.transfer.send(bucket)
            self.finish(version)
        finally:
            self.control.post("/continue_generation")

    def _label(self, version: str) -> None:
        self.control.post("/update_weight_version", new_version=version, abort_all_requests=False)

    def _compare(self, version: int, layout: Layout) -> None:
        ranks = self.control.post("/weights_checker", action="checksum")["ranks"]
        wrong = differing(ranks, self.store.getter(version), layout)
        if wrong:
            raise TransferError(f"{self.url} holds other weights than the trainer: {', '.join(wrong[:5])}")
