"""Who could give up pages, in which order, and what that takes.

A page that one request leases can go by itself. One that several share frees its blocks only if all of them
give it up, so they are asked together, after everybody has been asked alone: what many read costs least where
it is.
"""

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from .records import Record

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["Sharers", "Victims"]

Sharers = tuple[Record, ...]
"""Requests that lease the same pages; usually one."""


class Victims:
    """Requests that may have pages whose host copy exists or is on its stream. Changes no page."""

    def __init__(self, coordinator: "HiSparseCoordinator") -> None:
        self._coordinator = coordinator
        self._parts = coordinator.layout.num_parts
        self._rows = coordinator.resident[0].req_to_blocks
        self.clean: dict[Record, None] = {}

    def in_order(
        self, adopted: frozenset[int] = frozenset(), newcomer: Record | None = None
    ) -> Iterator[Sharers]:
        """Those with a region first, then those with most to give; then sharers, the fewest of each first.
        `newcomer`, and those it shares pages with, come after all others.

        Sharers are looked for when it is their turn. `adopted`: blocks that count as leased once more.
        """
        candidates = [(r.region is None, -r.pages.num_unpinnable, n, r) for n, r in enumerate(self.clean)]
        ordered = [record for _, negative, _, record in sorted(candidates) if negative]
        for _, negative, _, record in candidates:
            if not negative:
                self.clean.pop(record, None)
        yield from ((record,) for record in ordered if record is not newcomer)
        found = {group for record in ordered for group in self._sharers(record, adopted)}
        position = {record: n for n, record in enumerate(ordered)}
        groups = sorted(found, key=lambda group: (len(group), [position[record] for record in group]))
        yield from (group for group in groups if newcomer not in group)
        if newcomer in position:
            yield (newcomer,)
            yield from (group for group in groups if newcomer in group)

    def without_region(self, members: Sharers, granted: Collection[Record] = ()) -> list[Record]:
        """Those who need a region to give up pages: not one that has a region, is about to get one anyway, or
        is in `granted`.
        """
        return [r for r in members if r.region is None and not r.needs_region and r not in granted]

    def pages(self, members: Sharers, num_blocks: int, adopted: frozenset[int] = frozenset()) -> list[int]:
        """Pages, coldest first, that free `num_blocks` blocks or as many as there are, if all members give
        them up.

        Blocks that others lease, or are about to (`adopted`), free nothing. Pages of which nothing is known
        go from the tail.
        """
        wanted = -(-num_blocks // self._parts)
        found: list[int] = []
        for page in reversed(self._by_heat(members)):
            blocks = self._coordinator.leases.device_blocks(members[0], page)
            if all(b.ref_cnt == len(members) and b.block_id not in adopted for b in blocks) and (
                len(members) == 1 or self._holders(members, page) == members
            ):
                found.append(page)
                if len(found) >= wanted:
                    break
        return found

    def _by_heat(self, members: Sharers) -> list[int]:
        """Pages of the first member that could go; the last is the coldest for all of them."""
        pages = members[0].pages.pages_in(*members[0].unpinnable)
        heat: dict[int, int] = {}
        for record in members:
            for rank, page in enumerate(reversed(record.hot_pages), 1):
                heat[page] = max(heat.get(page, 0), rank)
        if heat:
            pages.sort(key=lambda page: (-heat.get(page, 0), page))
        return pages

    def _sharers(self, record: Record, adopted: frozenset[int]) -> Iterator[Sharers]:
        """Groups that the record shares pages with. Prefixes are shared, so the first page that is its own
        ends the search, and a group changes where the number of leases does.
        """

        def num_leases(page: int) -> int:
            return row[page].ref_cnt + (row[page].block_id in adopted)

        row = self._rows[record.request_id]
        first = record.pages.first_in(*record.unpinnable)
        if first < 0 or num_leases(first) == 1:
            return
        pages = []
        for page in record.pages.pages_in(*record.unpinnable):
            if num_leases(page) == 1:
                break
            pages.append(page)
        for page, following in pairwise([*pages, -1]):
            if following < 0 or num_leases(following) != num_leases(page):
                members = self._holders(self.clean, page, record)
                if len(members) == num_leases(page):
                    yield members

    def _holders(self, records: Collection[Record], page: int, like: Record | None = None) -> Sharers:
        """Of `records`, those who could give up the page, and have it in the same blocks as `like`, by
        default the first of them.
        """
        like = like or next(iter(records))
        block = self._rows[like.request_id][page]
        return tuple(
            r
            for r in records
            if page < len(r.pages)
            and r.pages[page] in r.unpinnable
            and self._rows[r.request_id][page] is block
        )
