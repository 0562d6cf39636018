"""Everything the scheduler side holds, as plain values that can be compared."""

from __future__ import annotations

from typing import Any

from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator

__all__ = ["full_state"]


def full_state(coordinator: HiSparseCoordinator) -> dict[str, Any]:
    """Pools with the order of their free queues, managers, records, leases, what waits for the next message.

    Leaves out `allocations`, which belong to the query in progress.
    """
    c = coordinator
    managers = [c.source, *c.on_device]
    return {
        "device": _pool(c.pool),
        "host": _pool(c.host_pool),
        "rows": [
            {r: [b.block_id for b in blocks] for r, blocks in m.req_to_blocks.items() if blocks}
            for m in managers
        ],
        "cached": [dict(m.num_cached_block) for m in managers],
        "records": {r: _record(record) for r, record in c.records.items()},
        "regions": (sorted(c.regions._free_ids), sorted(c.regions._leased)),
        "ledger": [t.transfer_id for t in c.ledger],
        "planned": (len(c.transfer.spills), len(c.transfer.restores), len(c.transfer.cuts)),
        "loose": {block: set(owners) for block, owners in c.leases._loose.items()},
        "pending": (
            dict(c.leases._copying),
            list(c.leases._changed),
            list(c.leases._reused),
            list(c.outbox.grown),
            list(c.outbox._bound),
            list(c.outbox._unbound),
            dict(c.outbox._regions),
        ),
        "slots": list(c.outbox.free_slots),
        "counters": vars(c.leases.counters).copy(),
    }


def _pool(pool: Any) -> dict[str, Any]:
    return {
        "blocks": [(b.ref_cnt, b.block_hash) for b in pool.blocks],
        "free": [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
        "watched": sorted(pool._reuse_watchers),
    }


def _record(record: Any) -> tuple[Any, ...]:
    region = None if record.region is None else record.region.region_id
    pages = [record.pages[page] for page in range(len(record.pages))]
    return pages, record.slot, region, record.num_sent, record.next_spill, record.alive
