"""The coordinator's invariants, checked from scratch.

Used by tests and by the option `check`; O(all pages).
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from .records import Record
from .residency import STATES, Device, Host

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["check"]


def check(coordinator: "HiSparseCoordinator", retained: Iterable[KVCacheBlock] = ()) -> None:
    """Raise AssertionError unless every page is readable, every block's references have owners, and all
    leases balance.

    `retained`: blocks of either pool that vLLM's scheduler holds itself (frees it has deferred).
    """
    retained = list(retained)
    _check_pages(coordinator)
    for record in coordinator.records.values():
        assert not record.needs_region or record.region is not None or record.is_lent, (
            f"{record.request_id} cannot read its host pages"
        )
    _check_slots(coordinator)
    _check_regions(coordinator)
    _check_host_leases(coordinator, retained)
    _check_device_leases(coordinator, retained)
    coordinator.host_pool.check_integrity()


def _check_pages(coordinator: "HiSparseCoordinator") -> None:
    """Every page's blocks are what its state says, and loose blocks know their pages."""
    leases = coordinator.leases
    loose: dict[int, set[tuple[Record, int]]] = {}
    for record in coordinator.records.values():
        record.pages.check_integrity()
        for page in range(len(record.pages)):
            _check_page(coordinator, record, page)
            if STATES[record.pages[page]][0] is Device.LOOSE:
                for block in leases.device_blocks(record, page):
                    loose.setdefault(block.block_id, set()).add((record, page))
    assert loose == {b: set(pages) for b, pages in leases._loose.items()}, (
        "loose blocks and their pages disagree"
    )


def _check_page(coordinator: "HiSparseCoordinator", record: Record, page: int) -> None:
    device, host, _ = STATES[record.pages[page]]
    where = (record.request_id, page, record.pages[page].name)
    blocks = coordinator.leases.device_blocks(record, page)
    assert all(b.is_null for b in blocks) == (device is Device.GONE), where
    if device in (Device.LEASED, Device.ARRIVING):
        assert all(b.ref_cnt > 0 for b in blocks), where
    if device is Device.LOOSE:
        assert all(b.block_id in coordinator.pool._reuse_watchers for b in blocks), where
    block = coordinator.source.host_block(record.request_id, page)
    assert block.is_null == (host is Host.NONE), where
    assert block.is_null or block.ref_cnt > 0, where


def _check_slots(coordinator: "HiSparseCoordinator") -> None:
    used = [r.slot for r in coordinator.records.values() if r.slot >= 0]
    assert sorted(used + coordinator.outbox.free_slots) == list(range(coordinator.layout.max_requests)), (
        "slots lost or shared"
    )


def _check_regions(coordinator: "HiSparseCoordinator") -> None:
    held = [r.region for r in coordinator.records.values() if r.region is not None]
    cuts = [cut for t in (*coordinator.ledger, coordinator.transfer) for cut in t.cuts]
    coordinator.regions.check_integrity(held, cuts)


def _check_host_leases(coordinator: "HiSparseCoordinator", retained: Iterable[KVCacheBlock]) -> None:
    owners: Counter[int] = Counter(b.block_id for b in retained if b.pool is coordinator.host_pool)
    for blocks in coordinator.source.req_to_blocks.values():
        owners.update(b.block_id for b in blocks if not b.is_null)
    for transfer in (*coordinator.ledger, coordinator.transfer):
        owners.update(c.host_block.block_id for c in transfer.spills if not c.record.alive)
    for block in coordinator.host_pool.blocks:
        if not block.is_null:
            assert block.ref_cnt == owners[block.block_id], ("host block", block.block_id, block.ref_cnt)


def _check_device_leases(coordinator: "HiSparseCoordinator", retained: Iterable[KVCacheBlock]) -> None:
    owners: Counter[int] = Counter(b.block_id for b in retained if b.pool is coordinator.pool)
    for manager in coordinator.on_device:
        for blocks in manager.req_to_blocks.values():
            owners.update(b.block_id for b in blocks if not b.is_null)
    for record in coordinator.records.values():
        for page in range(len(record.pages)):
            if STATES[record.pages[page]][0] is Device.LOOSE:
                owners.subtract(b.block_id for b in coordinator.leases.device_blocks(record, page))
    regions = [r.region for r in coordinator.records.values() if r.region is not None]
    owners.update(b.block_id for region in regions for part in region.blocks for b in part)
    for transfer in (*coordinator.ledger, coordinator.transfer):
        owners.update(b.block_id for cut in transfer.cuts for b in cut.blocks)
    pool = coordinator.pool
    for block in pool.blocks:
        if not block.is_null:
            assert block.ref_cnt == owners[block.block_id], ("device block", block.block_id, block.ref_cnt)
    num_free = sum(b.ref_cnt == 0 and not b.is_null for b in pool.blocks)
    assert num_free == pool.get_num_free_blocks(), "device blocks lost"
    coordinator.leases.order.check_integrity()
