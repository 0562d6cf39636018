"""Requests whose prompt another engine has computed: where their pages land, and what that takes.

A prompt lands on the device if its pages fit there without pushing others out, else in the host pool. That is
decided when vLLM first asks and kept while the request waits. vLLM holds the request's blocks from the moment
it admits the import until the last rank has ended its transfer, whatever becomes of the request, so an import
has no leases of its own: pages on the device lie in the request's rows, host pages in its host row, and what
passes through the device on its way to the host passes through the request's hot region, which nobody reads
before the request decodes. Whatever has been admitted can therefore come to its end.

The last page is the one that the request goes on writing: it always lands on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from .records import Record
from .residency import Event, PageState

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["Import", "Imports", "Landing"]


class Landing(Enum):
    """Where an import's pages go."""

    DEVICE = "device"
    HOST = "host"


@dataclass(eq=False)
class Import:
    """One request's import, from vLLM's first question until its transfer has ended."""

    landing: Landing
    from_host: frozenset[int]  # pages that the other engine reads from its host pool, so they land in ours
    first_page: int = 0  # pages before it were a prefix hit
    first_key_page: int = 0  # and the indexer's keys of pages before this one; never more pages than that
    host_pages: tuple[int, ...] = ()  # those that land on the host, ascending
    epoch: int = -1  # of the host pool when it was admitted


@dataclass
class ImportCounters:
    """Imports since start."""

    device: int = 0  # admitted, with pages to land on the device
    host: int = 0  # admitted, with pages to land on the host
    arrived: int = 0
    failed: int = 0
    cancelled: int = 0  # their requests have ended before


class Imports:
    """The imports of one coordinator."""

    def __init__(self, coordinator: "HiSparseCoordinator") -> None:
        self._coordinator = coordinator
        self._parts = coordinator.layout.num_parts
        self._page_tokens = coordinator.layout.page_tokens
        self._indexer_tokens = coordinator.layout.page_tokens * coordinator.layout.indexer_pages
        self._imports: dict[str, Import] = {}
        self.counters = ImportCounters()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._imports

    def __getitem__(self, request_id: str) -> Import:
        return self._imports[request_id]

    def choose(self, request_id: str, num_tokens: int, from_host: Sequence[int] = ()) -> Landing | None:
        """Where `num_tokens` tokens of the request land; asked again, the answer stays.

        `from_host`: pages that the other engine has in its host pool only. None if not even an idle engine
        could admit the import.
        """
        known = self._imports.get(request_id)
        if known is None:
            landing = self._landing(num_tokens, bool(from_host))
            if landing is None:
                return None
            known = self._imports[request_id] = Import(landing, frozenset(from_host))
        return known.landing

    def _landing(self, num_tokens: int, needs_region: bool) -> Landing | None:
        coordinator = self._coordinator
        pool = coordinator.pool
        num_pages = -(-num_tokens // self._page_tokens)
        blocks = -(-num_tokens // self._indexer_tokens) + coordinator.num_reserved
        region = coordinator.regions.num_blocks
        on_device = blocks + num_pages * self._parts + (region if needs_region else 0)
        if coordinator.leases.order.num_spare() - on_device >= coordinator.pressure.low:
            return Landing.DEVICE
        fits_host = num_pages <= coordinator.host_pool.num_gpu_blocks  # the last page needs no block there
        if fits_host and blocks + region + self._parts < pool.num_gpu_blocks:
            return Landing.HOST
        return Landing.DEVICE if on_device < pool.num_gpu_blocks else None

    # ---- what the managers ask

    def host_pages(self, request_id: str, first_page: int, num_tokens: int) -> tuple[int, ...]:
        """Pages from `first_page` to `num_tokens` tokens that land on the host; a pure query."""
        known = self._imports.get(request_id)
        if known is None:
            return ()
        pages = range(first_page, (num_tokens - 1) // self._page_tokens)
        return tuple(p for p in pages if known.landing is Landing.HOST or p in known.from_host)

    def land(self, record: Record, num_local_tokens: int, num_tokens: int) -> None:
        """Lease what lands on the host, and make room on the device for the rest.

        vLLM has found that both are there; the resident managers allocate the other pages' blocks.
        """
        coordinator = self._coordinator
        request_id = record.request_id
        known = self._imports[request_id]
        known.first_key_page = num_local_tokens // self._page_tokens
        known.first_page = len(record.pages)
        known.host_pages = self.host_pages(request_id, known.first_page, num_tokens)
        known.epoch = coordinator.host_pool.epoch
        record.is_importing = True
        on_host = set(known.host_pages)
        for page in range(known.first_page, -(-num_tokens // self._page_tokens)):
            if page in on_host:
                coordinator.leases.take_host_block(record, page)
            record.pages.append(PageState.IMPORTING_HOST if page in on_host else PageState.IMPORTING)
        coordinator.make_room(request_id, num_tokens, num_landing=len(on_host))
        self.counters.device += known.landing is Landing.DEVICE
        self.counters.host += known.landing is Landing.HOST

    # ---- how it ends

    def arrived(self, request_id: str) -> None:
        """Every rank has all pages: they are as good as written here, and found by others on the host.

        The request goes on as soon as vLLM schedules it.
        """
        known = self._imports.pop(request_id, None)
        if known is None:
            return  # it was cancelled, or is not ours
        coordinator = self._coordinator
        record = coordinator.records[request_id]
        for page in range(known.first_page, len(record.pages)):
            state = record.pages.advance(page, Event.IMPORTED)
            if state is PageState.HOST and known.epoch == coordinator.host_pool.epoch:
                block = coordinator.source.host_block(request_id, page)
                coordinator.source.publish(record.request, page, block)
            coordinator.leases.counters.imported += 1
        self.counters.arrived += 1

    def scheduled(self, record: Record) -> None:
        """The request runs: from now on its pages may be moved.

        Not before: vLLM takes a prompt that has arrived for computed to its last token, which it then
        computes again, in a page that would count as sealed meanwhile.
        """
        record.is_importing = False
        self._coordinator.pressure.note_growth(record)

    def cancel(self, request_id: str, failed: bool = False) -> None:
        """The request has ended, or its transfer has failed: nothing that arrives is used."""
        known = self._imports.pop(request_id, None)
        if known is not None and known.epoch >= 0:
            self.counters.failed += failed
            self.counters.cancelled += not failed
