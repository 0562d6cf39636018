"""The scheduler side: every request's page states, the leases behind them, and one message a step.

Three kinds of calls arrive here. The managers report what vLLM allocates and frees (`adopt`, `grow`, `drop`) and ask what
could be freed (`num_reclaimable`, `make_room`). The connector asks for the step's message (`plan`) and passes on the workers'
answers (`acknowledge`). `pressure.py` decides which pages leave and return; this module carries it out and keeps the leases.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from ..config import HiSparseConfig
from ..messages import Acknowledgement, Binding, Copy, PageWrite, RegionWrite, StepMessage
from ..planning.layout import Layout
from .host_pool import HostPool
from .managers import ResidentManager, SourceManager
from .pressure import Pressure
from .records import Record
from .regions import Region, RegionLeases
from .residency import STATES, Device, Event, Host, PageState, PageTable
from .transfers import PageCopy, Transfer, TransferLedger

__all__ = ["Counters", "HiSparseCoordinator"]


@dataclass
class Counters:
    """Totals since start, for metrics and tests."""

    spilled_pages: int = 0
    restored_pages: int = 0
    unpinned_pages: int = 0
    repinned_pages: int = 0
    lost_pages: int = 0  # pages whose device blocks were reused
    deduplicated_pages: int = 0  # pages found on the host already when they were to be copied
    host_hit_pages: int = 0  # pages of prefix hits that only the host had
    device_hit_pages: int = 0
    regions_granted: int = 0
    regions_returned: int = 0


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
        self.config = config
        self.host_pool = HostPool(layout.num_host_blocks, self.pool, [m.kv_cache_group_id for m in self.resident])
        self.regions = RegionLeases(
            self.pool,
            num_regions=layout.num_regions,
            num_rows=layout.start_hot_blocks * layout.page_tokens,
            num_parts=layout.num_parts,
            page_tokens=layout.page_tokens,
        )
        self.ledger = TransferLedger(num_ranks)
        self.pressure = Pressure(self, max_step_tokens)
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        self.records: dict[str, Record] = {}
        self.num_reprefillable = num_reprefillable
        self._free_slots = list(range(layout.max_requests - 1, -1, -1))
        self._loose: dict[int, set[tuple[str, int]]] = {}  # loose device block -> pages that still read it
        self._copying: dict[int, int] = {}  # device block -> pending transfer that reads or writes it
        self._grown: dict[str, None] = {}  # bound or not, with pages the workers do not know
        self._changed: dict[tuple[str, int], None] = {}  # pages whose table entries changed
        self._unbound: list[str] = []
        self._wait: dict[int, None] = {}
        self._region_writes: dict[int, RegionWrite] = {}  # by slot; the last one of a step counts
        self._hit_blocks: frozenset[int] = frozenset()  # of the query in progress: must not count as reclaimable
        self.source.bind(self, self.host_pool)
        for part, manager in enumerate(self.resident):
            manager.bind(self, part)
        self.host_pool.on_reset(self._release_for_reset)
        self.transfer: Transfer = self.ledger.open(self.host_pool.epoch)

    # ---- what vLLM's managers ask

    def num_blocks_for_hit(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Device blocks that adopting a prefix hit takes out of the free queue. A pure query."""
        on_device = [b for page in blocks for b in self._device_hit(page)]
        self._hit_blocks = frozenset(b.block_id for b in on_device)
        num = sum(b.ref_cnt == 0 for b in on_device)
        if any(b.pool is self.host_pool for b in blocks):
            num += self.regions.num_blocks if self.regions.num_free_ids else self.pool.num_gpu_blocks
        return num

    def cap_admission(self, num_pages: int) -> int:
        """Pages a request must find room for to be admitted: not all of them, if the host can take the rest."""
        cap = self.pressure.admission_pages
        if num_pages <= cap or num_pages - cap > self.host_pool.get_num_free_blocks():
            return num_pages
        return cap

    def num_reclaimable(self, num_pages: int) -> int:
        """Device blocks that could be freed at once, as far as `num_pages` new pages need them. A pure query."""
        upper_bound = num_pages * (self.layout.num_parts + len(self.on_device)) + len(self._hit_blocks)
        missing = upper_bound + self.regions.num_blocks - self.pool.get_num_free_blocks()
        return self.pressure.num_reclaimable(missing, self._hit_blocks) if missing > 0 else 0

    def make_room(self, request_id: str, num_tokens: int) -> None:
        """Free what the groups are about to allocate, and lease the region of a request that starts on host-only pages."""
        need = 0
        for manager in self.on_device:
            have = len(manager.req_to_blocks.get(request_id, ()))
            need += max(-(-num_tokens // manager.block_size) - have, 0)
        record = self._record(request_id)
        wants_region = record.region is None and record.needs_region
        self.pressure.reclaim(need + (self.regions.num_blocks if wants_region else 0))
        if wants_region:
            self.grant_region(record)

    # ---- what vLLM's managers report

    def adopt(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Lease the pages of a prefix hit, on whichever tier each of them is."""
        record = self._record(request_id)
        rows: list[list[KVCacheBlock]] = [[] for _ in self.resident]
        for page, block in enumerate(blocks):
            on_device = self._device_hit(block)
            host = block if block.pool is self.host_pool else self._published(block)
            if host is not None:
                self.host_pool.touch([host])
                self.source.hold(request_id, page, host)
            self.pool.touch(on_device)
            for row, b in zip(rows, on_device or [self.pool.null_block] * len(rows), strict=True):
                row.append(b)
            state = PageState.HOST if not on_device else PageState.CLEAN if host else PageState.DIRTY
            record.pages.append(state)
            self.counters.host_hit_pages += not on_device
            self.counters.device_hit_pages += bool(on_device)
        for manager, row in zip(self.resident, rows, strict=True):
            manager.set_prefix(request_id, row)
        self._grown[request_id] = None
        self.pressure.note_growth(record)

    def grow(self, request_id: str, num_pages: int) -> None:
        """The request got blocks for `num_pages` more pages."""
        record = self._record(request_id)
        for _ in range(num_pages):
            record.pages.append(PageState.DIRTY)
        self._grown[request_id] = None
        self.pressure.note_growth(record)

    def drop(self, request_id: str) -> set[int]:
        """The request gives up its blocks (finish, abort, preemption). Returns pages whose host lease a transfer keeps.

        Device leases that went back already leave the managers' rows here. Blocks that a copy still reads or writes are
        unpinned instead of freed, so that their reuse is noticed and ordered after the copy.
        """
        record = self.records.pop(request_id, None)
        if record is None:
            return set()
        record.alive = False
        kept = set()
        for page in range(len(record.pages)):
            device, host, _ = STATES[record.pages[page]]
            if host is Host.PENDING:
                kept.add(page)
            if device is Device.LOOSE:
                self._disown(record, page)
                self._clear_row(record, page)
            elif device is Device.ARRIVING or (device is Device.LEASED and host is Host.PENDING):
                self.pool.unpin_blocks(self.device_blocks(record, page), self._on_reuse)
                self._clear_row(record, page)
        if record.region is not None:
            self.regions.release(record.region)
        if record.slot >= 0:
            self._free_slots.append(record.slot)
            self._region_writes.pop(record.slot, None)
            self._unbound.append(request_id)
        self._grown.pop(request_id, None)
        self.pressure.forget(record)
        return kept

    # ---- one step

    def plan(self, scheduler_output: SchedulerOutput) -> StepMessage:
        """The step's message. Called once every allocation of the step is done."""
        bound = self._bind(scheduler_output)
        self.pressure.step()
        changed = [key for key in self._changed if key[0] in self.records]
        pages = [self._page_write(self.records[rid], page) for rid, page in changed if self.records[rid].slot >= 0]
        for request_id in list(self._grown):
            record = self.records[request_id]
            if record.slot >= 0:
                pages += [self._page_write(record, page) for page in range(record.num_sent, len(record.pages))]
                record.num_sent = len(record.pages)
                del self._grown[request_id]
        message = StepMessage(
            unbind=tuple(self._unbound),
            bind=bound,
            wait=tuple(t for t in self._wait if t in self.ledger),
            regions=tuple(self._region_writes.values()),
            pages=tuple(pages),
            **self._submit(),
        )
        self._unbound.clear()
        self._wait.clear()
        self._changed.clear()
        self._region_writes.clear()
        return message

    def acknowledge(self, ack: Acknowledgement) -> None:
        """Apply the workers' answers: enqueued copies make leases returnable, completed ones publish pages."""
        enqueued, completed = self.ledger.acknowledge(ack)
        for transfer in enqueued:
            for copy in transfer.spills:
                if copy.record.alive:
                    copy.record.pages.advance(copy.page, Event.ENQUEUED)
            for region in transfer.regions:
                self.regions.release(region)
            transfer.regions.clear()
        for transfer in completed:
            self._complete(transfer)
        if enqueued:
            self.pressure.relieve()

    @property
    def will_free_blocks(self) -> bool:
        """Whether leases can go back as soon as copies in flight are acknowledged as enqueued."""
        return any(r.pages.count(PageState.SPILLING) for r in self.records.values())

    # ---- what pressure.py does to pages

    def spill(self, record: Record, page: int) -> bool:
        """Copy a dirty page to the host with this step's message. False if no host block is to be had, or it is being copied."""
        blocks = self.device_blocks(record, page)
        if (published := self._published(blocks[0])) is not None:
            self.host_pool.touch([published])
            self.source.hold(record.request_id, page, published)
            record.pages.advance(page, Event.DEDUPLICATE)
            self.counters.deduplicated_pages += 1
            return True
        if self.host_pool.get_num_free_blocks() == 0 or any(b.block_id in self._copying for b in blocks):
            return False
        (host,) = self.host_pool.get_new_blocks(1)
        self.source.hold(record.request_id, page, host)
        record.pages.advance(page, Event.SPILL)
        self.transfer.spills.append(PageCopy(record, page, blocks, host))
        self._copying.update((b.block_id, self.transfer.transfer_id) for b in blocks)
        self.counters.spilled_pages += 1
        return True

    def unpin(self, record: Record, page: int) -> None:
        """Give a page's device lease back; its rows stay readable until the pool reuses one of its blocks."""
        blocks = self.device_blocks(record, page)
        record.pages.advance(page, Event.UNPIN)
        for block in blocks:
            self._loose.setdefault(block.block_id, set()).add((record.request_id, page))
        self.pool.unpin_blocks(blocks, self._on_reuse)
        self.counters.unpinned_pages += 1

    def repin(self, record: Record, page: int) -> None:
        """Take the lease on a loose page again."""
        self._disown(record, page)
        self.pool.touch(self.device_blocks(record, page))
        record.pages.advance(page, Event.REPIN)
        self.counters.repinned_pages += 1

    def restore(self, record: Record, page: int) -> None:
        """Lease device blocks for a host-only page and copy it back with this step's message."""
        blocks = tuple(self.pool.get_new_blocks(self.layout.num_parts))
        for manager, block in zip(self.resident, blocks, strict=True):
            manager.req_to_blocks[record.request_id][page] = block
        record.pages.advance(page, Event.RESTORE)
        host = self.source.host_block(record.request_id, page)
        self.transfer.restores.append(PageCopy(record, page, blocks, host))
        self._copying.update((b.block_id, self.transfer.transfer_id) for b in blocks)

    def grant_region(self, record: Record) -> None:
        """Lease a hot region for the request."""
        assert record.region is None
        record.region = self.regions.lease()
        self.counters.regions_granted += 1
        if record.slot >= 0:
            self._write_region(record)
        self.pressure.note_region(record)

    def return_region(self, record: Record) -> None:
        """Take the request's region away. Its blocks go back once every rank has acknowledged that its slots are dead."""
        assert record.region is not None and not record.needs_region
        self.transfer.regions.append(record.region)
        record.region = None
        self.counters.regions_returned += 1
        self._write_region(record)

    def device_blocks(self, record: Record, page: int) -> tuple[KVCacheBlock, ...]:
        """The page's device blocks, one a part."""
        return tuple(m.req_to_blocks[record.request_id][page] for m in self.resident)

    # ---- bookkeeping

    def _record(self, request_id: str) -> Record:
        record = self.records.get(request_id)
        if record is None:
            record = self.records[request_id] = Record(self.requests[request_id], PageTable(request_id))
        return record

    def _device_hit(self, block: KVCacheBlock) -> list[KVCacheBlock]:
        """All parts' blocks of a hit that the device has, else nothing."""
        if block.pool is self.host_pool:
            return []
        assert block.block_hash is not None
        found = self.host_pool.device_blocks(get_block_hash(block.block_hash))
        assert found is not None, "a device hit has a block in every part"
        return found

    def _published(self, block: KVCacheBlock) -> KVCacheBlock | None:
        """The host block published under a device block's hash."""
        if block.block_hash is None:
            return None
        return self.host_pool.host_block(get_block_hash(block.block_hash), self.source.kv_cache_group_id)

    def _bind(self, scheduler_output: SchedulerOutput) -> tuple[Binding, ...]:
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        starting = [*(r.req_id for r in scheduler_output.scheduled_new_reqs), *resumed]
        bound = []
        for request_id in starting:
            record = self._record(request_id)
            if record.slot < 0:
                record.slot = self._free_slots.pop()
                bound.append(Binding(request_id, record.slot))
                self._grown[request_id] = None
                if record.region is not None:
                    self._write_region(record)
        return tuple(bound)

    def _page_write(self, record: Record, page: int) -> PageWrite:
        device, host, _ = STATES[record.pages[page]]
        if device in (Device.LEASED, Device.LOOSE):
            blocks = tuple(b.block_id for b in self.device_blocks(record, page))
            return PageWrite(record.slot, page, blocks, -1)
        assert host is not Host.NONE
        host_block = self.source.host_block(record.request_id, page)
        return PageWrite(record.slot, page, (-1,) * self.layout.num_parts, host_block.block_id)

    def _write_region(self, record: Record) -> None:
        region = record.region
        self._region_writes[record.slot] = (
            RegionWrite(record.slot, -1, 0, ())
            if region is None
            else RegionWrite(record.slot, region.region_id, region.num_rows, region.block_ids)
        )

    def _submit(self) -> dict[str, int | tuple[Copy, ...]]:
        transfer = self.transfer
        if transfer.is_empty:
            return {}
        self.ledger.submit(transfer)
        self.transfer = self.ledger.open(self.host_pool.epoch)
        return {
            "transfer_id": transfer.transfer_id,
            "spill": _copies(transfer.spills),
            "restore": _copies(transfer.restores),
        }

    def _complete(self, transfer: Transfer) -> None:
        for copy in (*transfer.spills, *transfer.restores):
            for block in copy.device_blocks:
                if self._copying.get(block.block_id) == transfer.transfer_id:
                    del self._copying[block.block_id]
        for copy in transfer.spills:
            if transfer.epoch == self.host_pool.epoch:
                self.source.publish(copy.record.request, copy.page, copy.host_block)
            if copy.record.alive:
                copy.record.pages.advance(copy.page, Event.COMPLETED)
            else:
                self.host_pool.free_blocks([copy.host_block])
        for copy in transfer.restores:
            if copy.record.alive:
                copy.record.pages.advance(copy.page, Event.COMPLETED)
                self._changed[copy.record.request_id, copy.page] = None
                self.counters.restored_pages += 1

    def _on_reuse(self, block: KVCacheBlock) -> None:
        """The pool hands `block` out again (or was reset). Pages that still read it are on the host from now on."""
        if (transfer_id := self._copying.get(block.block_id)) is not None:
            self._wait[transfer_id] = None
        for request_id, page in list(self._loose.get(block.block_id, ())):
            record = self.records[request_id]
            self._disown(record, page)
            self._clear_row(record, page)
            record.pages.advance(page, Event.REUSED)
            self._changed[request_id, page] = None
            self.counters.lost_pages += 1

    def _disown(self, record: Record, page: int) -> None:
        for block in self.device_blocks(record, page):
            owners = self._loose[block.block_id]
            owners.remove((record.request_id, page))
            if not owners:
                del self._loose[block.block_id]

    def _clear_row(self, record: Record, page: int) -> None:
        for manager in self.resident:
            manager.req_to_blocks[record.request_id][page] = self.pool.null_block

    def _release_for_reset(self) -> list[KVCacheBlock]:
        """Before a reset: no request is left, so regions on their way back are dead; returns host blocks copies still write."""
        for transfer in self.ledger:
            for region in transfer.regions:
                self.regions.release(region)
            transfer.regions.clear()
        pending: Iterable[Transfer] = (*self.ledger, self.transfer)
        return [c.host_block for t in pending for c in t.spills if not c.record.alive]

    def check_integrity(self) -> None:
        """Every lease balances: slots, regions, device and host blocks, loose pages. Raises AssertionError. O(all pages)."""
        from .integrity import check

        check(self)


def _copies(copies: list[PageCopy]) -> tuple[Copy, ...]:
    return tuple(Copy(tuple(b.block_id for b in c.device_blocks), c.host_block.block_id) for c in copies)
