"""Hot regions: who holds which device blocks for the rows that selections bring back."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_hisparse.planning.layout import Layout

__all__ = ["Cut", "Region", "RegionLeases"]


@dataclass(eq=False)
class Region:
    """A leased hot region.

    Grows and shrinks by whole blocks of every part; surviving slots keep their rows.
    """

    region_id: int  # row of the resolver's state tables
    page_tokens: int
    blocks: list[list[KVCacheBlock]]  # [part][block], in slot order
    num_intact: int = (
        0  # slots with the blocks of the latest message: a region may shrink and grow between two
    )

    @property
    def num_blocks(self) -> int:
        """Blocks of each part."""
        return len(self.blocks[0])

    @property
    def num_rows(self) -> int:
        """Usable slots."""
        return self.num_blocks * self.page_tokens

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        """Device block ids, [part][block]."""
        return tuple(tuple(b.block_id for b in part) for part in self.blocks)


@dataclass(frozen=True)
class Cut:
    """Blocks that a region has lost, leased until every rank has acknowledged that their slots are dead."""

    blocks: list[KVCacheBlock]
    region: Region | None  # set if the whole region goes: its id is free again with the blocks


@dataclass
class RegionCounters:
    """Events since start."""

    granted: int = 0
    returned: int = 0
    grown_blocks: int = 0
    shrunk_blocks: int = 0


class RegionLeases:
    """Leases regions from the device block pool; there are as many region ids as the state tables have rows.

    A region stays out of vLLM's block tables, whose rows only append: one given back and granted again would
    overflow them.
    """

    def __init__(self, pool: BlockPool, layout: Layout) -> None:
        self._pool = pool
        self._layout = layout
        self._free_ids = list(range(layout.num_regions - 1, -1, -1))
        self._leased: dict[int, Region] = {}
        self.start = layout.start_hot_blocks  # blocks of each part of a new region
        self.floor = layout.floor_hot_blocks  # those that hold one step's selections
        self.num_excess_blocks = 0  # of each part above the floor, of all regions that are held
        self.num_grown_blocks = 0  # of these, above the start size
        self.counters = RegionCounters()

    @property
    def num_blocks(self) -> int:
        """Device blocks that a new region takes, of all parts."""
        return self._layout.num_parts * self._layout.start_hot_blocks

    @property
    def num_free_ids(self) -> int:
        """Regions that can still be named."""
        return len(self._free_ids)

    @property
    def leased(self) -> Collection[Region]:
        """All leased regions."""
        return self._leased.values()

    @property
    def num_leased_rows(self) -> int:
        """Slots of all leased regions together."""
        return sum(r.num_rows for r in self._leased.values())

    def room_to_grow(self, region: Region) -> int:
        """Blocks of each part that the region may still get."""
        return self._layout.max_hot_blocks - region.num_blocks

    def excess(self, region: Region) -> int:
        """Blocks of each part above the floor, which holds one step's selections."""
        return region.num_blocks - self._layout.floor_hot_blocks

    def lease(self) -> Region:
        """Take a region id and blocks for the start size.

        The caller has checked `num_free_ids` and the pool's free blocks.
        """
        parts = self._take(self._layout.start_hot_blocks)
        region = Region(self._free_ids.pop(), self._layout.page_tokens, parts)
        self._leased[region.region_id] = region
        self._resized(self.floor, region.num_blocks)
        self.counters.granted += 1
        return region

    def grow(self, region: Region, num_blocks: int) -> None:
        """Add blocks to every part. The caller has checked the pool's free blocks and `room_to_grow`."""
        for part, blocks in zip(region.blocks, self._take(num_blocks), strict=True):
            part.extend(blocks)
        self._resized(region.num_blocks - num_blocks, region.num_blocks)
        self.counters.grown_blocks += num_blocks * self._layout.num_parts

    def shrink(self, region: Region, num_blocks: int) -> Cut:
        """Take the last blocks of every part away."""
        blocks = [b for part in region.blocks for b in part[-num_blocks:]]
        for part in region.blocks:
            del part[-num_blocks:]
        region.num_intact = min(region.num_intact, region.num_rows)
        self._resized(region.num_blocks + num_blocks, region.num_blocks)
        self.counters.shrunk_blocks += len(blocks)
        return Cut(blocks, None)

    def close(self, region: Region) -> Cut:
        """Take the whole region away."""
        self._resized(region.num_blocks, self.floor)
        self.counters.returned += 1
        return Cut([b for part in region.blocks for b in part], region)

    def release(self, cut: Cut) -> None:
        """Give a cut's blocks, and the id of a closed region, back to their pools."""
        if cut.region is not None:
            del self._leased[cut.region.region_id]
            self._free_ids.append(cut.region.region_id)
        self._pool.free_blocks(cut.blocks)

    def _resized(self, before: int, after: int) -> None:
        self.num_excess_blocks += after - before
        self.num_grown_blocks += max(after - self.start, 0) - max(before - self.start, 0)

    def _take(self, num_blocks: int) -> list[list[KVCacheBlock]]:
        taken = self._pool.get_new_blocks(self._layout.num_parts * num_blocks)
        return [taken[p * num_blocks : (p + 1) * num_blocks] for p in range(self._layout.num_parts)]

    def check_integrity(self, held: Sequence[Region], cuts: Iterable[Cut]) -> None:
        """Ids balance and every lease has exactly one holder: a request or a cut. Raises AssertionError."""
        cuts = list(cuts)
        assert len(self._free_ids) + len(self._leased) == self._layout.num_regions, "region ids lost"
        owners = [r.region_id for r in held] + [c.region.region_id for c in cuts if c.region is not None]
        assert sorted(owners) == sorted(self._leased), "regions without a holder"
        excess, grown = self.num_excess_blocks, self.num_grown_blocks
        assert sum(self.excess(r) for r in held) == excess, "excess blocks miscounted"
        assert sum(max(r.num_blocks - self.start, 0) for r in held) == grown, "grown blocks miscounted"
        blocks = [b for r in held for part in r.blocks for b in part] + [b for c in cuts for b in c.blocks]
        assert len({b.block_id for b in blocks}) == len(blocks), "a block is in two regions"
        assert all(b.ref_cnt == 1 for b in blocks), "a region's block is not leased once"
