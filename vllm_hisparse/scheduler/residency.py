"""Page states as data: what a page of a request is, what may happen to it, and what follows.

A page's state says two things at once: whether its rows can be read on the device, and whether its host copy
exists. Both are columns of `STATES`; everything that may happen is a row of `TRANSITIONS`.
`docs/residency.md` is generated from the two tables, and code outside this module never assigns a state: it
calls `PageTable.advance`.
"""

from collections.abc import Iterable
from enum import Enum, IntEnum

__all__ = [
    "EVENTS",
    "STATES",
    "TRANSITIONS",
    "Device",
    "Event",
    "Host",
    "IllegalTransition",
    "PageState",
    "PageTable",
    "Residency",
]


class Device(Enum):
    """A page's copy on the device."""

    LEASED = "leased"  # readable; the request's lease keeps the blocks from reuse
    LOOSE = "loose"  # readable until the pool hands one of the blocks out again
    GONE = "gone"
    ARRIVING = "arriving"  # blocks leased, their contents still on the way


class Host(Enum):
    """A page's copy in the host pool."""

    NONE = "none"
    PENDING = "pending"  # copy on its way; not to be published yet
    VALID = "valid"
    ARRIVING = "arriving"  # leased by the request, its contents still on the way from another engine


class PageState(IntEnum):
    """The states of a page. Values index the per-state counters."""

    DIRTY = 0
    SPILLING = 1
    ENQUEUED = 2
    DRAINING = 3
    LANDING = 4
    CLEAN = 5
    LOOSE = 6
    HOST = 7
    RESTORING = 8
    IMPORTING = 9
    IMPORTING_HOST = 10


STATES: dict[PageState, tuple[Device, Host, str]] = {
    PageState.DIRTY: (Device.LEASED, Host.NONE, "only the device has it"),
    PageState.SPILLING: (Device.LEASED, Host.PENDING, "its copy to the host is planned"),
    PageState.ENQUEUED: (Device.LEASED, Host.PENDING, "every rank has the copy on its stream"),
    PageState.DRAINING: (
        Device.LOOSE,
        Host.PENDING,
        "lease returned while the copy runs; stream order protects it",
    ),
    PageState.LANDING: (
        Device.GONE,
        Host.PENDING,
        "blocks reused while the copy runs; reads wait for it on the stream",
    ),
    PageState.CLEAN: (Device.LEASED, Host.VALID, "both have it"),
    PageState.LOOSE: (
        Device.LOOSE,
        Host.VALID,
        "both have it; the device copy lasts until its blocks are reused",
    ),
    PageState.HOST: (Device.GONE, Host.VALID, "only the host has it; rows are read through the hot region"),
    PageState.RESTORING: (
        Device.ARRIVING,
        Host.VALID,
        "a copy back to the device is running; still read from the host",
    ),
    PageState.IMPORTING: (
        Device.ARRIVING,
        Host.NONE,
        "on its way from the engine that prefilled it; nothing reads it yet",
    ),
    PageState.IMPORTING_HOST: (
        Device.GONE,
        Host.ARRIVING,
        "the same, landing in the host pool",
    ),
}


class Event(Enum):
    """What can happen to a page; see `EVENTS`."""

    SPILL = "spill"
    ENQUEUED = "enqueued"
    COMPLETED = "completed"
    FAILED = "failed"
    UNPIN = "unpin"
    REPIN = "repin"
    REUSED = "reused"
    EVICT = "evict"
    RESTORE = "restore"
    DEDUPLICATE = "deduplicate"
    IMPORTED = "imported"


EVENTS: dict[Event, str] = {
    Event.SPILL: "a host block is leased and the copy goes into the next message",
    Event.ENQUEUED: "every rank has put the copy on its stream",
    Event.COMPLETED: "every rank has seen the copy end, in either direction",
    Event.FAILED: "a rank could not enqueue the copy, and no rank's copy of it runs any more",
    Event.UNPIN: "the device lease goes back; the page stays readable until its blocks are reused",
    Event.REPIN: "a lease is taken on blocks that were not reused yet",
    Event.REUSED: "the pool handed out one of the page's blocks",
    Event.EVICT: "the device lease goes back with the copy there (option `always_host`)",
    Event.RESTORE: "device blocks are leased and the copy goes into the next message",
    Event.DEDUPLICATE: "the other tier has the page too, published by another request",
    Event.IMPORTED: "every rank has the page from the engine that prefilled it",
}

