"""What admitting a request costs, chosen such that an idle engine can admit and finish any request.

A request that fits the device as a whole may be admitted as a whole. A longer one needs, at any one time, a
hot region, its tail and a step's pages (`claim`); everything else is on the host by then or can go there.
Pages that it starts on with a prefix hit take room on top: pages that only the device has cannot leave at
once, and pages that only the host has need the region at once. `num_admissible` bounds the former and, where
the pool has no room for a region, refuses the latter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_hisparse.planning.layout import Layout

from .host_pool import HostPool

__all__ = ["NO_HIT", "Admission", "Hit"]


@dataclass(frozen=True)
class Hit:
    """A prefix hit as the pools see it before it is adopted."""

    on_device: Sequence[Sequence[KVCacheBlock]] = ()  # [page][part]; none for pages that only the host has
    on_host: Sequence[KVCacheBlock | None] = ()  # [page]
    num_evictable: int = 0  # device blocks that are in the free queue now
    num_clean: int = 0  # pages on both tiers that nobody else leases: their device leases can go back at once
    num_host_only: int = 0  # pages, with those of an import that are about to land on the host
    num_free_host: int = 0  # host blocks that adopting it takes out of the free queue, for imports

    @property
    def num_pages(self) -> int:
        """Pages, without those of an import."""
        return len(self.on_device)

    @property
    def num_blocks(self) -> int:
        """Device blocks that adopting it leases."""
        return sum(map(len, self.on_device))

    @cached_property
    def block_ids(self) -> frozenset[int]:
        """The device blocks that adopting it leases."""
        return frozenset([block.block_id for page in self.on_device for block in page])

    @property
    def has_backed(self) -> bool:
        """Whether the host has a page that the device does not have or can give up."""
        return self.num_clean > 0 or self.num_host_only > 0


NO_HIT = Hit()


class Admission:
    """The limits of one engine, in pages, which are blocks of one part."""

    def __init__(self, layout: Layout, host_pool: HostPool, max_step_tokens: int, num_reserved: int) -> None:
        """`num_reserved`: blocks that vLLM keeps free when it admits a request whose tokens are loaded."""
        self._host_pool = host_pool
        self._start = layout.start_hot_blocks
        self._claim = self._start + layout.tail_pages + -(-max_step_tokens // layout.page_tokens)
        indexer_blocks = -(-layout.max_pages // layout.indexer_pages)
        room = (layout.num_device_blocks - 1 - indexer_blocks) // layout.num_parts
        self._spare = room - self._claim
        self._fits_whole = room - -(-num_reserved // layout.num_parts) >= layout.max_pages

    def cap(self, num_pages: int, has_backed: bool, num_free_host: int) -> int:
        """Pages beyond its hit that a request must find room for: not all, if the host can take the rest.

        A hit that `has_backed` pages has the region counted with it.
        """
        cap = self.claim(has_backed)
        return num_pages if num_pages <= cap or num_pages - cap > num_free_host else cap

    def claim(self, has_backed: bool) -> int:
        """Pages that a request needs at any one time beyond its hit; the region counts as one of them, unless
        a hit that `has_backed` pages counts it.
        """
        return self._claim - (self._start if has_backed else 0)

    def inspect(self, blocks: Sequence[KVCacheBlock], num_landing: int = 0) -> Hit:
        """What adopting a prefix hit would take, with `num_landing` more pages about to land on the host.

        A pure query; O(pages of the hit).
        """
        if not blocks:
            return Hit(num_host_only=num_landing) if num_landing else NO_HIT
        on_device, on_host = self._host_pool.hit_pages(blocks)
        on_both = [page for page, host in zip(on_device, on_host, strict=True) if page and host is not None]
        free_host = [host for host in on_host if host is not None and host.ref_cnt == 0]
        return Hit(
            on_device=on_device,
            on_host=on_host,
            num_evictable=[block.ref_cnt for page in on_device for block in page].count(0),
            num_clean=sum(not any(block.ref_cnt for block in page) for page in on_both),
            num_host_only=num_landing + on_device.count([]),
            num_free_host=len(free_host) if num_landing else 0,
        )

    def num_admissible(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Leading pages of a prefix hit that an idle engine could start on."""
        if len(blocks) <= self._spare:
            return len(blocks)
        num_host_only, num_device_only = 0, 0
        for page, (on_device, on_host) in enumerate(zip(*self._host_pool.hit_pages(blocks), strict=True)):
            num_host_only += not on_device
            num_device_only += on_host is None
            crowded = num_device_only > self._spare and (num_host_only > 0 or not self._fits_whole)
            if crowded or (num_host_only > 0 and self._spare < 0):
                return page
        return len(blocks)
