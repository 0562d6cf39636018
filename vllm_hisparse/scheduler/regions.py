"""Hot regions: who holds which device blocks for the rows that selections bring back."""

from collections.abc import Collection
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_hisparse.planning.layout import Layout

__all__ = ["Region", "RegionLeases"]


@dataclass(frozen=True, eq=False)
class Region:
    """A leased hot region: `len(blocks[part])` blocks of each part hold `num_rows` slots."""

    region_id: int  # row of the resolver's state tables
    blocks: tuple[tuple[KVCacheBlock, ...], ...]  # [part][block]
    num_rows: int

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        """Device block ids, [part][block]."""
        return tuple(tuple(b.block_id for b in part) for part in self.blocks)


class RegionLeases:
    """Leases regions of one size from the device block pool; there are as many region ids as the state tables
    have rows.

    A region stays out of vLLM's block tables, whose rows only append: one given back and granted again would
    overflow them.
    """

    def __init__(self, pool: BlockPool, layout: Layout) -> None:
        self._pool = pool
        self._num_regions = layout.num_regions
        self._free_ids = list(range(layout.num_regions - 1, -1, -1))
        self._num_parts = layout.num_parts
        self._blocks_per_part = layout.start_hot_blocks
        self._num_rows = layout.start_hot_blocks * layout.page_tokens
        self._leased: dict[int, Region] = {}
        self.num_granted = 0  # since start
        self.num_returned = 0

    @property
    def num_blocks(self) -> int:
        """Device blocks a region takes."""
        return self._num_parts * self._blocks_per_part

    @property
    def leased(self) -> Collection[Region]:
        """All leased regions."""
        return self._leased.values()

    @property
    def num_leased_rows(self) -> int:
        """Slots of all leased regions together."""
        return sum(r.num_rows for r in self._leased.values())

    @property
    def num_free_ids(self) -> int:
        """Regions that can still be named."""
        return len(self._free_ids)

    def lease(self) -> Region:
        """Take a region id and its blocks.

        The caller has checked `num_free_ids` and the pool's free blocks.
        """
        blocks = self._pool.get_new_blocks(self.num_blocks)
        n = self._blocks_per_part
        parts = tuple(tuple(blocks[p * n : (p + 1) * n]) for p in range(self._num_parts))
        region = Region(self._free_ids.pop(), parts, self._num_rows)
        self._leased[region.region_id] = region
        self.num_granted += 1
        return region

    def release(self, region: Region) -> None:
        """Give the blocks and the id back. Only once no step in flight uses the region."""
        del self._leased[region.region_id]
        self.num_returned += 1
        self._free_ids.append(region.region_id)
        self._pool.free_blocks(b for part in region.blocks for b in part)

    def check_integrity(self, held: list[Region]) -> None:
        """Ids balance and every lease has exactly one holder in `held`. Raises AssertionError."""
        assert len(self._free_ids) + len(self._leased) == self._num_regions, "region ids lost"
        assert sorted(r.region_id for r in held) == sorted(self._leased), "regions without a holder"
        for region in self._leased.values():
            assert all(b.ref_cnt == 1 for part in region.blocks for b in part), (
                "a region's block is not leased once"
            )
