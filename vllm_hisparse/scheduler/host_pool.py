"""The host tier's block pool, and prefix lookup over both tiers."""

from collections.abc import Callable, Iterator, Sequence

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

__all__ = ["HostPool", "OneBlock"]


class OneBlock:
    """Stands for a row of blocks of which vLLM looks at a single one, so that no row has to be made up."""

    def __init__(self, block: KVCacheBlock) -> None:
        self._block = block

    def __getitem__(self, page: slice | int) -> list[KVCacheBlock] | KVCacheBlock:
        return [self._block] if isinstance(page, slice) else self._block


class HostPool(BlockPool):
    """Host blocks, taken only when a page is written; its prefix lookup also finds pages that only the device
    has.

    That second half is what lets an idle device serve prefix hits without spending a single host block. A
    lookup answers with the device's block where there is one (no copy, no hot region needed), else with the
    host's; `KVCacheBlock.pool` tells which.

    Events go to the device pool's queue, which is the one vLLM drains: in one order for both tiers, as
    clearing them asks for. Their medium is "CPU", and they tell of pages, not of blocks: a page is stored
    once and removed once, whatever number of blocks hold it in between.
    """

    def __init__(
        self, num_blocks: int, device_pool: BlockPool, source_group_id: int, resident_group_ids: list[int]
    ) -> None:
        self._device_pool = device_pool
        self._source_group_id = source_group_id
        self._resident_group_ids = resident_group_ids
        # What vLLM appends to a page's hash to make a key of it, in the source group and in part 0.
        self._source_suffix = make_block_hash_with_group_id(BlockHash(b""), source_group_id)
        self._device_suffix = make_block_hash_with_group_id(BlockHash(b""), resident_group_ids[0])
        self._before_reset: Callable[[], list[KVCacheBlock]] | None = None
        self.num_admissible: Callable[[Sequence[KVCacheBlock]], int] = len  # leading pages of a hit to use
        self.num_evictions = 0  # since start
        self.num_published = 0  # blocks that hold a published page; requests may publish the same page twice
        self.epoch = 0  # counts resets: a copy that was planned before one must not be published after it
        # Pages found on the device, by hash: their blocks, and the hashes that these had then.
        self._found: dict[BlockHash, tuple[list[KVCacheBlock], list[BlockHashWithGroupId | None]]] = {}
        super().__init__(
            num_blocks,
            device_pool.enable_caching,
            device_pool.hash_block_size,
            enable_kv_cache_events=device_pool.enable_kv_cache_events,
            medium="CPU",
        )

    @property
    def kv_event_queue(self) -> list[KVCacheEvent]:
        """The device pool's live queue, looked up each time: draining replaces the list."""
        return self._device_pool.kv_event_queue

    @kv_event_queue.setter
    def kv_event_queue(self, events: list[KVCacheEvent]) -> None:
        assert not events, "only the device pool's owner replaces a queue that holds events"

    def on_reset(self, release: Callable[[], list[KVCacheBlock]]) -> None:
        """Register `release`: called before a reset, returns host blocks that copies in flight hold for dead
        requests.
        """
        self._before_reset = release

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """A block that holds the page (part 0's block if the device has it), or None.

        Called for every page of a long prompt: few calls here.
        """
        on_device = self._device_pool.cached_block_hash_to_block.get_one_block(
            BlockHashWithGroupId(block_hash + self._device_suffix)
        )
        if on_device is not None and (blocks := self.device_blocks(block_hash)):
            return blocks[:1]
        on_host = self.host_block(block_hash)
        return None if on_host is None else [on_host]

    def device_blocks(self, block_hash: BlockHash) -> list[KVCacheBlock] | None:
        """The device's blocks of the page, one a part, or None unless every part has its own.

        A prompt's pages are looked up several times while it is admitted, and vLLM makes a key of its own for
        every part. So we remember what was found: a block holds a page for as long as it has the page's hash.
        """
        found = self._found.get(block_hash)
        if found is not None and [block.block_hash for block in found[0]] == found[1]:
            return found[0]
        blocks = self._device_pool.get_cached_block(block_hash, self._resident_group_ids)
        if blocks is None:
            self._found.pop(block_hash, None)
            return None
        if len(self._found) >= self._device_pool.num_gpu_blocks:  # most of it is of pages long gone
            self._found.clear()
        self._found[block_hash] = blocks, [block.block_hash for block in blocks]
        return blocks

    def host_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """The published host block of the page, or None."""
        return self.cached_block_hash_to_block.get_one_block(
            BlockHashWithGroupId(block_hash + self._source_suffix)
        )

    def hit_blocks(self, block: KVCacheBlock) -> list[KVCacheBlock]:
        """All parts' blocks of a prefix hit that the device has; nothing for one that only the host has."""
        if block.pool is self:
            return []
        assert block.block_hash is not None
        found = self.device_blocks(get_block_hash(block.block_hash))
        assert found is not None, "a device hit has a block in every part"
        return found

    def host_copies(
        self, blocks: Sequence[KVCacheBlock], on_device: Sequence[Sequence[KVCacheBlock]]
    ) -> list[KVCacheBlock | None]:
        """The host block of each page of a prefix hit, by its `hit_blocks`; None for one that has none."""
        pages = zip(blocks, on_device, strict=True)
        return [self.published(block) if found else block for block, found in pages]

    def published(self, block: KVCacheBlock) -> KVCacheBlock | None:
        """The host block published under a device block's hash."""
        if block.block_hash is None or not self.num_published:
            return None
        return self.host_block(get_block_hash(block.block_hash))

    def is_free(self, block_id: int) -> bool:
        """Whether the block exists and nobody leases it."""
        return 0 < block_id < self.num_gpu_blocks and self.blocks[block_id].ref_cnt == 0

    def is_published(self, block_id: int) -> bool:
        """Whether a lookup can find the block's page."""
        return self.blocks[block_id].block_hash is not None

    def free_in_order(self) -> Iterator[KVCacheBlock]:
        """Free blocks, next to be handed out first."""
        queue = self.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            yield block
            block = block.next_free_block

    def take_block(self, block_id: int) -> KVCacheBlock:
        """Lease this free block; like `get_new_blocks`, but of the caller's choice."""
        block = self.blocks[block_id]
        assert block.ref_cnt == 0 and not block.is_null
        self.free_block_queue.remove(block)
        self._maybe_evict_cached_block(block)
        block.ref_cnt = 1
        return block

    def publish(self, request: Request, page: int, block: KVCacheBlock, page_tokens: int) -> None:
        """Make a written page of the request findable by its hash."""
        self.cache_full_blocks(request, OneBlock(block), page, page + 1, page_tokens, self._source_group_id)
        assert block.block_hash is not None
        self.num_published += 1
        if self.enable_kv_cache_events and self._published_block(block.block_hash) is not block:
            self.kv_event_queue.pop()  # it is stored already

    def _emit_block_removed_events(self, block_hashes: list[BlockHashWithGroupId]) -> None:
        super()._emit_block_removed_events([h for h in block_hashes if self._published_block(h) is None])

    def _published_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        return self.cached_block_hash_to_block.get_one_block(key)

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        evicted = super()._maybe_evict_cached_block(block)
        self.num_evictions += evicted
        self.num_published -= evicted
        return evicted

    def reset_prefix_cache(self) -> bool:
        """Forget every published page, unless the device pool is in use: vLLM resets both or fails.

        Blocks that copies in flight still write to are kept from reuse throughout.
        """
        held = self._before_reset() if self._before_reset is not None else []
        if self._device_pool.get_num_free_blocks() < self._device_pool.num_gpu_blocks - 1:
            return False
        self.free_blocks(held)
        done = super().reset_prefix_cache()
        self.touch(held)
        if done:
            self.epoch += 1
            self.num_published = 0
        return done

    def check_integrity(self) -> None:
        """Free and leased blocks add up to the pool, and no free block is leased. Raises AssertionError."""
        free = {block.block_id for block in self.free_block_queue.get_all_free_blocks()}
        leased = [b.block_id for b in self.blocks if b.ref_cnt > 0 and not b.is_null]
        assert free.isdisjoint(leased), "a leased host block is in the free queue"
        assert len(free) + len(leased) == self.num_gpu_blocks - 1, "host blocks lost"
        published = sum(block.block_hash is not None for block in self.blocks)
        assert published == self.num_published, "published host blocks miscounted"