TRANSITIONS: dict[tuple[PageState, Event], PageState] = {
    (PageState.DIRTY, Event.SPILL): PageState.SPILLING,
    (PageState.DIRTY, Event.DEDUPLICATE): PageState.CLEAN,
    (PageState.SPILLING, Event.ENQUEUED): PageState.ENQUEUED,
    (PageState.SPILLING, Event.FAILED): PageState.DIRTY,
    (PageState.ENQUEUED, Event.UNPIN): PageState.DRAINING,
    (PageState.ENQUEUED, Event.COMPLETED): PageState.CLEAN,
    (PageState.DRAINING, Event.REPIN): PageState.ENQUEUED,
    (PageState.DRAINING, Event.REUSED): PageState.LANDING,
    (PageState.DRAINING, Event.COMPLETED): PageState.LOOSE,
    (PageState.LANDING, Event.COMPLETED): PageState.HOST,
    (PageState.CLEAN, Event.UNPIN): PageState.LOOSE,
    (PageState.CLEAN, Event.EVICT): PageState.HOST,
    (PageState.LOOSE, Event.REPIN): PageState.CLEAN,
    (PageState.LOOSE, Event.REUSED): PageState.HOST,
    (PageState.HOST, Event.RESTORE): PageState.RESTORING,
    (PageState.HOST, Event.DEDUPLICATE): PageState.CLEAN,
    (PageState.RESTORING, Event.COMPLETED): PageState.CLEAN,
    (PageState.RESTORING, Event.FAILED): PageState.HOST,
    (PageState.IMPORTING, Event.IMPORTED): PageState.DIRTY,
    (PageState.IMPORTING_HOST, Event.IMPORTED): PageState.HOST,
}

_BY_VALUE = tuple(PageState)  # faster than calling the class
ON_DEVICE = frozenset(s for s, (device, _, _) in STATES.items() if device in (Device.LEASED, Device.LOOSE))
_IS_ON_DEVICE = tuple(s in ON_DEVICE for s in PageState)  # by value
UNPINNABLE = frozenset(s for s, e in TRANSITIONS if e is Event.UNPIN)
SETTLED = frozenset(s for s in UNPINNABLE if STATES[s][1] is Host.VALID)  # of these, with a written host copy
# What a request that reads the page needs a hot region for. A page on its way to the device is not read.
HOST_ONLY = frozenset(s for s, (_, host, _) in STATES.items() if host is not Host.NONE) - ON_DEVICE
RECLAIMED = frozenset(s for s, (device, _, _) in STATES.items() if device is Device.LOOSE)


class Residency(Enum):
    """A request's residency, derived from its pages and never stored."""

    FULL = "full"  # every page readable on the device
    MIXED = "mixed"  # some pages on the host only; a hot region is held
    NONE = "none"  # every page on the host only


class IllegalTransition(RuntimeError):
    """An event that the state of a page does not allow. Names page, state and event."""

    def __init__(self, owner: str, page: int, state: PageState, event: Event) -> None:
        super().__init__(
            f"page {page} of request {owner}: event {event.value!r} is illegal in state {state.name}"
        )


class PageTable:
    """States of one request's pages, indexed by page number from the start of the context.

    Pages come into being by `append` and `extend`; afterwards only `advance` changes a state, so the counters
    hold by construction.
    """

    __slots__ = ("_counts", "_owner", "_states")

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._states = bytearray()
        self._counts = [0] * len(PageState)

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, page: int) -> PageState:
        return _BY_VALUE[self._states[page]]

    def append(self, state: PageState) -> int:
        """Add the next page in `state` (a fresh page, or one adopted from a prefix hit).

        Returns its number.
        """
        self._states.append(state)
        self._counts[state] += 1
        return len(self._states) - 1

    def extend(self, states: Iterable[PageState]) -> None:
        """`append` each of them."""
        first = len(self._states)
        self._states.extend(states)
        for state in PageState:
            self._counts[state] += self._states.count(state, first)

    def advance(self, page: int, event: Event) -> PageState:
        """Apply `event` to `page` and return its new state.

        Raises IllegalTransition; then nothing has changed.
        """
        state = _BY_VALUE[self._states[page]]
        after = TRANSITIONS.get((state, event))
        if after is None:
            raise IllegalTransition(self._owner, page, state, event)
        self._states[page] = after
        self._counts[state] -= 1
        self._counts[after] += 1
        return after

    def count(self, *states: PageState) -> int:
        """How many pages are in any of `states`."""
        return sum(map(self._counts.__getitem__, states))

    @property
    def num_unpinnable(self) -> int:
        """Pages whose device lease may go back now: their host copy exists or is on its stream."""
        return self.count(*UNPINNABLE)

    @property
    def num_host_only(self) -> int:
        """Pages that can only be read from the host."""
        return self.count(*HOST_ONLY)

    def on_device(self, first: int, end: int) -> list[bool]:
        """Whether each of the pages [first, end) can be read on the device."""
        return [_IS_ON_DEVICE[state] for state in self._states[first:end]]

    def pages_in(self, *states: PageState) -> list[int]:
        """Page numbers in any of `states`, ascending.

        O(pages found), and a scan of the states as bytes: 6 us for 100K pages.
        """
        found = []
        for state in states:
            page = -1
            for _ in range(self._counts[state]):
                page = self._states.find(state, page + 1)
                found.append(page)
        found.sort()
        return found

    def first_in(self, *states: PageState) -> int:
        """The first page in any of `states`, -1 without one. A scan of the states as bytes."""
        found = [page for state in states if (page := self._states.find(state)) >= 0]
        return min(found, default=-1)

    @property
    def residency(self) -> Residency:
        """Full, Mixed or None (an empty request is Full)."""
        host_only = self.num_host_only
        if host_only == 0:
            return Residency.FULL
        return Residency.NONE if host_only == len(self._states) else Residency.MIXED

    def check_integrity(self) -> None:
        """Counters equal the states they count. Raises AssertionError."""
        for state in PageState:
            assert self._counts[state] == self._states.count(state), (self._owner, state)
