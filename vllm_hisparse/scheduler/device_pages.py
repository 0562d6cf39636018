"""Pages that a prefix lookup finds on the device, all parts of a page at once.

vLLM keeps the block of every part under a key of its own. Looking up each page of a long prompt in each part
is most of what it takes to admit a request whose prefix is there. So the blocks of a page that every part has
published are kept together, as looking up part by part would find them, from the publication until the first
of them is handed out again.
"""

from collections.abc import Callable, Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)

__all__ = ["DevicePages"]


class DevicePages:
    """The published pages of one device pool, which tells of every block that loses its page."""

    def __init__(self, pool: BlockPool, group_ids: Sequence[int]) -> None:
        """`group_ids`: the resident groups, one a part."""
        self._pool = pool
        # What vLLM appends to a page's hash to make a part's key of it.
        self._suffixes = [make_block_hash_with_group_id(BlockHash(b""), group_id) for group_id in group_ids]
        self._pages: dict[BlockHash, list[KVCacheBlock]] = {}  # [part]
        self._remove, self._reset = pool._remove_cached_block_hashes, pool.reset_prefix_cache
        pool._remove_cached_block_hashes, pool.reset_prefix_cache = self._removed, self.reset

    def find(self, block_hash: BlockHash) -> list[KVCacheBlock] | None:
        """The page's blocks, one a part, or None unless every part has its own. Not to be changed."""
        return self._pages.get(block_hash)

    def of(self, block: KVCacheBlock) -> list[KVCacheBlock]:
        """All blocks of a page that was found, by one of them."""
        assert block.block_hash is not None
        return self._pages[get_block_hash(block.block_hash)]

    def note_published(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Every part has published its blocks of some pages, of which these are one part's.

        Those without a hash were left out.
        """
        for block in blocks:
            if block.block_hash is not None:
                self._update(get_block_hash(block.block_hash))

    def reset(self) -> bool:
        """See `BlockPool.reset_prefix_cache`."""
        done = self._reset()
        if done:
            self._pages.clear()
        return done

    def _removed(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        """See `BlockPool._remove_cached_block_hashes`, by way of which a block loses what lookups find."""
        keys = self._remove(block)
        for key in keys:
            block_hash = get_block_hash(key)
            if any(known is block for known in self._pages.get(block_hash, ())):
                self._update(block_hash)
        return keys

    def _update(self, block_hash: BlockHash) -> None:
        blocks = self._find_by_part(block_hash)
        if blocks is None:
            self._pages.pop(block_hash, None)
        else:
            self._pages[block_hash] = blocks

    def _find_by_part(self, block_hash: BlockHash) -> list[KVCacheBlock] | None:
        """What `BlockPool.get_cached_block` finds, without making the groups' part of a key each time."""
        find: Callable[..., KVCacheBlock | None] = self._pool.cached_block_hash_to_block.get_one_block
        blocks = []
        for suffix in self._suffixes:
            block = find(block_hash + suffix)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def check_integrity(self) -> None:
        """What is found is what looking up part by part finds. Raises AssertionError."""
        hashes = {get_block_hash(b.block_hash) for b in self._pool.blocks if b.block_hash is not None}
        found = {block_hash: self._find_by_part(block_hash) for block_hash in hashes}
        expected = {h: [b.block_id for b in blocks] for h, blocks in found.items() if blocks is not None}
        known = {h: [b.block_id for b in blocks] for h, blocks in self._pages.items()}
        assert known == expected, "pages on the device are found by part only"
