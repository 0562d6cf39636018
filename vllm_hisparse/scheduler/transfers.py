"""Transfers in flight and their two acknowledgements.

A transfer is everything of one step's message that needs an answer: pages copied either way and hot regions
taken away. Each rank reports it twice. *Enqueued*: the copies are on the rank's stream, so stream order makes
the blocks they read safe to reuse. *Completed*: the copies are done. Either counts only when every rank has
reported it.

A rank that could not enqueue all copies of a transfer says so instead of enqueued. Then none of its pages
changes tier, on any rank; it still completes, when what the other ranks have enqueued has ended.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_hisparse.messages import Acknowledgement, Copy, Progress

from .records import Record
from .regions import Cut

__all__ = ["OVERDUE_S", "OVERDUE_STEPS", "PageCopy", "Transfer", "TransferLedger"]

OVERDUE_S = 10.0  # a step's copies take milliseconds
OVERDUE_STEPS = 64  # and so many steps, four times as many as after which a rank repeats a lost report

logger = init_logger("vllm.vllm_hisparse")


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
    first_step: int = 0  # in which it went out
    has_failed: bool = False  # on some rank

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to acknowledge."""
        return not (self.spills or self.restores or self.cuts)


class TransferLedger:
    """Keeps every rank's progress and tells when a phase is reached on all of them."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [Progress()] * num_ranks
        self._next_id = 0
        self._num_steps = 0
        self._pending: dict[int, Transfer] = {}  # by id, ascending without gaps
        self._all = Progress()  # what every rank has reached
        self._latencies: dict[str, list[float]] = {"spill_seconds": [], "restore_seconds": []}
        self.is_overdue = False  # a rank has not completed its oldest transfer for an unreasonable time

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
        transfer.submitted, transfer.first_step = time.monotonic(), self._num_steps
        self._pending[transfer.transfer_id] = transfer

    def acknowledge(self, ack: Acknowledgement) -> tuple[list[Transfer], list[Transfer]]:
        """Take every rank's progress. Returns (transfers now enqueued on every rank, transfers now completed
        on every rank).

        A report that came before, or comes late, changes nothing. Raises RuntimeError, with rank, transfer
        and state, for one that cannot be true: then workers and scheduler disagree about what was written,
        and no page may be trusted.
        """
        for rank, reported in ack.progress.items():
            self._check(rank, reported)
        for rank, reported in ack.progress.items():
            for transfer_id in reported.failed:
                if (transfer := self._pending.get(transfer_id)) is not None:
                    transfer.has_failed = True
            self._ranks[rank] = self._ranks[rank].joined(reported)
        before, self._all = (
            self._all,
            Progress(min(r.enqueued for r in self._ranks), min(r.completed for r in self._ranks)),
        )
        enqueued = [self._pending[i] for i in range(before.enqueued + 1, self._all.enqueued + 1)]
        completed = [self._pending.pop(i) for i in range(before.completed + 1, self._all.completed + 1)]
        for transfer in completed:
            self.is_overdue = False
            seconds = time.monotonic() - transfer.submitted
            for key, copies in (("spill_seconds", transfer.spills), ("restore_seconds", transfer.restores)):
                if copies:
                    self._latencies[key].append(seconds)
        return enqueued, completed

    def note_step(self) -> None:
        """A step is planned. Logs an error when the oldest transfer becomes overdue; O(1)."""
        self._num_steps += 1
        if self.is_overdue or not self._pending:
            return
        oldest = next(iter(self._pending.values()))
        if self._num_steps - oldest.first_step < OVERDUE_STEPS:
            return
        seconds = time.monotonic() - oldest.submitted
        if seconds >= OVERDUE_S:
            self.is_overdue = True
            late = [n for n, r in enumerate(self._ranks) if r.completed < oldest.transfer_id]
            logger.error(
                "HiSparse: transfer %d (%d pages to the host, %d back) has not been completed by ranks %s "
                "for %.0f s; its pages and blocks stay leased, and requests are preempted instead of waiting",
                oldest.transfer_id,
                len(oldest.spills),
                len(oldest.restores),
                late,
                seconds,
            )

    def take_latencies(self) -> dict[str, list[float]]:
        """Seconds from planning to completion of transfers since the last call, by direction."""
        latencies, self._latencies = self._latencies, {key: [] for key in self._latencies}
        return latencies

    def _check(self, rank: int, reported: Progress) -> None:
        """Raise RuntimeError for a report that contradicts what went out or what the rank has said before."""
        if not 0 <= rank < len(self._ranks):
            raise RuntimeError(f"got an acknowledgement of rank {rank}; there are {len(self._ranks)} ranks")
        known, sent = self._ranks[rank], self._next_id - 1
        if reported.enqueued > sent:
            raise RuntimeError(
                f"rank {rank}: transfer {reported.enqueued} is enqueued, but the last one sent is {sent}"
            )
        if reported.completed > reported.enqueued:
            raise RuntimeError(
                f"rank {rank}: transfer {reported.completed} is completed, but {reported.enqueued} is the "
                "last one enqueued"
            )
        if any(t > reported.enqueued for t in reported.failed):
            raise RuntimeError(
                f"rank {rank}: transfers {reported.failed} have failed, but {reported.enqueued} is the "
                "last one tried"
            )
        both = min(known.enqueued, reported.enqueued)
        before, now = ([t for t in r.failed if t <= both] for r in (known, reported))
        if before != now:
            raise RuntimeError(
                f"rank {rank}: of the transfers up to {both}, {now} have failed, but it was {before} before"
            )
