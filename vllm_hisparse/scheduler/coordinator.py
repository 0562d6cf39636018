"""The scheduler side: every request's residency, and one message a step.

Two kinds of calls arrive here. The managers report what vLLM allocates and frees (`adopt`, `grow`, `drop`);
what they ask before that is answered by `allocations.py`. The connector asks for the step's message (`plan`)
and passes on the workers' answers (`acknowledge`). `pressure.py` decides which pages leave and return,
`leases.py` knows what that means for the pools, `outbox.py` what the workers have to be told of it.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.messages import Acknowledgement, StepMessage
from vllm_hisparse.planning.layout import Layout

from .admission import Admission
from .allocations import Allocations
from .host_pool import HostPool
from .integrity import check
from .landing import Imports
from .leases import PageLeases
from .managers import ResidentManager, SourceManager
from .outbox import Outbox
from .pressure import Pressure
from .reclaim import Reclaimer
from .records import Record
from .refusal import Refusal
from .regions import RegionLeases
from .residency import PageState, PageTable
from .transfers import Transfer, TransferLedger

__all__ = ["HiSparseCoordinator"]


class HiSparseCoordinator:
    """Owns residency for one engine. Not thread-safe: vLLM's scheduler is its only caller."""

    def __init__(
        self,
        managers: Sequence[SingleTypeKVCacheManager],
        layout: Layout,
        config: HiSparseConfig,
        *,
        num_ranks: int,
        num_reprefillable: int,
        max_step_tokens: int,
    ) -> None:
        (self.source,) = (m for m in managers if isinstance(m, SourceManager))
        self.resident = [m for m in managers if isinstance(m, ResidentManager)]
        self.on_device = [m for m in managers if m is not self.source]
        self.pool = self.resident[0].block_pool
        self.layout = layout
        self.has_company = False  # other connectors have joined, which may have prefixes, too
        self.config = config
        group_ids = [m.kv_cache_group_id for m in self.resident]
        self.host_pool = HostPool(layout.num_host_blocks, self.pool, self.source.kv_cache_group_id, group_ids)
        self.leases = PageLeases(self.source, self.resident, self.host_pool, config.prefix_share)
        self.regions = RegionLeases(self.pool, layout)
        self.ledger = TransferLedger(num_ranks)
        self.transfer = self.ledger.open(self.host_pool.epoch)  # what this step's message will ask for
        self.requests: dict[str, Request] = {}
        self.records: dict[str, Record] = {}
        self.num_reprefillable = num_reprefillable
        self._max_step_tokens = max_step_tokens
        self.num_waits = 0  # since start: requests told to wait for copies rather than preempt
        self.num_passed = 0  # since start: requests admitted before earlier ones, see `queueing.py`
        self.num_published = 0  # since start: pages that lookups found from then on, on either tier
        self.outbox = Outbox(layout.max_requests, self.leases)
        # For a step with drafts vLLM reserves blocks in every group; the source and indexer groups are two.
        has_drafts = config.verify_rows > 1
        self.num_reserved = (2 + layout.num_parts) * layout.tail_pages if has_drafts else 0
        self.admission = Admission(layout, self.host_pool, max_step_tokens, self.num_reserved)
        self.host_pool.num_admissible = self.admission.num_admissible
        self.allocations = Allocations(self, self.admission)
        self.reclaimer = Reclaimer(self)
        self.refusal = Refusal(self)
        self.pressure = Pressure(self)
        self.imports = Imports(self)
        self.source.bind(self, self.host_pool)
        for part, manager in enumerate(self.resident):
            manager.bind(self, part)
        self.host_pool.on_reset(self._release_for_reset)

    # ---- what vLLM's managers ask; how many blocks a request takes is `allocations.py`

    def make_room(self, request_id: str, num_tokens: int, num_landing: int = 0) -> None:
        """See `Allocations.make_room`."""
        self.allocations.make_room(self._record(request_id), num_tokens, num_landing)

    # ---- what vLLM's managers report

    def adopt(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """The request starts on a prefix hit."""
        record, hit = self._record(request_id), self.allocations.hit
        assert hit.num_pages == len(blocks), "another hit is adopted than was asked about"
        self.leases.adopt(record, hit)
        self.pressure.note_adoption(record)
        self._note_growth(record)

    def grow(self, request_id: str, num_pages: int) -> None:
        """The request got blocks for `num_pages` more pages."""
        record = self._record(request_id)
        for _ in range(num_pages):
            record.pages.append(PageState.DIRTY)
        self._note_growth(record)

    def arrived(self, request_id: str, first: int, end: int) -> list[bool] | None:
        """Which of the request's pages [first, end) a lookup may find on the device; None if all of them."""
        record = self.records.get(request_id)
        if record is None or not record.pages.count(PageState.RESTORING):
            return None
        return [record.pages[page] is not PageState.RESTORING for page in range(first, end)]

    def land(self, request_id: str, num_local_tokens: int, num_tokens: int) -> None:
        """vLLM admits the request's import of tokens `num_local_tokens` to `num_tokens`."""
        self.imports.land(self._record(request_id), num_local_tokens, num_tokens)

    def lend(self, request_id: str) -> Record:
        """The request has ended, and another engine reads its pages until vLLM frees them.

        What decoding needs of it goes back at once, and device leases of pages that the host has.
        """
        record = self.records[request_id]
        record.is_lent = True
        self._release_decoding(record)
        for page in record.pages.pages_in(PageState.CLEAN):
            self.leases.unpin(record, page)
        self.leases.counters.lent += len(record.pages)
        return record

    def drop(self, request_id: str) -> set[int]:
        """The request gives up its blocks (finish, abort, preemption).

        Returns pages whose host lease stays with a transfer in flight.
        """
        record = self.records.pop(request_id, None)
        if record is None:
            return set()
        kept = self.leases.give_up(record)
        record.alive = False
        self.imports.cancel(request_id)
        self._release_decoding(record)
        return kept

    def _release_decoding(self, record: Record) -> None:
        """The request decodes no more: its region, its slot and whatever pressure knows of it."""
        if record.region is not None:
            self.regions.release(self.regions.close(record.region))
            record.region = None
        self.outbox.release(record)
        self.pressure.forget(record)

    # ---- one step

    def plan(self, scheduler_output: SchedulerOutput) -> StepMessage:
        """The step's message. Called once every allocation of the step is done."""
        self._bind(scheduler_output)
        self.ledger.note_step()
        self.pressure.step(self._is_waited_for(scheduler_output))
        changes = self.outbox.take()
        transfer = self._submit()
        return StepMessage(
            unbind=changes.unbind,
            bind=changes.bind,
            wait=tuple(self.leases.take_reused()),
            regions=changes.regions,
            pages=changes.pages,
            transfer_id=-1 if transfer is None else transfer.transfer_id,
            spill=() if transfer is None else tuple(copy.message for copy in transfer.spills),
            restore=() if transfer is None else tuple(copy.message for copy in transfer.restores),
            sampling=changes.sampling,
        )

    def acknowledge(self, ack: Acknowledgement) -> None:
        """Apply the workers' answers: leases of enqueued copies may go back, finished pages are published.

        Raises RuntimeError, see `TransferLedger.acknowledge`; then nothing has changed.
        """
        enqueued, completed = self.ledger.acknowledge(ack)
        for slot, misses in ack.misses.items():
            if (record := self.outbox.by_slot.get(slot)) is not None:
                record.num_misses = misses
                self.pressure.regions.has_misses = True
        for slot, hot_pages in ack.heat.items():
            if (record := self.outbox.by_slot.get(slot)) is not None:
                record.hot_pages = hot_pages
        for transfer in enqueued:
            self.leases.enqueued(transfer)
            self._release_cuts(transfer)
        for transfer in completed:
            self.leases.completed(transfer)
        self.pressure.note_copies(enqueued, completed)
        if enqueued:
            self.pressure.relieve()

    def wait_for_copies(self) -> bool:
        """Whether blocks come free without a preemption: what is on its way, what the next message asks for.

        vLLM asks when a running request cannot be given blocks.
        """
        if self.ledger.is_overdue:
            return False  # nobody knows whether what it waits for will ever come
        waits = any(t.cuts for t in self.ledger) or self.pressure.note_shortage()
        self.num_waits += waits
        return waits

    # ---- hot regions

    def grant_region(self, record: Record) -> None:
        """Lease a hot region for the request."""
        assert record.region is None
        record.region = self.regions.lease()
        self.outbox.write_region(record)
        self.pressure.note_region(record)

    def grow_region(self, record: Record, num_blocks: int) -> None:
        """Give the request's region `num_blocks` more blocks of every part."""
        assert record.region is not None
        self.regions.grow(record.region, num_blocks)
        self.outbox.write_region(record)

    def shrink_region(self, record: Record, num_blocks: int) -> None:
        """Take the last `num_blocks` blocks of every part from the region.

        They go back once every rank has acknowledged that their slots are dead.
        """
        assert record.region is not None
        self.transfer.cuts.append(self.regions.shrink(record.region, num_blocks))
        self.outbox.write_region(record)

    def return_region(self, record: Record) -> None:
        """Take the request's region away, as `shrink_region` takes a part of it."""
        assert record.region is not None and not record.needs_region
        self.transfer.cuts.append(self.regions.close(record.region))
        record.region = None
        self.outbox.write_region(record)

    # ---- bookkeeping

    def _record(self, request_id: str) -> Record:
        record = self.records.get(request_id)
        if record is None:
            record = self.records[request_id] = Record(
                self.requests[request_id], PageTable(request_id), self.layout.page_tokens
            )
        return record

    def _note_growth(self, record: Record) -> None:
        self.outbox.grown[record] = None
        self.pressure.note_growth(record)

    def _bind(self, scheduler_output: SchedulerOutput) -> None:
        """Give requests that start or resume in this step a request slot."""
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for request_id in (*(r.req_id for r in scheduler_output.scheduled_new_reqs), *resumed):
            record = self._record(request_id)
            if record.slot < 0:
                self.outbox.bind(record)
                if record.is_importing:
                    self.imports.scheduled(record)

    def _is_waited_for(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether a request waits for blocks: none was admitted, for want of neither slots nor tokens."""
        num_running = len(self.outbox.by_slot)
        if (
            len(self.requests) == num_running
            or not self.outbox.free_slots
            or scheduler_output.total_num_scheduled_tokens >= self._max_step_tokens
            or scheduler_output.scheduled_new_reqs
            or scheduler_output.scheduled_cached_reqs.resumed_req_ids
        ):
            return False
        loading = [
            r for r in self.records.values() if r.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        ]
        return len(self.requests) > num_running + len(loading)

    def _submit(self) -> Transfer | None:
        """The step's transfer, now pending; None if there is nothing to acknowledge."""
        transfer = self.transfer
        if transfer.is_empty:
            return None
        self.ledger.submit(transfer)
        self.transfer = self.ledger.open(self.host_pool.epoch)
        return transfer

    def _release_cuts(self, transfer: Transfer) -> None:
        for cut in transfer.cuts:
            self.regions.release(cut)
        transfer.cuts.clear()

    def _release_for_reset(self) -> list[KVCacheBlock]:
        """Before a reset: if no request is left, as it takes to succeed, regions on their way back are dead.

        Returns host blocks that copies still write to.
        """
        if not self.records:
            for transfer in self.ledger:
                self._release_cuts(transfer)
        return [c.host_block for t in self.ledger for c in t.spills if not c.record.alive]

    def check_integrity(self, **retained: Any) -> None:
        """See `integrity.check`."""
        check(self, **retained)
