"""Leases of pages on both tiers: what may be done to a page, and what the pools must know of it.

Every method that changes a page advances its state (`residency.py`) and moves the leases behind it in the
same call, so that the two cannot disagree. Which pages, and when, is `pressure.py`'s business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash

from vllm_hisparse.messages import PageWrite

from .admission import Hit
from .extents import Extents
from .host_pool import HostPool
from .managers import ResidentManager, SourceManager
from .records import Record
from .residency import STATES, Device, Event, Host, PageState
from .reuse import ReuseOrder
from .transfers import PageCopy, Transfer

__all__ = ["PageCounters", "PageLeases"]


@dataclass
class PageCounters:
    """Pages since start, for metrics and tests."""

    spilled: int = 0  # copies to the host that were planned
    restored: int = 0  # copies to the device that completed
    unpinned: int = 0  # device leases given back
    repinned: int = 0
    evicted: int = 0  # leases given back with the page's device copy, by the option `always_host`
    lost: int = 0  # pages whose device blocks were reused
    failed: int = 0  # copies, in either direction, that some rank could not make
    deduplicated: int = 0  # pages found on the other tier when they were to be copied there
    host_hits: int = 0  # pages of prefix hits that only the host had
    device_hits: int = 0
    imported: int = 0  # pages that came from another engine, to either tier
    lent: int = 0  # pages of ended requests that another engine was offered


class PageLeases:
    """Leases of all requests' pages.

    The rows themselves, page to block, are the managers' `req_to_blocks`.
    """

    def __init__(
        self,
        source: SourceManager,
        resident: Sequence[ResidentManager],
        host_pool: HostPool,
        prefix_share: float,
    ) -> None:
        self._source = source
        self._resident = resident
        self._host_pool = host_pool
        self._pool = resident[0].block_pool
        self._num_parts = len(resident)
        self._rows = [m.req_to_blocks for m in resident]
        self.extents = Extents(host_pool)
        self.order = ReuseOrder(self._pool, prefix_share)
        self.counters = PageCounters()
        self._loose: dict[
            int, dict[tuple[Record, int], None]
        ] = {}  # loose device block -> pages still read from it
        self._copying: dict[int, int] = {}  # device block -> transfer in flight that reads or writes it
        self._changed: dict[tuple[Record, int], None] = {}  # pages whose table entries changed
        self._reused: dict[int, None] = {}  # transfers in flight whose device blocks are in use again

    # ---- lookups

    def device_blocks(self, record: Record, page: int) -> tuple[KVCacheBlock, ...]:
        """The page's device blocks, one a part; null blocks where the device copy is gone."""
        request_id = record.request.request_id
        return tuple([rows[request_id][page] for rows in self._rows])

    def entries(self, record: Record, first: int, end: int) -> list[PageWrite]:
        """Table entries of the pages [first, end), as their states demand."""
        request_id, slot, nowhere = record.request_id, record.slot, (-1,) * self._num_parts
        rows = [[block.block_id for block in rows[request_id][first:end]] for rows in self._rows]
        pages = zip(record.pages.on_device(first, end), zip(*rows, strict=True), strict=True)
        writes = []
        for page, (is_on_device, blocks) in enumerate(pages, first):
            if is_on_device:
                writes.append(PageWrite(slot, page, blocks, -1))
                continue
            host_block = self._source.host_block(request_id, page)
            assert not host_block.is_null
            writes.append(PageWrite(slot, page, nowhere, host_block.block_id))
        return writes

    # ---- a page's life

    def adopt(self, record: Record, hit: Hit) -> None:
        """Lease the pages of a prefix hit, on whichever tier each of them is."""
        on_device, on_host = hit.on_device, hit.on_host
        self._host_pool.touch([block for block in on_host if block is not None])
        self._source.set_prefix(record.request_id, on_host)
        self._pool.touch([block for page in on_device for block in page])
        nowhere = [self._pool.null_block] * self._num_parts
        rows = zip(*[page or nowhere for page in on_device], strict=True)
        for manager, row in zip(self._resident, rows, strict=True):
            manager.set_prefix(record.request_id, list(row))
        record.pages.extend(
            PageState.HOST if not page else PageState.CLEAN if host else PageState.DIRTY
            for page, host in zip(on_device, on_host, strict=True)
        )
        num_host_hits = on_device.count([])
        self.counters.device_hits += hit.num_pages - num_host_hits
        self.counters.host_hits += num_host_hits

    def spill(self, record: Record, page: int, transfer: Transfer) -> bool:
        """Copy a dirty page to the host with `transfer`, unless another request has published it there
        already.

        False, and nothing has changed, if no host block is free or the page's blocks are being copied.
        """
        blocks = self.device_blocks(record, page)
        if (published := self._host_pool.published(blocks[0])) is not None:
            self._host_pool.touch([published])
            self._source.hold(record.request_id, page, published)
            record.pages.advance(page, Event.DEDUPLICATE)
            self.counters.deduplicated += 1
            return True
        block_ids = [b.block_id for b in blocks]
        if self._host_pool.get_num_free_blocks() == 0 or not self._copying.keys().isdisjoint(block_ids):
            return False
        host = self.take_host_block(record, page)
        record.pages.advance(page, Event.SPILL)
        transfer.spills.append(PageCopy(record, page, blocks, host))
        self._copying.update(dict.fromkeys(block_ids, transfer.transfer_id))
        self.counters.spilled += 1
        return True

    def take_host_block(self, record: Record, page: int) -> KVCacheBlock:
        """Lease a host block for a page that has none. The caller has checked the pool."""
        previous = self._source.host_block(record.request_id, page - 1)
        host = self.extents.take(record, previous, record.num_pages_left(page))
        self._source.hold(record.request_id, page, host)
        return host

    def unpin(self, record: Record, page: int) -> None:
        """Give a page's device lease back; its rows stay readable until the pool reuses one of its blocks."""
        blocks = self.device_blocks(record, page)
        record.pages.advance(page, Event.UNPIN)
        for block in blocks:
            self._loose.setdefault(block.block_id, {})[record, page] = None
        self.order.release(blocks, self._on_reuse)
        self.counters.unpinned += 1

    def evict(self, record: Record, page: int) -> None:
        """Give a page's device lease back and read it from the host from now on."""
        blocks = self.device_blocks(record, page)
        record.pages.advance(page, Event.EVICT)
        self._clear(record, page)
        self._pool.free_blocks(blocks)
        self._changed[record, page] = None
        self.counters.evicted += 1

    def repin(self, record: Record, page: int) -> None:
        """Take the lease on a loose page again."""
        self._disown(record, page)
        self._pool.touch(self.device_blocks(record, page))
        record.pages.advance(page, Event.REPIN)
        self.counters.repinned += 1

    def rejoin(self, record: Record, page: int) -> bool:
        """Lease the device blocks of a host-only page that another request has published there.

        False, and nothing has changed, if there are none.
        """
        host = self._source.host_block(record.request_id, page)
        if host.block_hash is None or not self._resident[0].has_passed(record.request_id, page):
            return False  # vLLM would publish the blocks a second time, under this request
        found = self._host_pool.on_device.find(get_block_hash(host.block_hash))
        if found is None:
            return False
        self._pool.touch(found)
        self._place(record, page, found)
        record.pages.advance(page, Event.DEDUPLICATE)
        self._changed[record, page] = None
        self.counters.deduplicated += 1
        return True

    def restore(self, record: Record, page: int, transfer: Transfer) -> None:
        """Lease device blocks for a host-only page and copy it back with `transfer`.

        The caller has checked the pool.
        """
        blocks = tuple(self._pool.get_new_blocks(self._num_parts))
        self._place(record, page, blocks)
        record.pages.advance(page, Event.RESTORE)
        host = self._source.host_block(record.request_id, page)
        transfer.restores.append(PageCopy(record, page, blocks, host))
        self._copying.update((b.block_id, transfer.transfer_id) for b in blocks)

    def give_up(self, record: Record) -> set[int]:
        """The request gives up all its pages. Returns those whose host lease stays with a transfer in flight.

        Device leases that went back already leave the managers' rows here. Blocks that a copy still reads or
        writes are unpinned instead of freed, so that their reuse is noticed and ordered after the copy.
        """
        self.extents.forget(record)
        kept = set()
        for page in range(len(record.pages)):
            device, host, _ = STATES[record.pages[page]]
            if host is Host.PENDING:
                kept.add(page)
            if device is Device.LOOSE:
                self._disown(record, page)
                self._clear(record, page)
            elif device in (Device.ARRIVING, Device.LEASED) and host is not Host.NONE:
                self.order.release(self.device_blocks(record, page), self._on_reuse)
                self._clear(record, page)
        return kept

    # ---- acknowledgements

    def enqueued(self, transfer: Transfer) -> None:
        """Every rank has the copies on its stream: from now on the pages' leases may go back."""
        for copy in transfer.spills if not transfer.has_failed else ():
            if copy.record.alive:
                copy.record.pages.advance(copy.page, Event.ENQUEUED)

    def completed(self, transfer: Transfer) -> None:
        """Every rank has seen the copies end: host pages are valid and published, restored pages readable
        again. If some rank could not make them, pages are where they were.
        """
        for copy in (*transfer.spills, *transfer.restores):
            for block in copy.device_blocks:
                if self._copying.get(block.block_id) == transfer.transfer_id:
                    del self._copying[block.block_id]
        if transfer.has_failed:
            self._failed(transfer)
            return
        for copy in transfer.spills:
            if transfer.epoch == self._host_pool.epoch:
                self._source.publish(copy.record.request, copy.page, copy.host_block)
            if copy.record.alive:
                copy.record.pages.advance(copy.page, Event.COMPLETED)
            else:
                self._host_pool.free_blocks([copy.host_block])
        for copy in transfer.restores:
            if copy.record.alive:
                copy.record.pages.advance(copy.page, Event.COMPLETED)
                self._changed[copy.record, copy.page] = None
                self.counters.restored += 1
                for manager, block in zip(self._resident, copy.device_blocks, strict=True):
                    manager.publish(copy.record.request, copy.page, block)

    def _failed(self, transfer: Transfer) -> None:
        """Blocks that copies should have filled go back; whose request is gone gave back device blocks."""
        for copy in transfer.spills:
            if copy.record.alive:
                copy.record.pages.advance(copy.page, Event.FAILED)
                self._source.unhold(copy.record.request_id, copy.page)
            self._host_pool.free_blocks([copy.host_block])
        for copy in transfer.restores:
            if copy.record.alive:
                copy.record.pages.advance(copy.page, Event.FAILED)
                self._clear(copy.record, copy.page)
                self._pool.free_blocks(copy.device_blocks)
        self.counters.failed += len(transfer.spills) + len(transfer.restores)

    # ---- what the step's message takes along

    def take_changes(self) -> list[PageWrite]:
        """Entries of pages that changed since the last call, for requests the workers know."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, {}
        known = [(record, page) for record, page in changed if record.alive and record.slot >= 0]
        return [entry for record, page in known for entry in self.entries(record, page, page + 1)]

    def take_reused(self) -> list[int]:
        """Transfers whose blocks were handed out again since the last call: the coming forward must wait for
        them.
        """
        reused, self._reused = self._reused, {}
        return list(reused)

    # ---- bookkeeping

    def _on_reuse(self, block: KVCacheBlock) -> None:
        """The pool hands `block` out again, or is reset.

        Pages that still read it are on the host from now on.
        """
        if (transfer_id := self._copying.get(block.block_id)) is not None:
            self._reused[transfer_id] = None
        for record, page in list(self._loose.get(block.block_id, ())):
            self._disown(record, page)
            self._clear(record, page)
            record.pages.advance(page, Event.REUSED)
            self._changed[record, page] = None
            self.counters.lost += 1

    def _disown(self, record: Record, page: int) -> None:
        for block in self.device_blocks(record, page):
            owners = self._loose[block.block_id]
            del owners[record, page]
            if not owners:
                del self._loose[block.block_id]

    def _clear(self, record: Record, page: int) -> None:
        self._place(record, page, [self._pool.null_block] * self._num_parts)

    def _place(self, record: Record, page: int, blocks: Sequence[KVCacheBlock]) -> None:
        for rows, block in zip(self._rows, blocks, strict=True):
            rows[record.request_id][page] = block
