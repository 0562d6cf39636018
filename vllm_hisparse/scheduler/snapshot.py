"""What a coordinator holds right now, as plain values: for logs, the demo and tests. Changes nothing.

`snapshot` costs O(requests). `pool_cells` and `page_states` look at every block and page: for pictures.
"""

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from vllm_hisparse.scheduler.residency import STATES, Device, Host, PageState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator
    from vllm_hisparse.scheduler.records import Record

__all__ = [
    "CellKind",
    "PoolCell",
    "RequestSnapshot",
    "Snapshot",
    "free_cells",
    "page_states",
    "pool_cells",
    "snapshot",
]


class RequestSnapshot(msgspec.Struct, frozen=True):
    """One request that holds blocks."""

    request_id: str
    residency: str  # a value of `Residency`
    pages: dict[str, int]  # by state, lower case; states without a page are left out
    num_host_only: int  # pages that can only be read from the host
    hot_rows: int  # slots of its hot region, 0 without one


class Snapshot(msgspec.Struct, frozen=True):
    """A coordinator at one moment. Null blocks are not counted."""

    requests: tuple[RequestSnapshot, ...]
    num_device_blocks: int
    num_free_device_blocks: int  # loose pages count as free
    num_host_blocks: int
    num_used_host_blocks: int  # leased by requests or by copies in flight
    num_regions: int
    num_hot_rows: int
    num_transfers: int  # not completed by every rank
    page_events: dict[str, int]  # since start, see `PageCounters`


class CellKind(Enum):
    """What a device block is used for."""

    FREE = "free"
    CACHED = "cached"  # free; holds a page that a prefix hit would find
    INDEXER = "indexer"
    RESIDENT = "resident"  # a page that only the device has
    MIRRORED = "mirrored"  # a page that the host has too
    LOOSE = "loose"  # free, but its page is read until the block is reused
    HOT = "hot"
    ARRIVING = "arriving"  # a page on its way back from the host
    HELD = "held"  # leased by no request: on its way back to the pool


class PoolCell(msgspec.Struct, frozen=True, array_like=True):
    """One device block; `request_id` is one of its users, empty if it has none."""

    kind: CellKind
    request_id: str = ""


def snapshot(coordinator: "HiSparseCoordinator") -> Snapshot:
    """Counts of requests, pages, pools and events. O(requests)."""
    device, host, regions = coordinator.pool, coordinator.host_pool, coordinator.regions
    num_host_blocks = host.num_gpu_blocks - 1
    return Snapshot(
        requests=tuple(_request(record) for record in coordinator.records.values()),
        num_device_blocks=device.num_gpu_blocks - 1,
        num_free_device_blocks=device.get_num_free_blocks(),
        num_host_blocks=num_host_blocks,
        num_used_host_blocks=num_host_blocks - host.get_num_free_blocks(),
        num_regions=len(regions.leased),
        num_hot_rows=regions.num_leased_rows,
        num_transfers=len(coordinator.ledger),
        page_events=dict(vars(coordinator.leases.counters)),
    )


def page_states(coordinator: "HiSparseCoordinator", request_id: str) -> tuple[PageState, ...]:
    """State of each page of a request, from the start of its context; empty for one without blocks."""
    record = coordinator.records.get(request_id)
    return () if record is None else tuple(record.pages[page] for page in range(len(record.pages)))


def pool_cells(coordinator: "HiSparseCoordinator") -> tuple[PoolCell, ...]:
    """Every device block in order, without the null block. O(blocks + pages)."""
    cells = free_cells(coordinator.pool)
    for region in coordinator.regions.leased:
        for block in (b for part in region.blocks for b in part):
            cells[block.block_id] = PoolCell(CellKind.HOT)
    for record in coordinator.records.values():
        _draw_pages(coordinator, record, cells)
        for block in (b for part in record.region.blocks for b in part) if record.region else ():
            cells[block.block_id] = PoolCell(CellKind.HOT, record.request_id)
    for manager in coordinator.on_device:
        if manager not in coordinator.resident:
            for request_id, blocks in manager.req_to_blocks.items():
                for block in (b for b in blocks if not b.is_null):
                    cells[block.block_id] = PoolCell(CellKind.INDEXER, request_id)
    null_id = coordinator.pool.null_block.block_id
    return tuple(cell for block_id, cell in enumerate(cells) if block_id != null_id)


def free_cells(pool: "BlockPool") -> list[PoolCell]:
    """Every block of a pool by block id, as far as the pool itself knows: free, cached or held."""
    return [
        PoolCell(CellKind.HELD if b.ref_cnt else CellKind.FREE if b.block_hash is None else CellKind.CACHED)
        for b in pool.blocks
    ]


def _request(record: "Record") -> RequestSnapshot:
    pages = record.pages
    return RequestSnapshot(
        request_id=record.request_id,
        residency=pages.residency.value,
        pages={state.name.lower(): n for state in PageState if (n := pages.count(state))},
        num_host_only=pages.num_host_only,
        hot_rows=0 if record.region is None else record.region.num_rows,
    )


def _draw_pages(coordinator: "HiSparseCoordinator", record: "Record", cells: list[PoolCell]) -> None:
    for page in range(len(record.pages)):
        kind = _kind(record.pages[page])
        for block in coordinator.leases.device_blocks(record, page):
            # A block that another request leases is not loose, whatever this page's own lease is.
            if not block.is_null and not (kind is CellKind.LOOSE and block.ref_cnt):
                cells[block.block_id] = PoolCell(kind, record.request_id)


def _kind(state: PageState) -> CellKind:
    device, host, _ = STATES[state]
    if device is Device.LEASED:
        return CellKind.MIRRORED if host is Host.VALID else CellKind.RESIDENT
    return CellKind.ARRIVING if device is Device.ARRIVING else CellKind.LOOSE
