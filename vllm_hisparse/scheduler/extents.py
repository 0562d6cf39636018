"""Which host block a page gets: the one after the page before it, where that can be had.

The device reads rows of consecutive host blocks faster than rows of scattered ones, because the link's
address translation covers 64 KiB at a time. So a request's first host page starts a run as long as the
request may grow, away from other requests' runs, and later pages follow it. Best effort: a taken block ends a
run, never an allocation. A published page ends one too, as if it were taken: the block behind a request's run
is, as a rule, the first page of somebody else's prefix, all of which would be lost with it. Published pages
are taken in the order of their last use, and only if nothing else is free.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from .host_pool import HostPool

__all__ = ["Extents"]

WINDOW = 4096  # free blocks that are looked at for a new run
CLEARANCE = (
    64  # free blocks that make a place behind all runs good enough to start at without looking further
)


class Extents:
    """Soft reservations of runs of host blocks, by owner. Leases alone keep a block from others."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._wanted: dict[object, tuple[int, int]] = {}  # owner -> [first, end) it may grow into
        self._evicted: dict[object, range] = {}  # owner -> blocks whose pages are the next to be evicted
        self.num_pages = 0  # taken since start
        self.num_runs = 0  # of consecutive blocks among them

    @property
    def mean_run(self) -> float:
        """Mean length of the runs of consecutive blocks that were taken so far; 0 before the first."""
        return self.num_pages / self.num_runs if self.num_runs else 0.0

    def take(self, owner: object, previous: KVCacheBlock, num_expected: int) -> KVCacheBlock:
        """Lease a block for `owner`'s next page. The caller has checked that the pool has a free block.

        `previous`: host block of the page before, or the null block. `num_expected`: host pages that may
        follow.
        """
        self.num_pages += 1
        if not previous.is_null and self._may_follow(owner, previous.block_id + 1):
            return self._pool.take_block(previous.block_id + 1)
        self.num_runs += 1
        return self._pool.take_block(self._start_run(owner, num_expected))

    def forget(self, owner: object) -> None:
        """The owner is gone; others may grow into its run."""
        self._wanted.pop(owner, None)
        self._evicted.pop(owner, None)

    def _may_follow(self, owner: object, block_id: int) -> bool:
        if not self._pool.is_free(block_id):
            return False
        return not self._pool.is_published(block_id) or block_id in self._evicted.get(owner, ())

    def _start_run(self, owner: object, num_expected: int) -> int:
        self.forget(owner)
        frontier = max((end for _, end in self._wanted.values()), default=0)
        if self._is_open(frontier, min(num_expected, CLEARANCE)):
            return self._want(owner, frontier, num_expected)
        unused = np.fromiter(islice(self._unpublished(), WINDOW), np.int64)
        if unused.size == 0:
            self._evicted[owner] = self._oldest_run(num_expected)
            return self._evicted[owner].start
        starts, lengths = _runs(np.sort(self._unwanted(unused)))
        if starts.size == 0:
            return int(unused[0])
        fits = np.flatnonzero(lengths >= num_expected)
        best = fits[lengths[fits].argmin()] if fits.size else lengths.argmax()
        return self._want(owner, int(starts[best]), min(num_expected, int(lengths[best])))

    def _is_open(self, first: int, length: int) -> bool:
        blocks = range(first, first + length)
        return all(self._pool.is_free(b) and not self._pool.is_published(b) for b in blocks)

    def _want(self, owner: object, first: int, length: int) -> int:
        self._wanted[owner] = (first, first + length)
        return first

    def _unpublished(self) -> Iterator[int]:
        """Free blocks without a published page; the pool keeps them in front."""
        for block in self._pool.free_in_order():
            if block.block_hash is not None:
                return
            yield block.block_id

    def _unwanted(self, blocks: np.ndarray) -> np.ndarray:
        for first, end in self._wanted.values():
            blocks = blocks[(blocks < first) | (blocks >= end)]
        return blocks

    def _oldest_run(self, num_expected: int) -> range:
        """A run of blocks whose pages are next to be evicted.

        A finished request's blocks were freed from its tail, so in eviction order its run descends: the
        lowest block of the part that is needed is where an ascending run can begin.
        """
        order = self._pool.free_in_order()
        lowest = last = next(order).block_id
        for block in islice(order, num_expected - 1):
            if block.block_id != lowest - 1:
                break
            lowest = block.block_id
        return range(lowest, last + 1)


def _runs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first block, length) of every run of consecutive numbers in an ascending array."""
    if blocks.size == 0:
        return blocks, blocks
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = np.concatenate(([0], breaks))
    return blocks[starts], np.diff(np.concatenate((starts, [blocks.size])))
