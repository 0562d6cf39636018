"""Sizes of hot regions: larger ones miss less, as long as nobody else needs the blocks.

What a region has grown beyond the size it was granted with goes back before any page leaves the device. Of
the rest, down to the floor, a block saves about twenty times the reads that a resident page saves: of a
context of 74K tokens and a top-k of 2048, a page holds two of a step's selected rows, while the second top-k
of a region's rows spares 11 misses a block (17 points of the miss rate over 32 blocks, docs/policy.md). So
that goes only when no page is left to give.
"""

from typing import TYPE_CHECKING

from .records import Record

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["MAX_GROWN_BLOCKS", "MIN_MISS_SHARE", "RegionSizes"]

MAX_GROWN_BLOCKS = 16  # a step and part: growing is never urgent
MIN_MISS_SHARE = 0.01  # of the selected rows; a region that misses less is large enough


class RegionSizes:
    """Who holds a region, and which of them should change its size."""

    def __init__(self, coordinator: "HiSparseCoordinator") -> None:
        self._coordinator = coordinator
        self._parts = coordinator.layout.num_parts
        num_groups = len(coordinator.layout.index_groups)
        self._min_misses = MIN_MISS_SHARE * coordinator.config.top_k * num_groups
        self.held: dict[Record, None] = {}  # requests with a region, and some that have just returned theirs
        self.has_misses = False  # some were measured since regions last grew

    def holders(self) -> list[Record]:
        """Requests with a region that may change. An import passes through the request's region."""
        return [r for r in self.held if r.region is not None and not r.is_importing]

    def can_shrink(self) -> bool:
        """Whether a region that may change is larger than the floor."""
        regions = self._coordinator.regions
        if not regions.num_excess_blocks:
            return False
        return any(r.region is not None and regions.excess(r.region) > 0 for r in self.holders())

    def take_grown(self, num_blocks: int) -> None:
        """Take what regions have above their start size to free `num_blocks` blocks."""
        regions = self._coordinator.regions
        if regions.num_grown_blocks:
            self._shrink(num_blocks, regions.start)

    def take_excess(self, num_blocks: int) -> None:
        """Take what regions have above the floor to free `num_blocks` blocks."""
        regions = self._coordinator.regions
        if regions.num_excess_blocks:
            self._shrink(num_blocks, regions.floor)

    def _shrink(self, num_blocks: int, kept: int) -> None:
        """Those that miss least go first, down to `kept` blocks of each part."""
        for record in sorted(self.holders(), key=lambda r: r.num_misses) if num_blocks > 0 else ():
            assert record.region is not None
            cut = min(record.region.num_blocks - kept, -(-num_blocks // self._parts))
            if cut > 0:
                self._coordinator.shrink_region(record, cut)
                num_blocks -= cut * self._parts
            if num_blocks <= 0:
                return

    def grow(self, num_blocks: int) -> None:
        """Let regions grow by `num_blocks` blocks at most, those that miss most first; once a measurement."""
        if not self.has_misses:
            return
        self.has_misses = False
        budget = min(MAX_GROWN_BLOCKS, num_blocks // self._parts)
        regions = self._coordinator.regions
        for record in sorted(self.holders(), key=lambda r: -r.num_misses):
            assert record.region is not None
            if budget <= 0 or record.num_misses < self._min_misses:
                return
            grown = min(budget, regions.room_to_grow(record.region), -(-record.region.num_blocks // 4))
            if grown > 0:
                self._coordinator.grow_region(record, grown)
                record.num_misses = 0.0  # until it has been measured again
                budget -= grown
