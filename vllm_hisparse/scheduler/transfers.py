"""Transfers in flight and their two acknowledgements.

A transfer is everything of one step's message that needs an answer: pages copied either way and hot regions
taken away. Each rank reports it twice. *Enqueued*: the copies are on the rank's stream, so stream order makes
the blocks they read safe to reuse. *Completed*: the copies are done. Either counts only when every rank has
reported it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_hisparse.messages import Acknowledgement, Copy

from .records import Record
from .regions import Cut

__all__ = ["PageCopy", "Transfer", "TransferLedger"]


@dataclass(frozen=True)
class PageCopy:
    """A page on its way.

    The transfer holds the host lease if the record is dropped before the copy completes.
    """

    record: Record
    page: int
    device_blocks: tuple[KVCacheBlock, ...]  # one a part
    host_block: KVCacheBlock

    @property
    def message(self) -> Copy:
        """What the workers need of it."""
        return Copy(tuple(b.block_id for b in self.device_blocks), self.host_block.block_id)


@dataclass
class Transfer:
    """What one message's acknowledgements are about."""

    transfer_id: int
    epoch: int  # of the host pool, when it was planned
    spills: list[PageCopy] = field(default_factory=list)
    restores: list[PageCopy] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    submitted: float = 0.0  # time.monotonic() at which it went out
    num_enqueued: int = 0  # ranks
    num_completed: int = 0  # ranks

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to acknowledge."""
        return not (self.spills or self.restores or self.cuts)


class TransferLedger:
    """Counts acknowledgements and tells when a phase is reached on every rank."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._next_id = 0
        self._pending: dict[int, Transfer] = {}
        self._latencies: dict[str, list[float]] = {"spill_seconds": [], "restore_seconds": []}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._pending.values())

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._pending

    def open(self, epoch: int) -> Transfer:
        """A new transfer, pending only once it is `submit`ted."""
        return Transfer(self._next_id, epoch)

    def submit(self, transfer: Transfer) -> None:
        """The transfer goes out with this step's message."""
        assert transfer.transfer_id == self._next_id and not transfer.is_empty
        self._next_id += 1
        transfer.submitted = time.monotonic()
        self._pending[transfer.transfer_id] = transfer

    def acknowledge(self, ack: Acknowledgement) -> tuple[list[Transfer], list[Transfer]]:
        """Count `ack`. Returns (transfers now enqueued on every rank, transfers now completed on every rank).

        Raises RuntimeError for a transfer that is not pending or a count above the number of ranks: then
        workers and scheduler disagree about what was written, and no page may be trusted.
        """
        enqueued = [
            t for i, n in ack.enqueued.items() if (t := self._reached(i, "num_enqueued", n)) is not None
        ]
        completed = [
            t for i, n in ack.completed.items() if (t := self._reached(i, "num_completed", n)) is not None
        ]
        for transfer in completed:
            del self._pending[transfer.transfer_id]
            seconds = time.monotonic() - transfer.submitted
            for key, copies in (("spill_seconds", transfer.spills), ("restore_seconds", transfer.restores)):
                if copies:
                    self._latencies[key].append(seconds)
        return enqueued, completed

    def take_latencies(self) -> dict[str, list[float]]:
        """Seconds from planning to completion of transfers since the last call, by direction."""
        latencies, self._latencies = self._latencies, {key: [] for key in self._latencies}
        return latencies

    def _reached(self, transfer_id: int, phase: str, num_ranks: int) -> Transfer | None:
        transfer = self._pending.get(transfer_id)
        if transfer is None:
            raise RuntimeError(f"acknowledgement {phase} of transfer {transfer_id}, which is not pending")
        count = getattr(transfer, phase) + num_ranks
        if count > self._num_ranks:
            raise RuntimeError(
                f"transfer {transfer_id}: {phase} is {count}, but there are {self._num_ranks} ranks"
            )
        setattr(transfer, phase, count)
        return transfer if count == self._num_ranks else None
