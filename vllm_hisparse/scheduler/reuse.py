"""Which free blocks the device pool hands out first, and how many of them nobody would miss.

vLLM's free queue is in order of use. To us the loss of a block costs one of three things: nothing, if it is
empty; reads from the host, if its page is there too; or a prefix, if only the device has it. The keys of the
indexer are on the device alone, and without them a prefix hit on the host's pages is worth nothing. So pages
that the host has go right after empty blocks. What ended requests have left on the device alone goes last,
and, up to a share of the pool, does not count as free at the watermarks. It is counted as blocks come and go:
a pass over the free queue for every request that starts or ends takes milliseconds in a large pool.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

__all__ = ["ReuseOrder"]


class ReuseOrder:
    """The free queue of one device pool, whose blocks are taken, touched, freed and evicted by way of here.

    Blocks that are released go to its end, as vLLM has it, and are brought forward when the empty blocks at
    its head are about to run out. An allocation looks at no more blocks for that than it takes, and a block
    is moved once for each time that it is released.
    """

    def __init__(self, pool: BlockPool, kept_share: float) -> None:
        self._pool = pool
        self._max_kept = int(kept_share * pool.num_gpu_blocks)
        self.num_kept = 0  # free blocks that hold what the host does not have
        self._released: dict[int, KVCacheBlock] = {}  # since they were last brought forward, in that order
        self._take, self._touch, self._free_blocks = pool.get_new_blocks, pool.touch, pool.free_blocks
        self._evict, self._reset = pool.evict_blocks, pool.reset_prefix_cache
        pool.get_new_blocks, pool.touch, pool.free_blocks = self.take, self.touch, self.free
        pool.evict_blocks, pool.reset_prefix_cache = self.evict, self.reset

    def release(self, blocks: Sequence[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        """Give back leases on blocks whose page the host has or is about to have."""
        self._pool.unpin_blocks(blocks, on_reuse)
        for block in blocks:
            self._released.pop(block.block_id, None)
            self._released[block.block_id] = block

    def num_spare(self) -> int:
        """Free blocks without those that are kept for prefixes."""
        return self._pool.get_num_free_blocks() - min(self.num_kept, self._max_kept)

    @property
    def num_unkept(self) -> int:
        """Free blocks without any that hold prefixes, however many these are."""
        return self._pool.get_num_free_blocks() - self.num_kept

    def check_integrity(self) -> None:
        """What is kept is what a count of the free blocks finds. Raises AssertionError."""
        assert self.num_kept == self._count_kept(self._free()), "kept blocks miscounted"

    # ---- what is called in place of the pool's own

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """See `BlockPool.get_new_blocks`."""
        if self._released:
            empty = list(islice(takewhile(self._is_empty, self._free()), num_blocks))
            if len(empty) < num_blocks:
                self._bring_forward(empty)
        num_kept = self._count_kept(islice(self._free(), num_blocks)) if self.num_kept else 0
        blocks = self._take(num_blocks)
        self.num_kept -= num_kept
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """See `BlockPool.touch`."""
        if self.num_kept:
            self.num_kept -= self._count_kept(blocks)
        self._touch(blocks)

    def free(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """See `BlockPool.free_blocks`. Blocks of other pools may be among them; it passes them on."""
        blocks = list(ordered_blocks)
        self._free_blocks(blocks)
        self.num_kept += self._count_kept(b for b in blocks if b.pool is self._pool)

    def evict(self, block_ids: set[int]) -> None:
        """See `BlockPool.evict_blocks`."""
        self.num_kept -= self._count_kept(self._pool.blocks[block_id] for block_id in block_ids)
        self._evict(block_ids)

    def reset(self) -> bool:
        """See `BlockPool.reset_prefix_cache`."""
        done = self._reset()
        if done:
            self.num_kept = 0
        return done

    # ---- inside

    def _bring_forward(self, empty: list[KVCacheBlock]) -> None:
        """Put what was released behind the queue's `empty` blocks, the last first."""
        released = [b for b in self._released.values() if b.ref_cnt == 0 and self._is_watched(b)]
        self._released.clear()
        queue = self._pool.free_block_queue
        moved = [*empty, *reversed(released)]
        for block in moved:
            queue.remove(block)
        queue.prepend_n(moved)

    def _count_kept(self, blocks: Iterable[KVCacheBlock]) -> int:
        """How many blocks of these, each counted once, are free and hold what the host does not have."""
        full = {b.block_id for b in blocks if b.ref_cnt == 0 and b.block_hash is not None}
        return len(full.difference(self._pool._reuse_watchers))

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
