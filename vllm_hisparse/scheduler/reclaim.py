"""Device blocks that can be freed at once: how many there are, and freeing them.

Both follow one plan. vLLM asks first, adopts a prefix hit, and takes then, so the plan that answers counts
the hit's blocks as adopted, and the plan that is carried out finds them adopted: the same pages come out.
What is promised is therefore there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .admission import NO_HIT, Hit
from .records import Record
from .victims import Sharers, Victims

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["Reclaimer"]


@dataclass(frozen=True)
class Offer:
    """What some requests could give up together."""

    members: Sharers
    pages: list[int]  # coldest first
    needy: list[Record]  # of the members, those who get a region for it
    num_freed: int  # blocks, net of those regions


class Reclaimer:
    """Takes pages from requests that can read them from the host, in the order of `victims.py`.

    A request gives up pages only if that frees more than the region takes that it needs for it.
    """

    def __init__(self, coordinator: "HiSparseCoordinator") -> None:
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._parts = coordinator.layout.num_parts
        self.victims = Victims(coordinator)
        self._is_exhausted = False  # there is nothing until something is noted
        self.num_clean = 0  # since start: pages that could be given up from then on
        self.num_changes = 0  # since start: whatever else may have made more of them go

    def note_clean(self, record: Record) -> None:
        """The request may have one more page whose host copy exists or is on its stream."""
        self.victims.clean[record] = None
        self.num_clean += 1
        self.note_room()

    def note_change(self) -> None:
        """Requests hold other regions or pages than before."""
        self.num_changes += 1
        self.note_room()

    def note_room(self) -> None:
        """Leases, regions or their ids have gone back."""
        self._is_exhausted = False

    def forget(self, record: Record) -> None:
        """The request is gone, which is a change to be noted."""
        self.victims.clean.pop(record, None)

    def num_reclaimable(self, missing: int, hit: Hit = NO_HIT, newcomer: Record | None = None) -> int:
        """Blocks, net of regions, that `reclaim` would free once `hit` is adopted, counted up to `missing`.

        `newcomer`: see `reclaim`; None for a request that has no pages yet, but for `hit`. A pure query.
        """
        if missing <= 0:
            return 0
        offers = [] if self._is_exhausted else list(self._plan(missing, hit, newcomer))
        total = sum(offer.num_freed for offer in offers)
        if total >= missing or not hit.num_clean:
            return total
        # The pages of the hit itself go last.
        cost = 0 if hit.num_host_only else self._coordinator.regions.num_blocks
        own = hit.num_clean * self._parts - cost
        free_ids = self._free_ids(hit, newcomer) - sum(len(offer.needy) for offer in offers)
        return total + (own if own > 0 and (not cost or free_ids > 0) else 0)

    def reclaim(self, num_free: int, newcomer: Record | None = None) -> None:
        """Return leases until the pool has `num_free` free blocks or nothing more can be gained.

        `newcomer`, for whom room is made, gives up its own pages only after all others; if it needs a
        region, one is kept for it.
        """
        missing = num_free - self._pool.get_num_free_blocks()
        if missing <= 0 or self._is_exhausted:
            return
        for offer in list(self._plan(missing, NO_HIT, newcomer)):
            for page in reversed(offer.pages):  # what is released last is reused first
                for record in offer.members:
                    self._coordinator.leases.unpin(record, page)
            for record in offer.needy:
                self._coordinator.grant_region(record)
        self._is_exhausted = newcomer is None and self._pool.get_num_free_blocks() < num_free

    def _plan(self, missing: int, hit: Hit, newcomer: Record | None) -> Iterator[Offer]:
        """What would be given up to free `missing` blocks, or as many of them as there are."""
        size = self._coordinator.regions.num_blocks
        free_ids = self._free_ids(hit, newcomer)
        granted: set[Record] = set()
        for members in self.victims.in_order(hit.block_ids, newcomer):
            needy = self.victims.without_region(members, granted)
            if len(needy) > free_ids:
                continue
            cost = size * len(needy)
            pages = self.victims.pages(members, missing + cost, hit.block_ids)
            num_freed = len(pages) * self._parts - cost
            if num_freed <= 0:
                continue
            yield Offer(members, pages, needy, num_freed)
            missing -= num_freed
            if missing <= 0:
                return
            free_ids -= len(needy)
            granted.update(needy)

    def _free_ids(self, hit: Hit, newcomer: Record | None) -> int:
        """Regions that others can be granted."""
        needs_region = newcomer is not None and newcomer.region is None and newcomer.needs_region
        return self._coordinator.regions.num_free_ids - (hit.num_host_only > 0 or needs_region)
