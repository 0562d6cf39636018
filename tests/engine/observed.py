"""A running engine's scheduler side, followed by a model of its own: pages as two facts, regions as sizes.

`Watcher` sees commands (spill a page, give a lease back, grant a region), what vLLM's pools hand out,
messages and acknowledgements. It knows neither the transition table nor any counter of the product, and
derives from what it saw what every metric of the scheduler has to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_block_hash

from vllm_hisparse.messages import Acknowledgement, StepMessage
from vllm_hisparse.metrics import Sample
from vllm_hisparse.scheduler import transfers
from vllm_hisparse.testing.harness import HiSparseEngine

TICK_S = 0.004  # that a step takes on the ledger's clock

# What docs/residency.md says of a page: (device, host) -> state. SPILLING and ENQUEUED have a third fact.
NAMES = {
    ("leased", "none"): "dirty",
    ("loose", "pending"): "draining",
    ("gone", "pending"): "landing",
    ("leased", "valid"): "clean",
    ("loose", "valid"): "loose",
    ("gone", "valid"): "host",
    ("arriving", "valid"): "restoring",
}
STATES = (*NAMES.values(), "spilling", "enqueued")


@dataclass(eq=False)
class Page:
    """A page of a request that holds blocks."""

    device: str
    host: str = "none"
    enqueued: bool = False
    blocks: tuple[int, ...] = ()  # device blocks, while it is loose
    alive: bool = True

    @property
    def state(self) -> str:
        if (self.device, self.host) == ("leased", "pending"):
            return "enqueued" if self.enqueued else "spilling"
        return NAMES[self.device, self.host]

    @property
    def is_readable(self) -> bool:
        return self.device in ("leased", "loose")


@dataclass
class Transfer:
    """What a message asked for, until every rank has completed it."""

    at: float
    spills: list[tuple[Page, int]] = field(default_factory=list)  # (page, host block)
    restores: list[Page] = field(default_factory=list)
    closed_rows: int = 0  # slots of regions taken away, leased until the transfer is enqueued
    enqueued: set[int] = field(default_factory=set)  # ranks
    completed: set[int] = field(default_factory=set)


class Watcher:
    """Follows one engine from its start; `expected` is what a sample taken now has to say since start."""

    def __init__(self, engine: HiSparseEngine, patch: pytest.MonkeyPatch, num_ranks: int = 1) -> None:
        self.now = 0.0
        self._coordinator = coordinator = engine.coordinator
        self._num_ranks = num_ranks
        self._patch = patch
        self._page_tokens = coordinator.layout.page_tokens
        self._parts = coordinator.layout.num_parts
        self._pages: dict[str, list[Page]] = {}
        self._region: dict[str, int] = {}  # request -> slots
        self._open = Transfer(0.0)
        self._pending: dict[int, Transfer] = {}
        self._level = "above_high"
        self.events = Counter[str]()
        self.region_events = Counter[str]()
        self.crossings = Counter[str]()
        self.waits = self.host_evictions = self.host_pages = self.host_runs = 0
        self.latencies: dict[str, list[float]] = {"spill_seconds": [], "restore_seconds": []}
        patch.setattr(transfers, "time", self)  # the ledger's clock
        self._watch()

    def monotonic(self) -> float:
        """The ledger's clock."""
        return self.now

    # ---- seeing

    def _watch(self) -> None:
        coordinator, leases = self._coordinator, self._coordinator.leases
        self._before(coordinator, "adopt", self._adopt)
        self._after(coordinator, "grow", self._grow)
        self._after(coordinator, "drop", self._drop)
        self._before(coordinator, "plan", self._look_at_level)
        self._after(coordinator, "plan", self._plan)
        self._before(coordinator, "acknowledge", self._acknowledge)
        self._after(coordinator, "wait_for_copies", self._wait)
        self._after(coordinator, "grant_region", self._grant)
        self._after(coordinator, "grow_region", self._grow_region)
        self._after(coordinator, "shrink_region", self._shrink_region)
        self._after(coordinator, "return_region", self._return_region)
        for name in ("spill", "rejoin", "restore", "repin", "evict"):
            self._after(leases, name, getattr(self, f"_{name}"))
        self._before(leases, "unpin", self._unpin)
        self._after(coordinator.pool, "get_new_blocks", self._reused)
        self._before(coordinator.host_pool, "take_block", self._take_host_block)

    def _after(self, owner: Any, name: str, note: Callable[..., None]) -> None:
        inner = getattr(owner, name)

        def call(*args: Any) -> Any:
            result = inner(*args)
            note(result, *args)
            return result

        self._patch.setattr(owner, name, call)

    def _before(self, owner: Any, name: str, note: Callable[..., None]) -> None:
        inner = getattr(owner, name)

        def call(*args: Any) -> Any:
            note(*args)
            return inner(*args)

        self._patch.setattr(owner, name, call)

    # ---- pages

    def _adopt(self, request_id: str, blocks: Any) -> None:
        host = self._coordinator.host_pool
        published = {get_block_hash(b.block_hash) for b in host.blocks if b.block_hash is not None}
        for block in blocks:
            on_device = block.pool is not host
            has_host = not on_device or get_block_hash(block.block_hash) in published
            self.events["device_hits" if on_device else "host_hits"] += 1
            page = Page("leased" if on_device else "gone", "valid" if has_host else "none")
            self._pages.setdefault(request_id, []).append(page)

    def _grow(self, _: None, request_id: str, num_pages: int) -> None:
        self._pages.setdefault(request_id, []).extend(Page("leased") for _ in range(num_pages))

    def _drop(self, _: Any, request_id: str) -> None:
        for page in self._pages.pop(request_id, ()):
            page.alive = False
        if self._region.pop(request_id, 0):
            self.region_events["returned"] += 1

    def _spill(self, done: bool, record: Any, number: int, transfer: Any) -> None:
        page = self._page(record, number)
        if not done:
            return
        assert page.state == "dirty"
        rows = self._coordinator.source.req_to_blocks[record.request_id]
        if not (
            transfer.spills and transfer.spills[-1].record is record and transfer.spills[-1].page == number
        ):
            self.events["deduplicated"] += 1
            page.host = "valid"
            return
        block, previous = rows[number].block_id, rows[number - 1] if number else None
        self.events["spilled"] += 1
        self.host_pages += 1
        self.host_runs += previous is None or previous.is_null or block != previous.block_id + 1
        page.host = "pending"
        self._open.spills.append((page, block))

    def _unpin(self, record: Any, number: int) -> None:
        page = self._page(record, number)
        assert page.device == "leased"
        page.device, page.blocks = "loose", self._device_blocks(record, number)
        self.events["unpinned"] += 1

    def _repin(self, _: None, record: Any, number: int) -> None:
        page = self._page(record, number)
        assert page.device == "loose"
        page.device, page.blocks = "leased", ()
        self.events["repinned"] += 1

    def _evict(self, _: None, record: Any, number: int) -> None:
        page = self._page(record, number)
        assert page.state == "clean"
        page.device = "gone"
        self.events["evicted"] += 1

    def _rejoin(self, done: bool, record: Any, number: int) -> None:
        page = self._page(record, number)
        assert page.state == "host"
        if done:
            page.device = "leased"
            self.events["deduplicated"] += 1

    def _restore(self, _: None, record: Any, number: int, transfer: Any) -> None:
        page = self._page(record, number)
        assert page.state == "host"
        page.device = "arriving"
        self._open.restores.append(page)

    def _reused(self, blocks: Any, _: int) -> None:
        handed_out = {block.block_id for block in blocks}
        for page in (p for pages in self._pages.values() for p in pages):
            if page.device == "loose" and handed_out.intersection(page.blocks):
                page.device, page.blocks = "gone", ()
                self.events["lost"] += 1

    def _page(self, record: Any, number: int) -> Page:
        return self._pages[record.request_id][number]

    def _device_blocks(self, record: Any, number: int) -> tuple[int, ...]:
        rows = [m.req_to_blocks[record.request_id] for m in self._coordinator.resident]
        return tuple(row[number].block_id for row in rows)

    # ---- regions

    def _grant(self, _: None, record: Any) -> None:
        self._region[record.request_id] = self._coordinator.layout.start_hot_blocks * self._page_tokens
        self.region_events["granted"] += 1

    def _grow_region(self, _: None, record: Any, num_blocks: int) -> None:
        self._region[record.request_id] += num_blocks * self._page_tokens
        self.region_events["grown_blocks"] += num_blocks * self._parts

    def _shrink_region(self, _: None, record: Any, num_blocks: int) -> None:
        self._region[record.request_id] -= num_blocks * self._page_tokens
        self.region_events["shrunk_blocks"] += num_blocks * self._parts

    def _return_region(self, _: None, record: Any) -> None:
        self._open.closed_rows += self._region.pop(record.request_id)
        self.region_events["returned"] += 1

    # ---- steps

    def _look_at_level(self, _: Any) -> None:
        free, pressure = _num_free(self._coordinator.pool), self._coordinator.pressure
        level = "below_low" if free < pressure.low else "above_high" if free > pressure.high else "between"
        self.crossings[level] += level != self._level
        self._level = level

    def _plan(self, message: StepMessage, _: Any) -> None:
        assert [copy.host_block for copy in message.spill] == [block for _, block in self._open.spills]
        assert len(message.restore) == len(self._open.restores)
        if message.transfer_id >= 0:
            self._open.at = self.now
            self._pending[message.transfer_id] = self._open
            self._open = Transfer(0.0)

    def _acknowledge(self, ack: Acknowledgement) -> None:
        for rank, reported in ack.progress.items():
            assert not reported.failed
            for transfer_id, transfer in list(self._pending.items()):
                transfer.enqueued |= {rank} if transfer_id <= reported.enqueued else set()
                transfer.completed |= {rank} if transfer_id <= reported.completed else set()
                if len(transfer.enqueued) == self._num_ranks:
                    transfer.closed_rows = 0
                    for page, _ in transfer.spills:
                        page.enqueued = True
                if len(transfer.completed) == self._num_ranks:
                    self._complete(self._pending.pop(transfer_id))

    def _complete(self, transfer: Transfer) -> None:
        for page, _ in transfer.spills:
            page.host = "valid"
        for page in transfer.restores:
            page.device = "leased"
            self.events["restored"] += page.alive
        for key, pages in (("spill_seconds", transfer.spills), ("restore_seconds", transfer.restores)):
            if pages:
                self.latencies[key].append(self.now - transfer.at)

    def _wait(self, waits: bool) -> None:
        self.waits += waits

    def _take_host_block(self, block_id: int) -> None:
        self.host_evictions += self._coordinator.host_pool.blocks[block_id].block_hash is not None

    # ---- what a sample has to say

    def expected(self) -> Sample:
        """Gauges now; counters and latencies since start."""
        pages = [page for owned in self._pages.values() for page in owned]
        transfers = [*self._pending.values(), self._open]
        coordinator = self._coordinator
        return {
            "requests": self._residencies(),
            "pages": {state: sum(page.state == state for page in pages) for state in STATES},
            "hot_rows": {"": sum(self._region.values()) + sum(t.closed_rows for t in transfers)},
            "free_device_blocks": {"": _num_free(coordinator.pool)},
            "used_host_blocks": {"": len(self._held_host_blocks())},
            "cached_host_blocks": {"": sum(b.block_hash is not None for b in coordinator.host_pool.blocks)},
            "host_run_blocks": {"": self.host_pages / self.host_runs if self.host_runs else 0.0},
            "transfers_in_flight": {"": len(self._pending)},
            "page_events": dict(self.events),
            "host_evictions": {"": self.host_evictions},
            "imports": {},  # no other engine computes prompts for this one
            "region_events": dict(self.region_events),
            "watermark_crossings": dict(self.crossings),
            "waits_for_copies": {"": self.waits},
            "requests_passed": {"": 0},  # these engines keep no prefixes
            **{key: {"": list(seconds)} for key, seconds in self.latencies.items()},
        }

    def _residencies(self) -> dict[str, int]:
        counts = {"full": 0, "mixed": 0, "none": 0}
        for pages in self._pages.values():
            readable = sum(page.is_readable for page in pages)
            counts["full" if readable == len(pages) else "mixed" if readable else "none"] += 1
        return counts

    def _held_host_blocks(self) -> set[int]:
        """Blocks in the requests' rows, and those that copies in flight write to."""
        rows = self._coordinator.source.req_to_blocks.values()
        held = {block.block_id for row in rows for block in row if not block.is_null}
        return held | {block for t in self._pending.values() for _, block in t.spills}


def _num_free(pool: Any) -> int:
    """Blocks that nobody leases, counted one by one."""
    return sum(block.ref_cnt == 0 and not block.is_null for block in pool.blocks)
