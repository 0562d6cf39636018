"""What the workers do not know yet: who has which request slot, and what has changed of pages and regions."""

from typing import NamedTuple

from vllm_hisparse.messages import Binding, PageWrite, RegionWrite, Sampling

from .leases import PageLeases
from .records import Record

__all__ = ["Outbox"]


class Changes(NamedTuple):
    """The fields of a `StepMessage` by these names."""

    unbind: tuple[str, ...]
    bind: tuple[Binding, ...]
    regions: tuple[RegionWrite, ...]
    pages: tuple[PageWrite, ...]
    sampling: Sampling | None


NOTHING = Changes((), (), (), (), None)


class Outbox:
    """Request slots, by which the workers know requests, and what the next message says of each."""

    def __init__(self, max_requests: int, leases: PageLeases) -> None:
        self._leases = leases
        self.free_slots = list(range(max_requests - 1, -1, -1))
        self.by_slot: dict[int, Record] = {}
        self.grown: dict[Record, None] = {}  # have pages that the workers do not know
        self.sampling = Sampling()  # that somebody may need
        self._known_sampling = self.sampling  # to the workers
        self._bound: list[Binding] = []
        self._unbound: list[str] = []
        self._regions: dict[int, RegionWrite] = {}  # by slot: the last one of a step counts

    def bind(self, record: Record) -> None:
        """Give a request that has no slot one; all it holds is sent."""
        record.slot = self.free_slots.pop()
        self.by_slot[record.slot] = record
        self._bound.append(Binding(record.request_id, record.slot))
        self.grown[record] = None
        if record.region is not None:
            self.write_region(record)

    def release(self, record: Record) -> None:
        """The request decodes no more; nothing is sent of it but that its slot is free."""
        if record.slot >= 0:
            self.free_slots.append(record.slot)
            del self.by_slot[record.slot]
            self._regions.pop(record.slot, None)
            self._unbound.append(record.request_id)
            record.slot = -1
        self.grown.pop(record, None)

    def write_region(self, record: Record) -> None:
        """The request's region, or that it has none, is sent; with its slot, if it has none yet."""
        region = record.region
        if record.slot < 0:
            return
        self._regions[record.slot] = (
            RegionWrite(record.slot, -1, 0, 0, ())
            if region is None
            else RegionWrite(
                record.slot, region.region_id, region.num_rows, region.num_intact, region.block_ids
            )
        )

    def take(self) -> Changes:
        """Everything since the last call."""
        pages = self._take_pages()
        sampling = self._take_sampling()
        if not (pages or sampling or self._bound or self._unbound or self._regions):
            return NOTHING
        unbound, self._unbound = self._unbound, []
        bound, self._bound = self._bound, []
        return Changes(tuple(unbound), tuple(bound), self._take_regions(), tuple(pages), sampling)

    def _take_regions(self) -> tuple[RegionWrite, ...]:
        writes, self._regions = self._regions, {}
        for slot in writes:
            record = self.by_slot.get(slot)
            if record is not None and record.region is not None:
                record.region.num_intact = record.region.num_rows
        return tuple(writes.values())

    def _take_sampling(self) -> Sampling | None:
        if self.sampling == self._known_sampling:
            return None
        self._known_sampling = self.sampling
        return self.sampling

    def _take_pages(self) -> list[PageWrite]:
        pages = self._leases.take_changes()
        for record in [r for r in self.grown if r.slot >= 0] if self.grown else ():
            pages += self._leases.entries(record, record.num_sent, len(record.pages))
            record.num_sent = len(record.pages)
            del self.grown[record]
        return pages
