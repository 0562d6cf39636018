"""Which free blocks the device pool hands out first, and how many of them nobody would miss.

vLLM's free queue is in order of use. To us the loss of a block costs one of three things: nothing, if it is
empty; reads from the host, if its page is there too; or a prefix, if only the device has it. The keys of the
indexer are on the device alone, and without them a prefix hit on the host's pages is worth nothing. So pages
that the host has go right after empty blocks. What ended requests have left on the device alone goes last,
and, up to a share of the pool, does not count as free at the watermarks.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

__all__ = ["ReuseOrder"]


class ReuseOrder:
    """The free queue of one device pool.

    Blocks that are released go to its end, as vLLM has it, and are brought forward when the empty blocks at
    its head are about to run out. An allocation looks at no more blocks for that than it takes, and a block
    is moved once for each time that it is released.
    """

    def __init__(self, pool: BlockPool, kept_share: float) -> None:
        self._pool = pool
        self._max_kept = int(kept_share * pool.num_gpu_blocks)
        self._num_kept = 0  # when it was last counted
        self.is_stale = False  # ended requests have left something behind since then
        self._released: dict[int, KVCacheBlock] = {}  # since they were last brought forward, in that order
        self._take = pool.get_new_blocks
        pool.get_new_blocks = self.take

    def release(self, blocks: Sequence[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        """Give back leases on blocks whose page the host has or is about to have."""
        self._pool.unpin_blocks(blocks, on_reuse)
        for block in blocks:
            self._released.pop(block.block_id, None)
            self._released[block.block_id] = block

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """See `BlockPool.get_new_blocks`, in whose place vLLM calls it."""
        if self._released:
            empty = list(islice(takewhile(self._is_empty, self._free()), num_blocks))
            if len(empty) < num_blocks:
                self._bring_forward(empty)
        return self._take(num_blocks)

    def _bring_forward(self, empty: list[KVCacheBlock]) -> None:
        """Put what was released behind the queue's `empty` blocks, the last first."""
        released = [b for b in self._released.values() if b.ref_cnt == 0 and self._is_watched(b)]
        self._released.clear()
        queue = self._pool.free_block_queue
        moved = [*empty, *reversed(released)]
        for block in moved:
            queue.remove(block)
        queue.prepend_n(moved)

    def num_spare(self, ceiling: int | None = None) -> int:
        """Free blocks without those that are kept for prefixes.

        Counts anew, in O(free blocks), only if requests have ended or started on a prefix since the last
        time. A number of at least `ceiling`, where there is one, may be too low.
        """
        free = self._pool.get_num_free_blocks()
        if ceiling is not None and free - self._max_kept >= ceiling:
            return free - self._max_kept
        return free - min(self._count_kept(), self._max_kept, free)

    @property
    def num_unkept(self) -> int:
        """Free blocks without any that hold prefixes, however many these are; counts as `num_spare`."""
        return max(self._pool.get_num_free_blocks() - self._count_kept(), 0)

    def _count_kept(self) -> int:
        if self.is_stale:
            self.is_stale = False
            self._num_kept = sum(1 for block in self._free() if not self._is_spare(block))
        return self._num_kept

    def _is_spare(self, block: KVCacheBlock) -> bool:
        return block.block_hash is None or self._is_watched(block)

    def _is_empty(self, block: KVCacheBlock) -> bool:
        return block.block_hash is None and not self._is_watched(block)

    def _is_watched(self, block: KVCacheBlock) -> bool:
        """Whether the host has its page, too, and nobody has used the block for something else."""
        return block.block_id in self._pool._reuse_watchers

    def _free(self) -> Iterator[KVCacheBlock]:
        """Free blocks, next to be handed out first."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            yield block
            block = block.next_free_block
