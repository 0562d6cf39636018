"""The residency policy of vLLM's in-tree HiSparse, stated in our terms and on our coordinator, to compare
with.

- A host block stands behind every page of an admitted request; sealed pages are copied at once, whatever
  the level.
- One watermark: when fewer blocks are free, every request without a hot region asks for one, at its next
  allocation, and counts it there: an allocation that fails for it may preempt. So does a request that has
  grown past the window that admission reserved, and every request that starts on a prefix hit.
- A request with a region gives up every page that the host has. No page comes back; the region keeps its
  size and is held until the request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_hisparse.planning.geometry import Geometry, Shape, round_up
from vllm_hisparse.scheduler.allocations import Allocations
from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator
from vllm_hisparse.scheduler.pressure import Pressure
from vllm_hisparse.scheduler.records import Record
from vllm_hisparse.scheduler.residency import UNPINNABLE, PageState
from vllm_hisparse.scheduler.reuse import ReuseOrder

__all__ = ["InTreeCoordinator", "in_tree_geometry"]

WATERMARK_SHARE = 10  # of the pool's blocks: a tenth, or one region if that is more


class InTreePressure(Pressure):
    """Full to host, one way."""

    def __init__(self, coordinator: HiSparseCoordinator, window_pages: int) -> None:
        super().__init__(coordinator)
        self._copy_below = self._pool.num_gpu_blocks + 1
        self._watermark = max(coordinator.regions.num_blocks, self._pool.num_gpu_blocks // WATERMARK_SHARE)
        self._window_pages = window_pages
        self.wishes: set[Record] = set()  # want a region at their next allocation

    def note_adoption(self, record: Record) -> None:
        super().note_adoption(record)
        self._wish(record)

    def note_region(self, record: Record) -> None:
        super().note_region(record)
        self.wishes.discard(record)

    def forget(self, record: Record) -> None:
        super().forget(record)
        self.wishes.discard(record)

    def note_shortage(self) -> bool:
        """Copies in flight free blocks of requests that can read from the host."""
        return any(r.pages.count(PageState.SPILLING) for r in self.regions.holders())

    def relieve(self) -> None:
        self._unpin()

    def step(self, is_waited_for: bool) -> None:
        free = self._pool.get_num_free_blocks()
        self._note_level(free)
        self._materialise()
        for record in self._coordinator.records.values():
            if record.region is None and (free < self._watermark or len(record.pages) >= self._window_pages):
                self._wish(record)
        self._unpin()
        self._fresh.clear()

    def _wish(self, record: Record) -> None:
        self.wishes.add(record)
        record.num_slots = 0  # vLLM has to ask again

    def _unpin(self) -> None:
        for record in self.regions.holders():
            for page in reversed(record.pages.pages_in(*UNPINNABLE)):
                self._coordinator.leases.unpin(record, page)


class VllmOrder(ReuseOrder):
    """Free blocks in order of use."""

    def release(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        self._pool.unpin_blocks(blocks, on_reuse)


class InTreeCoordinator(HiSparseCoordinator):
    """A coordinator whose requests hold regions as vLLM's do."""

    pressure: InTreePressure

    def __init__(self, *args: Any, max_step_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, max_step_tokens=max_step_tokens, **kwargs)
        window_pages = -(-max_step_tokens // self.layout.page_tokens)
        self.config = replace(self.config, max_passing=0)  # first come, first served
        self.leases.order = VllmOrder(self.pool, kept_share=0)
        self.pressure = InTreePressure(self, window_pages)
        self.allocations = InTreeAllocations(self, window_pages)

    def gets_region(self, record: Record) -> bool:
        """Whether the request is given a region with its next blocks."""
        wants = record in self.pressure.wishes or record.needs_region
        return wants and record.region is None and self.regions.num_free_ids > 0


class InTreeAllocations(Allocations):
    """Nothing can be reclaimed: what the host has was given up at once."""

    _coordinator: InTreeCoordinator

    def __init__(self, coordinator: InTreeCoordinator, window_pages: int) -> None:
        super().__init__(coordinator, coordinator.admission)
        self._window_pages = window_pages

    def num_to_start(self, blocks: Sequence[Any], landing: Sequence[int]) -> int:
        num = super().num_to_start(blocks, landing)
        if not blocks or self._hit.num_host_only:
            return num
        regions = self._coordinator.regions
        return num + (regions.num_blocks if regions.num_free_ids else self._pool.num_gpu_blocks)

    def cap(self, request_id: str, num_pages: int) -> int:
        if num_pages > self._host_pool.get_num_free_blocks():
            return self._pool.num_gpu_blocks
        return min(num_pages, self._window_pages)

    def num_reclaimable(self, request_id: str, num_tokens: int) -> int:
        """Less than nothing for a request that asks for a region."""
        record = self._coordinator.records.get(request_id)
        gets_region = record is not None and self._coordinator.gets_region(record)
        return -self._coordinator.regions.num_blocks if gets_region else 0

    def make_room(self, record: Record, num_tokens: int, num_landing: int = 0) -> None:
        if self._coordinator.gets_region(record):
            self._coordinator.grant_region(record)


def in_tree_geometry(shape: Shape, group_layers: Sequence[int]) -> Geometry:
    """Blocks as vLLM's planner makes them: one page of keys each, whole index groups in a part while they
    fit beside it, and a stride that is a multiple of one layer's page.

    `group_layers`: layers of each index group. Raises ValueError if a group is larger than a block of keys.
    """
    stride = round_up(shape.num_indexer_layers * shape.indexer_page_bytes, shape.page_bytes)
    parts: list[int] = []
    for num_layers in group_layers:
        if (
            parts
            and (parts[-1] + num_layers) * shape.page_bytes
            <= shape.num_indexer_layers * shape.indexer_page_bytes
        ):
            parts[-1] += num_layers
        else:
            parts.append(num_layers)
    if max(parts) * shape.page_bytes > stride:
        raise ValueError(f"got parts of {max(parts)} layers; need them within a block of {stride} bytes")
    return Geometry(shape, stride, tuple(parts), indexer_pages=1)
