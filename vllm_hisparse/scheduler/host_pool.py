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

from .device_pages import DevicePages

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
        self.on_device = DevicePages(device_pool, resident_group_ids)
        # What vLLM appends to a page's hash to make a key of it.
        self._source_suffix = make_block_hash_with_group_id(BlockHash(b""), source_group_id)
        self._before_reset: Callable[[], list[KVCacheBlock]] | None = None
        self.num_admissible: Callable[[Sequence[KVCacheBlock]], int] = len  # leading pages of a hit to use
        self.num_evictions = 0  # since start
        self.num_published = 0  # blocks that hold a published page; requests may publish the same page twice
        self.epoch = 0  # counts resets: a copy that was planned before one must not be published after it
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
        on_device = self.on_device.find(block_hash)
        if on_device is not None:
            return on_device[:1]
        on_host = self.host_block(block_hash)
        return None if on_host is None else [on_host]

    def host_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """The published host block of the page, or None."""
        return self.cached_block_hash_to_block.get_one_block(
            BlockHashWithGroupId(block_hash + self._source_suffix)
        )

    def hit_pages(
        self, blocks: Sequence[KVCacheBlock]
    ) -> tuple[list[list[KVCacheBlock]], list[KVCacheBlock | None]]:
        """Of each page of a prefix hit, all parts' device blocks, none if only the host has it; and its host
        block, None if only the device has it.

        vLLM has looked the hit up just now.
        """
        on_device = [[] if block.pool is self else self.on_device.of(block) for block in blocks]
        if not self.num_published:
            return on_device, [None] * len(blocks)
        pages = zip(blocks, on_device, strict=True)
        return on_device, [self.published(block) if found else block for block, found in pages]

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
        """Free and leased blocks add up to the pool, no free block is leased, and lookups find what is there.

        Raises AssertionError.
        """
        free = {block.block_id for block in self.free_block_queue.get_all_free_blocks()}
        leased = [b.block_id for b in self.blocks if b.ref_cnt > 0 and not b.is_null]
        assert free.isdisjoint(leased), "a leased host block is in the free queue"
        assert len(free) + len(leased) == self.num_gpu_blocks - 1, "host blocks lost"
        published = sum(block.block_hash is not None for block in self.blocks)
        assert published == self.num_published, "published host blocks miscounted"
        self.on_device.check_integrity()
