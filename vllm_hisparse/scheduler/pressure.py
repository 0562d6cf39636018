"""Which pages leave the device, which return, and when. Decisions only; the coordinator carries them out.

Levels of free device blocks, less what is kept for prefixes (`reuse.py`), from an idle pool to a full one:

- above *high*: nothing is copied; requests whose pages are away get them back, a few a step, if all of them
  fit above high. Which pages are hot is sampled only below, or if a request lacks blocks.
- below *high*: sealed pages are copied to the host (materialised) so that their leases can be returned at
  once later. With `eager_host_mirror` off this starts at *low* only. At any level it starts when a request
  waits for blocks, or a running one cannot grow.
- below *low*: leases of materialised pages go back, just enough to reach low again.
- above *high* too: regions of requests whose selections miss grow, as long as the level stays above high.
  Below *low* what they have grown goes back first, and what else they have above the floor last.
- no free block: whatever an allocation misses is reclaimed on the spot, in the same order.

A request gives up pages only together with a hot region to read them through, and only if that frees more
than the region takes (`reclaim.py`). Requests that already have a region go first, then those with most to
give; within a request the tail goes first. Pages that several requests share go last (`victims.py`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_hisparse.messages import Sampling

from .elastic import RegionSizes
from .records import Record
from .residency import PageState
from .transfers import Transfer

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["MAX_RESTORED_PAGES", "MAX_SPILLED_PAGES", "Pressure"]

MAX_SPILLED_PAGES = 256  # a step: the pages that one 16K-token prefill step seals
MAX_RESTORED_PAGES = 64  # a step: restores share the link with misses, which decode waits for


class Pressure:
    """The watermark policy of one coordinator."""

    def __init__(self, coordinator: "HiSparseCoordinator") -> None:
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._order = coordinator.leases.order
        self._reclaimer = coordinator.reclaimer
        self._parts = coordinator.layout.num_parts
        config = coordinator.config
        self.low = config.low_blocks(coordinator.pool.num_gpu_blocks)
        self.high = config.high_blocks(coordinator.pool.num_gpu_blocks)
        self.regions = RegionSizes(coordinator)
        self._always_host = config.always_host
        everything = self._pool.num_gpu_blocks + 1
        self._copy_below = (
            everything if config.always_host else self.high if config.eager_host_mirror else self.low
        )
        self._unsealed: dict[Record, None] = {}  # may have pages to materialise
        self._fresh: set[Record] = set()  # started on a prefix hit in this step
        self._restorable_at = 0  # fewer free blocks than this restore nobody; 0: to be found out
        self._is_short = False  # a running request could not be given blocks in this step
        self.num_crossings = {"below_low": 0, "between": 0, "above_high": 0}  # since start, by level entered
        self._level = "above_high"

    # ---- events

    def note_growth(self, record: Record) -> None:
        """The request has new pages."""
        self._unsealed[record] = None

    def note_adoption(self, record: Record) -> None:
        """The request starts on a prefix hit. The step that hits a page may be the one that writes it."""
        self._fresh.add(record)
        self._reclaimer.note_clean(record)

    def note_change(self) -> None:
        """A request has got a region, or is gone."""
        self._reclaimer.note_change()
        self._restorable_at = 0

    def note_copies(self, enqueued: Sequence[Transfer], completed: Sequence[Transfer]) -> None:
        """Every rank has the former on its stream and has seen the latter end."""
        if not enqueued and not completed:
            return
        self._reclaimer.note_room()
        self._restorable_at = 0
        spills = [copy for transfer in enqueued for copy in transfer.spills]
        restores = [copy for transfer in completed for copy in transfer.restores]
        for copy in (*spills, *restores):
            if copy.record.alive and not copy.record.is_lent:
                self._reclaimer.note_clean(copy.record)
        for copy in [c for t in completed if t.has_failed for c in t.spills if c.record.alive]:
            copy.record.next_spill = min(copy.record.next_spill, copy.page)
            self.note_growth(copy.record)

    def note_shortage(self) -> bool:
        """A running request cannot be given blocks. Returns whether this step's message can change that."""
        gaining = [r for r in self._coordinator.records.values() if self._gains_by_copying(r)]
        self._unsealed.update(dict.fromkeys(gaining))  # their last page may be sealed without having grown
        self._is_short = bool(gaining) or self.regions.can_shrink()
        return self._is_short

    def note_region(self, record: Record) -> None:
        """The request got a hot region."""
        self.regions.held[record] = None
        self.note_change()

    def forget(self, record: Record) -> None:
        """The request is gone."""
        self._unsealed.pop(record, None)
        self._fresh.discard(record)
        self.regions.held.pop(record, None)
        self._reclaimer.forget(record)
        self.note_change()

    def relieve(self) -> None:
        """Return leases until the low watermark is reached again."""
        self._reach_low(self._order.num_spare())

    def _reach_low(self, num_spare: int) -> None:
        """Reclaim what `num_spare` lacks; what is kept for prefixes stays on top of it."""
        if num_spare < self.low:
            self._reclaimer.reclaim(self._pool.get_num_free_blocks() + self.low - num_spare)

    def _gains_by_copying(self, record: Record) -> bool:
        """Whether copies, planned or possible, would let the record give up more than its region takes."""
        coordinator = self._coordinator
        if record.is_parked:
            return False
        num_pages = record.pages.count(PageState.SPILLING)
        if coordinator.host_pool.get_num_free_blocks() > 0 or len(coordinator.ledger) > 0:
            written = record.num_written(coordinator.num_reprefillable)
            num_pages += sum(record.pages[p] is PageState.DIRTY for p in range(record.next_spill, written))
        cost = coordinator.regions.num_blocks * len(self._reclaimer.victims.without_region((record,)))
        if not num_pages or (cost and not coordinator.regions.num_free_ids):
            return False
        return (num_pages + record.pages.num_unpinnable) * self._parts > cost

    # ---- once a step

    def step(self, is_waited_for: bool) -> None:
        """After a step's allocations: materialise, relieve, restore, each if its level says so.

        `is_waited_for`: a request could not be admitted; with copies there is something to reclaim for it.
        """
        free = self._order.num_spare()
        self._note_level(free)
        may_reclaim = free <= self.high or self._is_short or is_waited_for
        if free < self._copy_below or self._is_short or is_waited_for:
            self._materialise()
        if self._always_host:
            self._evict_all()
        if self._is_short:
            self.regions.take_excess(self._pool.num_gpu_blocks)
        if free < self.low:
            self.regions.take_grown(self.low - free - self._num_returning())
            self._reach_low(free + self._num_returning())
            self.regions.take_excess(self.low - self._order.num_spare() - self._num_returning())
        elif free > self.high and self.regions.held and not self._always_host:
            self._restore()
            self.regions.grow(self._order.num_spare() - self.high)
        self._fresh.clear()
        self._is_short = False
        has_regions = len(self._coordinator.regions.leased) > 0
        self._coordinator.outbox.sampling = Sampling(misses=has_regions, heat=may_reclaim)

    def _num_returning(self) -> int:
        """Blocks of regions that come back as soon as their slots are acknowledged as dead."""
        coordinator = self._coordinator
        return sum(len(cut.blocks) for t in (*coordinator.ledger, coordinator.transfer) for cut in t.cuts)

    def _evict_all(self) -> None:
        """The option `always_host`: decoding requests keep nothing on the device that the host has."""
        coordinator = self._coordinator
        for record in list(self._reclaimer.victims.clean):
            request = record.request
            if request.num_computed_tokens < request.num_prompt_tokens:
                continue
            if record.region is None:
                free = self._pool.get_num_free_blocks()
                if not coordinator.regions.num_free_ids or free < coordinator.regions.num_blocks:
                    continue
                coordinator.grant_region(record)
            for page in record.pages.pages_in(PageState.CLEAN):
                coordinator.leases.evict(record, page)

    def _note_level(self, free: int) -> None:
        level = "below_low" if free < self.low else "above_high" if free > self.high else "between"
        if level != self._level:
            self._level = level
            self.num_crossings[level] += 1

    def _materialise(self) -> None:
        budget = MAX_SPILLED_PAGES
        for record in [r for r in self._unsealed if r not in self._fresh and not r.is_parked]:
            sealed = record.num_sealed(self._coordinator.num_reprefillable)
            while budget and record.next_spill < sealed:
                page = record.next_spill
                if record.pages[page] is PageState.DIRTY:
                    if not self._coordinator.leases.spill(record, page, self._coordinator.transfer):
                        break
                    budget -= 1
                    self._reclaimer.note_clean(record)  # if the host had the page already
                record.next_spill += 1
            if record.next_spill >= len(record.pages) - 1:
                del self._unsealed[record]  # until it grows

    def _restore(self) -> None:
        """Bring back the pages of requests that fit above high as a whole."""
        if self._order.num_spare() < self._restorable_at:
            return
        budget, needed = MAX_RESTORED_PAGES, self._pool.num_gpu_blocks
        for record in list(self.regions.held):
            if record.region is None:
                del self.regions.held[record]
                continue
            if record.is_importing:  # vLLM publishes its pages when it is scheduled
                needed = 0
                continue
            away = record.pages.count(PageState.HOST, PageState.LOOSE, PageState.DRAINING)
            if self._order.num_spare() < self.high + away * self._parts:
                needed = min(needed, self.high + away * self._parts)
                continue
            needed = 0
            budget -= self._bring_back(record, budget)
            if not budget:
                return
        self._restorable_at = needed

    def _bring_back(self, record: Record, budget: int) -> int:
        """Repin what is still there and restore up to `budget` pages. Returns how many are being restored."""
        leases = self._coordinator.leases
        for page in record.pages.pages_in(PageState.LOOSE, PageState.DRAINING):
            leases.repin(record, page)
        self._reclaimer.note_clean(record)
        self._reclaimer.note_change()
        away = [page for page in record.pages.pages_in(PageState.HOST) if not leases.rejoin(record, page)]
        restored = away[:budget]
        for page in restored:
            leases.restore(record, page, self._coordinator.transfer)
        if not record.needs_region:
            self._coordinator.return_region(record)
            del self.regions.held[record]
        return len(restored)
